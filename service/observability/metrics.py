"""All Prometheus metrics of the server, in base units (seconds, bytes). Labels never contain a session id.

There is no global metric registry. The code that builds the application creates one `Metrics` and passes it to all
parts.

prometheus_client's `Histogram` takes a lock and scans its buckets for each value. That is too slow for values that are
observed for every token. The `Histogram` of this module is used on the event loop's thread only. It finds a value's
bucket by bisection, and builds its samples when Prometheus scrapes the metrics. A bucket's exemplar is its latest value
from a sampled trace.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import add
from pathlib import Path
from threading import Lock, get_ident

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from wane.service.observability.continued import Continued

COUNTED_TOGETHER = 64  # the largest number of requests, or of batches of answers, that are not counted yet


class Observed:
    """A histogram's counts for one combination of label values. Exemplars are kept by bucket."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` has the upper bound of each bucket except the last bucket, which has no bound."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value. `trace_id` is the id of the value's trace, or None if the trace is not sampled."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_all(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Counts values without a trace."""
        buckets = np.searchsorted(self._bounds, values)
        self.counts = [*map(add, self.counts, np.bincount(buckets, minlength=len(self.counts)).tolist())]
        self.total += float(np.sum(values))

    def add(self, other: Observed) -> None:
        """Adds the counts of a histogram with the same buckets."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.exemplars |= other.exemplars

    def cumulative(self) -> list[tuple[float, int]]:
        """Returns the upper bound of each bucket, and the number of values that are at most this bound. The last bound
        is infinite."""
        return list(zip((*self._bounds, math.inf), accumulate(self.counts), strict=True))


class Late(Collector):
    """The first collector of a registry: counts what is counted only when the metrics are read, because many values
    take less time together. Reads on another thread have only what was counted before."""

    def __init__(self) -> None:
        self.counts: list[Callable[[], None]] = []
        """Functions of the thread that has created this object. Each counts what it has not counted yet."""
        self._thread = get_ident()

    def settle(self) -> None:
        """Counts everything. Must be called on the event loop's thread."""
        for count in self.counts:
            count()

    def collect(self) -> Iterator[Metric]:
        if get_ident() == self._thread:
            self.settle()
        return iter(())


