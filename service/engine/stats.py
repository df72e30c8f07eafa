"""Statistics of an engine since its start, for `/v1/report` and Prometheus."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from wane.service.batching.cost_model import Costs
from wane.service.engine.agreement import AgreementBySource, AgreementStatistics, Source, violates
from wane.service.engine.live_accuracy import LiveReport
from wane.service.observability.metrics import COUNTED_TOGETHER, Metrics, Observed, quantile
from wane.service.sessions.sessions import SessionsReport
from wane.service.types.answer import Agreement, Answer
from wane.service.types.common import Identity, Mode, Result, Served, says
from wane.service.types.request import Latency

logger = logging.getLogger("wane.engine")

PHASES = ("queue", "compute", "total")
REACHED = (*(step * 10.0**power for power in range(-4, 0) for step in (1, 2, 5)), 1.0)
"""The bounds of the buckets for error bounds of windows. Neighbours differ by a factor of 2 to 2.5."""

Cumulative = Sequence[tuple[float, int]]
"""The cumulative buckets of a histogram: for each, its upper bound and the number of values that are at most the bound.
"""

ShadowOutcome = Literal["compared", "dropped", "failed"]


class Bucket(Result):
    """A bucket of durations in milliseconds."""

    le_ms: Annotated[float | None, says("the upper bound of the bucket; null: no bound")]
    count: Annotated[int, says("the number of values that are at most the upper bound")]


class DurationsReport(Result):
    """The durations of one phase, in milliseconds."""

    p50_ms: Annotated[
        float | None, says("the median, as Prometheus computes it from the buckets; null: there are no durations")
    ]
    p90_ms: Annotated[float | None, says("the 90th percentile, computed likewise")]
    p99_ms: Annotated[float | None, says("the 99th percentile, computed likewise")]
    count: Annotated[int, says("the number of durations")]
    sum_ms: Annotated[float, says("their sum")]
    buckets: Annotated[list[Bucket], says("cumulative buckets; those of several replicas can be added")]

    @classmethod
    def of(cls, cumulative: Cumulative, sum_ms: float) -> Self:
        p50, p90, p99 = [quantile(cumulative, share) for share in (0.5, 0.9, 0.99)]
        buckets = [Bucket(None if math.isinf(le) else le, count) for le, count in cumulative]
        return cls(p50, p90, p99, count=cumulative[-1][1], sum_ms=sum_ms, buckets=buckets)


class PhasesReport(Result):
    """The latency of each phase."""

    queue: Annotated[DurationsReport, says("the time in the queue")]
    compute: Annotated[DurationsReport, says("the time of the run")]
    total: Annotated[DurationsReport, says("the time from the start of the request in the engine to its answer")]


class ModeReport(Result):
    """The number and latency of predictions and steps in one mode."""

    requests: Annotated[int, says("the number of predictions and steps")]
    latency: Annotated[PhasesReport, says("the latency of each phase")]


class BoundBucket(Result):
    """A bucket of error bounds."""

    le: Annotated[float | None, says("the upper bound of the bucket; null: no bound")]
    count: Annotated[int, says("the number of values that are at most the upper bound")]


class WindowReport(Result):
    """The error bounds that answers from windows reached, of those answers that have a bound and left tokens out."""

    k: Annotated[int, says("a power of two; the answers are those from windows of k to 2k - 1 tokens")]
    prove: Annotated[bool, says("true: the proof of the field `prove` was searched for")]
    answers: Annotated[int, says("the number of answers")]
    top1_proved: Annotated[int, says("the number of answers whose most probable token is proved")]
    p50: Annotated[float | None, says("the median of the error bounds, as Prometheus computes it from the buckets")]
    p90: Annotated[float | None, says("the 90th percentile, computed likewise")]
    buckets: Annotated[list[BoundBucket], says("cumulative buckets of the error bounds")]

    @classmethod
    def of(cls, k: int, prove: bool, cumulative: Cumulative, top1_proved: int) -> Self:
        p50, p90 = [quantile(cumulative, share) for share in (0.5, 0.9)]
        buckets = [BoundBucket(None if math.isinf(le) else le, count) for le, count in cumulative]
        return cls(k, prove, cumulative[-1][1], top1_proved, p50, p90, buckets)


class ShadowReport(Result):
    """The comparisons of sampled live answers with another way of computing them."""

    compared: Annotated[int, says("the number of sampled answers that were compared")]
    dropped: Annotated[int, says("the number that was not compared, mostly for lack of idle time")]
    failed: Annotated[int, says("the number whose comparison failed")]
    cpu_s: Annotated[float, says("the shadows' processor time, in seconds")]


class ModelReport(Served):
    """One model's statistics since the start."""

    modes: Annotated[dict[Mode, ModeReport], says("the predictions and steps of each mode")]
    windows: Annotated[list[WindowReport], says("the error bounds that answers from windows reached")]
    operations: Annotated[dict[str, int], says("the number of answers of each kind of request")]
    agreement: Annotated[AgreementBySource, says("the agreement of recurrent mode and windows over all comparisons")]
    shadow: Annotated[ShadowReport, says("the comparisons of sampled live answers")]
    live_accuracy: Annotated[
        LiveReport | None,
        says("how often the answers of steps listed the session's next token; null without the setting of this name"),
    ]
    sessions: Annotated[SessionsReport, says("the sessions of the model")]
    costs: Costs


