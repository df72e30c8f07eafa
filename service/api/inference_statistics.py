"""Statistics for the Open Inference Protocol's `stats` routes: the number and the durations of inference requests, for
each model version.

Only requests to the `infer` routes are counted. `/v1/report` has the statistics of all requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from wane.service.api.schemas.inference import InferStatisticsDocument, ModelStatisticsDocument, TimedDocument
from wane.service.engine.engine import Engine
from wane.service.types.request import Latency


@dataclass(slots=True)
class Timed:
    """The number of requests, and the sum of their durations in seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one request with this duration."""
        self.count += 1
        self.seconds += seconds

    def document(self) -> TimedDocument:
        """Returns the number of requests, and the sum of their durations in nanoseconds."""
        return TimedDocument(self.count, round(1e9 * self.seconds))


@dataclass(slots=True)
class InferenceStatistics:
    """Counts and durations of the inference requests for one model version."""

    success: Timed = field(default_factory=Timed)
    fail: Timed = field(default_factory=Timed)
    queue: Timed = field(default_factory=Timed)
    compute_input: Timed = field(default_factory=Timed)
    compute_infer: Timed = field(default_factory=Timed)
    compute_output: Timed = field(default_factory=Timed)
    sequences: int = 0
    last_ms: int = 0

    def succeeded(self, sequences: int, latency: Latency, input_s: float, output_s: float, total_s: float) -> None:
        """Counts an answered request with `sequences` sequences. `latency` is the latency of the engine's work. The
        durations of decoding the input, of encoding the output and of the whole request are `input_s`, `output_s` and
        `total_s`, in seconds."""
        self.sequences += sequences
        self.last_ms = time.time_ns() // 10**6
        self.success.add(total_s)
        self.queue.add(latency.queue_ms / 1e3)
        self.compute_input.add(input_s)
        self.compute_infer.add(latency.compute_ms / 1e3)
        self.compute_output.add(output_s)

    def document(self, engine: Engine) -> ModelStatisticsDocument:
        """Returns the statistics in the protocol's format. The counts of cache hits and misses are 0, because Wane has
        no response cache."""
        nothing = TimedDocument(0, 0)
        return ModelStatisticsDocument(
            name=engine.name,
            version=engine.version,
            last_inference=self.last_ms,
            inference_count=self.sequences,
            execution_count=self.success.count,
            inference_stats=InferStatisticsDocument(
                success=self.success.document(),
                fail=self.fail.document(),
                queue=self.queue.document(),
                compute_input=self.compute_input.document(),
                compute_infer=self.compute_infer.document(),
                compute_output=self.compute_output.document(),
                cache_hit=nothing,
                cache_miss=nothing,
            ),
            batch_stats=[],
        )


class InferenceCounter(WeakKeyDictionary[Engine, InferenceStatistics]):
    """The statistics of all model versions. The statistics of a version are deleted together with its engine."""

    def of(self, engine: Engine) -> InferenceStatistics:
        """Returns the statistics of a model version."""
        return self.setdefault(engine, InferenceStatistics())
