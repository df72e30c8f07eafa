"""mosec: a Rust server that batches requests and passes them to Python workers."""

from __future__ import annotations

import os

from mosec import Server, Worker

from benchmarks.peers.window_model import LARGEST_BATCH, Prediction, WindowModel

LONGEST_WAIT_MS = 1
WORKERS = int(os.environ["BENCH_WORKERS"])


class Window(Worker):
    """A worker process with the model. mosec calls `forward` with each batch."""

    def __init__(self) -> None:
        self.model = WindowModel.served()

    def forward(self, data: list[dict[str, list[int]]]) -> list[dict[str, list[Prediction]]]:
        return [{"predictions": answer} for answer in self.model.predict([request["tokens"] for request in data])]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Window, num=WORKERS, max_batch_size=LARGEST_BATCH, max_wait_time=LONGEST_WAIT_MS)
    server.run()
