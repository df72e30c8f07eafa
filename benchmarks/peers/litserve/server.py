"""LitServe: FastAPI passes requests to worker processes, which batch them."""

import os

import litserve

from benchmarks.peers.window_model import LARGEST_BATCH, Prediction, WindowModel

LONGEST_WAIT_S = 0.001
WORKERS = int(os.environ["BENCH_WORKERS"])


class Window(litserve.LitAPI):
    """The model in LitServe. LitServe calls `batch` to join up to `max_batch_size` decoded requests into one batch, and
    then calls `predict` with this batch."""

    def setup(self, device: str) -> None:  # noqa: ARG002 LitServe names it
        self.model = WindowModel.served()

    def decode_request(self, request: dict[str, list[int]]) -> list[int]:
        return request["tokens"]

    def batch(self, inputs: list[list[int]]) -> list[list[int]]:
        return inputs

    def predict(self, windows: list[list[int]]) -> list[list[Prediction]]:
        return self.model.predict(windows)

    def unbatch(self, output: list[list[Prediction]]) -> list[list[Prediction]]:
        return output

    def encode_response(self, output: list[Prediction]) -> dict[str, list[Prediction]]:
        return {"predictions": output}


if __name__ == "__main__":
    server = litserve.LitServer(
        Window(max_batch_size=LARGEST_BATCH, batch_timeout=LONGEST_WAIT_S),
        accelerator="cpu",
        workers_per_device=WORKERS,
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