class Report(Result):
    """The body of `/v1/report`: measurements since the start."""

    device: Annotated[str, says("the device that runs the models")]
    models: Annotated[list[ModelReport], says("the measurements of each model")]


def durations(seconds: Observed) -> DurationsReport:
    """Returns the report of a histogram of seconds."""
    return DurationsReport.of([(1e3 * le, count) for le, count in seconds.cumulative()], 1e3 * seconds.total)


Seconds = Sequence[float] | NDArray[np.float64]


class Made(NamedTuple):
    """Answers in one mode. phases: their durations in seconds, for each phase. variations: their error bounds. proved:
    the number of those whose most probable token is proved. operation: the kind of the request. requests: the number
    of requests that are counted as answered."""

    mode: Mode
    phases: tuple[Seconds, Seconds, Seconds]
    variations: Sequence[float | None] = ()
    proved: int = 0
    operation: str = ""
    requests: int = 0


class ModeStats:
    """Counts one mode's predictions in Prometheus's metrics, which the report reads too. Each metric is looked up only
    once."""

    def __init__(self, metrics: Metrics, model: str, mode: Mode) -> None:
        self._seconds = metrics.answer_seconds
        self._phases = [metrics.answer_seconds.part(model, mode.value, phase) for phase in PHASES]
        self._error_bound = metrics.answer_error_bound.labels(model, mode.value)
        self._proved = metrics.answers_top1_proved.labels(model, mode.value)

    def report(self) -> PhasesReport:
        return PhasesReport(*map(durations, self._phases))

    def made(self, counted: Sequence[Made]) -> None:
        for seconds, values in zip(self._phases, zip(*[made.phases for made in counted], strict=True), strict=True):
            seconds.observe_all(np.concatenate(values))
        self._error_bound.observe_all(
            [variation for made in counted for variation in made.variations if variation is not None]
        )
        self._proved.inc(sum([made.proved for made in counted]))

    def end(self) -> None:
        """Leaves the counts to the metrics of the model. Must be called last."""
        for phase in self._phases:
            self._seconds.end(phase)


def _phases(latency: Latency) -> tuple[Seconds, Seconds, Seconds]:
    queue_ms, compute_ms, total_ms = latency.phases()
    return (queue_ms / 1e3,), (compute_ms / 1e3,), (total_ms / 1e3,)


