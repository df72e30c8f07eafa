"""Ray Serve: a proxy passes requests to replicas, which batch them."""

from __future__ import annotations

import os

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.peers.window_model import LARGEST_BATCH, Prediction, WindowModel

LONGEST_WAIT_S = 0.001
REPLICAS = int(os.environ["BENCH_WORKERS"])


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=1000)
class Window:
    def __init__(self) -> None:
        self.model = WindowModel.served()

    @serve.batch(max_batch_size=LARGEST_BATCH, batch_wait_timeout_s=LONGEST_WAIT_S)
    async def predict(self, windows: list[list[int]]) -> list[list[Prediction]]:
        return self.model.predict(windows)

    async def __call__(self, request: Request) -> dict[str, list[Prediction]]:
        body = await request.json()
        return {"predictions": await self.predict(body["tokens"])}


if __name__ == "__main__":
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["BENCH_PORT"])})
    serve.run(Window.bind(), blocking=True)
