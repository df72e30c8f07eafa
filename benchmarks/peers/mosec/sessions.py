"""mosec with sessions: one worker process holds the states of all sessions. For each batch of requests, it steps the
batch's sessions in one run of the graph.

mosec's routes have no parameters, so a request names its session in its body.
"""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker

from benchmarks.peers.step_model import StepModel
from benchmarks.peers.window_model import LARGEST_BATCH, Prediction

LONGEST_WAIT_MS = 1


class Step(Worker):
    """The worker process with the model and the sessions. mosec calls `forward` with each batch."""

    def __init__(self) -> None:
        self.model = StepModel.served()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, list[Prediction]]]:
        sessions = [request["session"] for request in data]
        tokens = [request["tokens"][0] for request in data]
        return [{"predictions": answer} for answer in self.model.step(sessions, tokens)]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Step, num=1, max_batch_size=LARGEST_BATCH, max_wait_time=LONGEST_WAIT_MS)
    server.run()
