"""BentoML: an ASGI server with a dispatcher that batches requests adaptively."""

from __future__ import annotations

import os

import bentoml

from benchmarks.peers.window_model import LARGEST_BATCH, Prediction, WindowModel

LONGEST_LATENCY_MS = 1000
WORKERS = int(os.environ["BENCH_WORKERS"])


@bentoml.service(workers=WORKERS, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Window:
    def __init__(self) -> None:
        self.model = WindowModel.served()

    @bentoml.api(batchable=True, max_batch_size=LARGEST_BATCH, max_latency_ms=LONGEST_LATENCY_MS)
    def predict(self, windows: list[list[int]]) -> list[list[Prediction]]:
        return self.model.predict(windows)