class Histogram(Collector):
    """A histogram whose `observe` takes less time than that of prometheus_client's histogram."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._observed: dict[tuple[str, ...], Observed] = {}
        self._parts: dict[Observed, tuple[str, ...]] = {}
        self._lock = Lock()  # a part that ends while another thread collects must be counted once
        if not labels:
            self.labels()  # a histogram without labels has only these counts, which are exported as 0 from the start
        registry.register(self)

    def labels(self, *values: str) -> Observed:
        """Returns the counts for these label values. Raises ValueError if the number of values is wrong."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, but {len(values)} values were passed")
        observed = self._observed.get(values)
        if observed is None:
            observed = self._observed[values] = Observed(self._bounds)
        return observed

    def part(self, *values: str) -> Observed:
        """Returns counts of a part of the values with these labels. The metric has the sum of all parts. `end` must be
        called after the last value."""
        self.labels(*values)
        part = Observed(self._bounds)
        self._parts[part] = values
        return part

    def end(self, part: Observed) -> None:
        """Adds the counts of a part to the metric for good, so that the part can be freed."""
        with self._lock:
            self.labels(*self._parts.pop(part)).add(part)

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value of a histogram without labels."""
        self.labels().observe(value, trace_id)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        with self._lock:
            parts = [(observed, values) for values, observed in self._observed.copy().items()]
            sums = {values: Observed(self._bounds) for _, values in parts}
            for part, values in (*parts, *self._parts.copy().items()):
                sums.setdefault(values, Observed(self._bounds)).add(part)
        for values, observed in sums.items():
            pairs = [(floatToGoString(bound), float(count)) for bound, count in observed.cumulative()]
            exemplars = observed.exemplars
            counts = [(*pair, exemplars[index]) if index in exemplars else pair for index, pair in enumerate(pairs)]
            family.add_metric(values, counts, sum_value=observed.total)
        yield family


def quantile(cumulative: Sequence[tuple[float, int]], share: float) -> float | None:
    """Returns the quantile `share`, from 0 to 1, of a histogram, like Prometheus's `histogram_quantile`. Assumes that
    values are spread evenly within a bucket, and that values of the last, unbounded bucket equal the largest bound.
    Returns None if the histogram has no values.

    `cumulative`: see `Observed.cumulative`."""
    _, total = cumulative[-1]
    if not total:
        return None
    for (low, before), (high, count) in pairwise([(0.0, 0), *cumulative]):
        if count >= share * total and count > before:
            return low if math.isinf(high) else low + (high - low) * (share * total - before) / (count - before)
    raise AssertionError("the last bucket does not count all values: this is a bug")


# Bucket bounds for the durations of requests, from 20 microseconds (the wait in an idle queue) to a minute (twice the
# default of request_timeout_ms). From 0.1 ms to 10 ms, the range of steps and windows, each bound exceeds the previous
# bound by a third to two thirds, which is the largest relative error of a quantile.
REQUEST_SECONDS = (
    *(0.000_02, 0.000_05),
    *(0.000_1, 0.000_15, 0.000_2, 0.000_3, 0.000_5, 0.000_7),
    *(0.001, 0.001_5, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
# Bucket bounds for the durations of runs. Runs are shorter than requests, so the bounds end at 1 s.
RUN_SECONDS = REQUEST_SECONDS[:21]
BATCH_ITEMS = tuple(float(2**power) for power in range(11))
# The share of a batch's positions that are padding is at most one half (`service/batching/batch.py`).
PADDING_SHARE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
# From 1e-8 (float32 rounding) to 1 (disjoint distributions).
TOTAL_VARIATION = tuple(10.0**-power for power in range(8, -1, -1))
ERROR_BOUND = (0.0, *TOTAL_VARIATION)  # exact answers have a bucket of their own


class Metrics:
    """All metrics of the server, as attributes."""

    def __init__(self, counts_file: Path | None = None) -> None:
        """`counts_file`: see `Continued`."""
        self.registry = registry = CollectorRegistry()
        self._exported: Collector = registry if counts_file is None else Continued(registry, counts_file)
        self.late = Late()
        registry.register(self.late)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets, registry)

        # HTTP and WebSocket requests.
        self.http_requests = counter("wane_http_requests", "HTTP requests answered.", "route", "method", "status")
        self.http_request_seconds = histogram(
            "wane_http_request_seconds", "Latency of HTTP requests.", REQUEST_SECONDS, "route"
        )
        self.request_errors = counter(
            "wane_request_errors",
            "Failed requests and messages, by error code and by the name of the API key (empty without a key).",
            "code",
            "key",
        )
        self.websockets = gauge("wane_websockets", "Open WebSockets.")
        self.websocket_messages = counter("wane_websocket_messages", "Messages answered, by their status.", "status")
        self.websocket_message_seconds = histogram(
            "wane_websocket_message_seconds", "Latency of WebSocket messages.", REQUEST_SECONDS
        )
        self.connections_rejected = counter(
            "wane_connections_rejected",
            "Rejected connections, by reason: too_many, long_head, long_trailers, slow_head, slow_body, full (no room "
            "in the receive budget), malformed, handshake (an invalid WebSocket handshake), unread (the client read "
            "nothing), frames (too many WebSocket frames without a message).",
            "reason",
        )
        # The durations and trace ids of requests that are not counted yet, by route, method and status.
        self._counted: defaultdict[tuple[str, str, int], list[tuple[float, str | None]]] = defaultdict(list)
        self.late.counts.append(self._count_requests)
        # Caches the metrics of each combination of label values.
        self._of_request = cache(
            lambda route, *rest: (self.http_requests.labels(route, *rest), self.http_request_seconds.labels(route))
        )
        self._of_message = cache(self.websocket_messages.labels)
        self.ready = gauge(
            "wane_ready", "1 after every model was loaded or failed to load; 0 before that and while draining."
        )
        self.model_loads = counter(
            "wane_model_loads",
            "Loads of models, by outcome: loaded, same (the bundle was loaded already) or failed.",
            "outcome",
        )
        self.model_info = gauge("wane_model_info", "1 for each loaded model.", "model", "version", "device")

        # Metrics of answers, by operation (predict, step, score, generate, compare) and by mode.
        self.answers = counter("wane_answers", "Requests answered by an engine.", "model", "operation", "mode")
        self.answer_seconds = histogram(
            "wane_answer_seconds",
            "Latency of predictions and steps in the engine, by phase (queue, compute, total).",
            REQUEST_SECONDS,
            "model",
            "mode",
            "phase",
        )

        self.answer_error_bound = histogram(
            "wane_answer_error_bound",
            "Error bounds of predictions and steps, in total variation. Answers without a bound are not counted.",
            ERROR_BOUND,
            "model",
            "mode",
        )
        self.answers_top1_proved = counter(
            "wane_answers_top1_proved",
            "Predictions and steps whose most probable token is proved to equal that of a never-interrupted session.",
            "model",
            "mode",
        )

        # The batcher.
        self.queue_items = gauge("wane_queue_items", "Work items that wait for the runner.", "model")
        self.queue_wait_seconds = counter(
            "wane_queue_wait_seconds",
            "Total time that work items waited for the runner, added when an item runs or is dropped. Its rate is "
            "the average number of waiting items. Rejected items are not included.",
            "model",
            "role",
        )
        self.batch_items = histogram("wane_batch_items", "Work items per batch.", BATCH_ITEMS, "model", "role")
        self.batch_seconds = histogram("wane_batch_seconds", "Duration of graph runs.", RUN_SECONDS, "model", "role")
        self.batch_padding_share = histogram(
            "wane_batch_padding_share", "Share of a batch's positions that are padding.", PADDING_SHARE, "model", "role"
        )
        self.queue_dropped = counter(
            "wane_queue_dropped",
            "Work items dropped before they ran, by reason: abandoned (the client disconnected) or deadline.",
            "model",
            "reason",
        )
        self.queue_rejected = counter(
            "wane_queue_rejected",
            "Work items rejected because the queue was full, and long requests rejected because they or other requests "
            "would miss their deadlines.",
            "model",
        )
        self.queue_failed = counter("wane_queue_failed", "Work items whose run failed.", "model")

        # Sessions.
        self.sessions_resident = gauge("wane_sessions_resident", "Sessions whose state is in memory.", "model")
        self.sessions_parked = gauge(
            "wane_sessions_parked",
            "Sessions of this process without a state in memory. Updated once a second.",
            "model",
        )
        self.state_bytes = gauge("wane_state_bytes", "Bytes of memory in use for states.", "model")
        self.state_rebuilds = counter("wane_state_rebuilds", "States rebuilt from a session's last tokens.", "model")
        self.state_replays = counter(
            "wane_state_replays", "States updated with tokens that other replicas appended.", "model"
        )
        self.states_evicted = counter(
            "wane_states_evicted", "States of sessions evicted from memory to make room for other states.", "model"
        )
        self.prefix_lookups = counter(
            "wane_prefix_lookups",
            "Prompts looked up by their first tokens, by outcome: hit (a kept state was found) or miss.",
            "model",
            "outcome",
        )
        self.prefix_cached_tokens = counter(
            "wane_prefix_cached_tokens", "Tokens of prompts that did not run, because their state was kept.", "model"
        )
        self.prefix_bytes = gauge(
            "wane_prefix_bytes", "Bytes of memory in use for states of prompts; a part of wane_state_bytes.", "model"
        )
        self.sessions_evicted_memory = counter(
            "wane_sessions_evicted_memory", "Sessions evicted because memory ran out.", "model"
        )
        self.steps_replayed = counter(
            "wane_steps_replayed", "Retried steps that were answered without appending again.", "model"
        )
        self.step_conflicts = counter(
            "wane_step_conflicts", "Session commits rejected because another writer had committed first.", "model"
        )

        # The store that replicas share.
        self.store_up = gauge("wane_store_up", "1 while the session store is reachable.")
        self.store_roundtrip_seconds = histogram(
            "wane_store_roundtrip_seconds", "Latency of round trips to the session store.", REQUEST_SECONDS, "store"
        )
        self.store_roundtrip_commands = histogram(
            "wane_store_roundtrip_commands", "Commands per round trip to the session store.", BATCH_ITEMS, "store"
        )

        # Agreement of window and recurrent answers.
        self.agreement_compared = counter(
            "wane_agreement_compared", "Compared pairs of a window answer and a recurrent answer.", "model"
        )
        self.agreement_top1_matches = counter(
            "wane_agreement_top1_matches",
            "Compared pairs whose two answers have the same most probable token.",
            "model",
        )
        self.agreement_top1_proved = counter(
            "wane_agreement_top1_proved",
            "Compared pairs whose window answer alone proves that the most probable token is the same.",
            "model",
        )
        self.agreement_total_variation = histogram(
            "wane_agreement_total_variation",
            "Total variation distance between the two answers of a compared pair.",
            TOTAL_VARIATION,
            "model",
        )
        self.agreement_bound_violations = counter(
            "wane_agreement_bound_violations",
            "Compared pairs that contradict their error bound or their proof. Must stay 0.",
            "model",
        )

        # Live accuracy: the next token of a session, looked up in the list of the answer before it. Judged steps, hits,
        # the sum of their reciprocal ranks, and unjudged steps.
        def live(name: str, text: str) -> Counter:
            return counter(f"wane_live_{name}", f"{text} Only with WANE_LIVE_ACCURACY.", "model", "version")

        self.live_accuracy = (
            live("judged", "Steps whose first token was looked up in the list of the answer before it."),
            live("hits", "Judged steps whose token was in this list; divided by judged: recall@K."),
            live("reciprocal_ranks", "Sum of 1 / rank of the hits in their lists; divided by judged: MRR@K."),
            live("unjudged", "Steps whose earlier answer is not kept."),
        )

        # Shadow requests. For a sample of the answered requests, the server also computes the answer in the other mode.
        self.shadow = counter(
            "wane_shadow",
            "Sampled answers, by outcome: compared, dropped (no idle time), failed.",
            "model",
            "outcome",
        )
        self.shadow_cpu_seconds = counter("wane_shadow_cpu_seconds", "CPU time of shadow requests.", "model")

    def count_request(self, route: str, method: str, status: int, seconds: float, trace_id: str | None = None) -> None:
        """Counts an HTTP request. `trace_id` is the id of the request's trace, or None if the trace is not sampled."""
        known = self._counted[route, method, status]
        known.append((seconds, trace_id))
        if trace_id is not None or len(known) >= COUNTED_TOGETHER:
            self._count_requests()

    def _count_requests(self) -> None:
        for labels, known in self._counted.items():
            requests, durations = self._of_request(*labels)
            requests.inc(len(known))
            for seconds, trace_id in known:
                durations.observe(seconds, trace_id)
        self._counted.clear()

    def prefix_counter(self, model: str) -> Callable[[int], None]:
        """Returns a function that counts a prompt that was looked up by its first tokens, and the number of tokens that
        need not run."""
        miss, hit = (self.prefix_lookups.labels(model, result).inc for result in ("miss", "hit"))
        cached = self.prefix_cached_tokens.labels(model).inc

        def count(tokens: int) -> None:
            if tokens:
                hit()
                cached(tokens)
            else:
                miss()

        return count

    def count_message(self, status: int, seconds: float, trace_id: str | None = None) -> None:
        self._of_message(status).inc()
        self.websocket_message_seconds.observe(seconds, trace_id)

    async def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """Like `render`, but encodes on another thread: eight models take 20 ms."""
        self.late.settle()
        return await asyncio.to_thread(self.render, accept)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all metrics as text, and the content type. The format is OpenMetrics with exemplars if `accept`
        allows it, and the Prometheus text format otherwise."""
        encode, content_type = choose_encoder(accept)
        return encode(self._exported), content_type