class Stats:
    """Counts one model's answers, the latencies of the answers for each mode and phase, and the agreement of compared
    pairs of answers."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._answered: Counter[tuple[str, Mode]] = Counter()
        self._modes: dict[Mode, ModeStats] = {}
        # by the number of tokens, a power of two, and whether the proof was searched for
        self._windows: defaultdict[tuple[int, bool], Observed] = defaultdict(lambda: Observed(REACHED))
        self._proved: Counter[tuple[int, bool]] = Counter()
        self._metric = cache(lambda operation, mode: metrics.answers.labels(model, operation, mode.value))
        self._agreement = AgreementStatistics()
        self._by_source = {source: AgreementStatistics() for source in Source}
        self._shadows: Counter[ShadowOutcome] = Counter()
        self._shadow_cpu_s = 0.0
        self._made: list[Made] = []  # answers that are not counted yet
        metrics.late.counts.append(self._count_made)
        metrics.agreement_bound_violations.labels(model)  # exports the metric as 0 from the start

    def answered(self, operation: str, mode: Mode, requests: int = 1) -> None:
        """Counts answered requests of one kind, `operation`, under the mode that answered them."""
        self._answered[operation, mode] += requests
        self._metric(operation, mode).inc(requests)

    def took(self, mode: Mode, latency: Latency) -> None:
        """Counts the latency of one prediction in `mode`. A prediction in mode `both` counts under `both`, and each of
        its parts under the part's mode."""
        self.add(Made(mode, _phases(latency)))

    def made(self, answer: Answer, operation: str | None) -> None:
        """Counts an answer. `operation` is None if the caller was cancelled: only the answer's latency and bound are
        then counted."""
        phases, bounds = _phases(answer.latency), (answer.error_bound,)
        self.add(Made(answer.mode, phases, bounds, answer.top1_proved, operation or "", operation is not None))

    def add(self, made: Made) -> None:
        """Counts the answers of a batch, together with those of later batches (see `Late`)."""
        self._made.append(made)
        if len(self._made) >= COUNTED_TOGETHER or len(made.variations) > COUNTED_TOGETHER:
            self._count_made()

    def _count_made(self) -> None:
        waiting, self._made = self._made, []
        by_mode, requests = defaultdict[Mode, list[Made]](list), Counter[tuple[str, Mode]]()
        for made in waiting:
            by_mode[made.mode].append(made)
            requests[made.operation, made.mode] += made.requests
        for mode, counted in by_mode.items():
            if mode not in self._modes:
                self._modes[mode] = ModeStats(self._metrics, self._model, mode)
            self._modes[mode].made(counted)
        for (operation, mode), count in requests.items():
            if count:
                self.answered(operation, mode, count)

    def reached(self, k: int, prove: bool, variation: float, proved: bool) -> None:
        """Counts the error bound of an answer from a window of `k` tokens that left tokens out. prove: whether the
        proof was searched for. proved: whether the most probable token is proved."""
        key = 1 << (k.bit_length() - 1), prove
        self._windows[key].observe(variation)
        self._proved[key] += proved

    def shadowed(self, outcome: ShadowOutcome) -> None:
        """Counts one sampled answer under its outcome."""
        self._shadows[outcome] += 1
        self._metrics.shadow.labels(self._model, outcome).inc()

    def shadow_took(self, cpu_s: float) -> None:
        """Counts the processor time of a shadow."""
        self._shadow_cpu_s += cpu_s
        self._metrics.shadow_cpu_seconds.labels(self._model).inc(cpu_s)

    def compared(self, agreement: Agreement, source: Source) -> None:
        """Counts one compared pair of answers."""
        self._agreement.add(agreement)
        self._by_source[source].add(agreement)
        self._metrics.agreement_compared.labels(self._model).inc()
        self._metrics.agreement_top1_matches.labels(self._model).inc(agreement.top1_match)
        self._metrics.agreement_top1_proved.labels(self._model).inc(agreement.top1_proved)
        self._metrics.agreement_total_variation.labels(self._model).observe(agreement.total_variation)
        if violates(agreement):
            self._metrics.agreement_bound_violations.labels(self._model).inc()
            logger.error(
                "the answers of the window and of the recurrent mode contradict their bound or proof",
                extra={"fields": {"model": self._model, **asdict(agreement)}},
            )

    def end(self) -> None:
        """Leaves the counts to the metrics of the model's next version. Must be called last."""
        self._count_made()
        self._metrics.late.counts.remove(self._count_made)
        for mode in self._modes.values():
            mode.end()

    def report(
        self, served: Identity, live_accuracy: LiveReport | None, sessions: SessionsReport, costs: Costs
    ) -> ModelReport:
        """Returns the model's entry of `/v1/report`."""
        self._count_made()
        operations: Counter[str] = Counter()
        for (operation, _), requests in self._answered.items():
            operations[operation] += requests
        modes = {
            mode: ModeReport(
                requests=self._answered["predict", mode] + self._answered["step", mode],
                latency=self._modes[mode].report(),
            )
            for mode in Mode
            if mode in self._modes
        }
        windows = [
            WindowReport.of(*key, bounds.cumulative(), self._proved[key])
            for key, bounds in sorted(self._windows.items())
        ]
        sources = {source: statistics.report() for source, statistics in self._by_source.items()}
        agreement = AgreementBySource(**asdict(self._agreement.report()), sources=sources)
        counts = self._shadows
        shadow = ShadowReport(counts["compared"], counts["dropped"], counts["failed"], self._shadow_cpu_s)
        return ModelReport(*served, modes, windows, operations, agreement, shadow, live_accuracy, sessions, costs)
