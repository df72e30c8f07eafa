"""Statistics of inference requests for the Open Inference Protocol's `stats`: counts and times for each model version.

Only the requests to `infer` count. `/v1/report` has the figures of all requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from wane.service.api.schemas.inference import ModelStatisticsDocument, TimedDocument
from wane.service.engine.engine import Engine
from wane.service.types import Latency


@dataclass(slots=True)
class Timed:
    """A count and a sum of seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self.count += 1
        self.seconds += seconds

    def document(self) -> TimedDocument:
        """Returns the count, and the sum in nanoseconds."""
        return {"count": self.count, "ns": round(1e9 * self.seconds)}


@dataclass(slots=True)
class InferenceStatistics:
    """The inference requests of one model version."""

    success: Timed = field(default_factory=Timed)
    fail: Timed = field(default_factory=Timed)
    queue: Timed = field(default_factory=Timed)
    compute_input: Timed = field(default_factory=Timed)
    compute_infer: Timed = field(default_factory=Timed)
    compute_output: Timed = field(default_factory=Timed)
    sequences: int = 0
    last_ms: int = 0

    def succeeded(self, sequences: int, latency: Latency, input_s: float, output_s: float, total_s: float) -> None:
        """Counts an answered request for `sequences` sequences. `latency`: of the engine's work."""
        self.sequences += sequences
        self.last_ms = time.time_ns() // 10**6
        self.success.add(total_s)
        self.queue.add(latency.queue_ms / 1e3)
        self.compute_input.add(input_s)
        self.compute_infer.add(latency.compute_ms / 1e3)
        self.compute_output.add(output_s)

    def document(self, engine: Engine) -> ModelStatisticsDocument:
        """Returns the statistics in the protocol's shape. No answer comes from a response cache, because there is
        none."""
        nothing: TimedDocument = {"count": 0, "ns": 0}
        return {
            "name": engine.name,
            "version": engine.version,
            "last_inference": self.last_ms,
            "inference_count": self.sequences,
            "execution_count": self.success.count,
            "inference_stats": {
                "success": self.success.document(),
                "fail": self.fail.document(),
                "queue": self.queue.document(),
                "compute_input": self.compute_input.document(),
                "compute_infer": self.compute_infer.document(),
                "compute_output": self.compute_output.document(),
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [],
        }


class InferenceCounter:
    """The statistics of all model versions; those of a version end with its engine."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Engine, InferenceStatistics] = WeakKeyDictionary()

    def of(self, engine: Engine) -> InferenceStatistics:
        """Returns the statistics of a model version."""
        found = self._found.get(engine)
        if found is None:
            found = self._found[engine] = InferenceStatistics()
        return found
