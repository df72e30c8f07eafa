"""Every Prometheus metric of the server, in base units (seconds, bytes); labels never hold a session id.

There is no global registry: the code that builds the application makes one `Metrics` and passes it on.

`Histogram` is our own, for what is observed at every token: prometheus_client's takes a lock and walks through its
buckets for each value. Ours is used on the event loop's thread only, finds the bucket by bisection, and becomes a
metric when it is scraped. The latest traced value of a bucket is its exemplar.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class Observed:
    """The values of one set of labels."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket but the last."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value, with the trace that it belongs to."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_all(self, buckets: Sequence[int], total: float) -> None:
        """Counts one value for each of `buckets`, which add up to `total`."""
        counts = self.counts
        for bucket in buckets:
            counts[bucket] += 1
        self.total += total


class Histogram(Collector):
    """Replaces prometheus_client's `Histogram`."""

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
        if not labels:
            self.labels()  # there from the start, at 0
        registry.register(self)

    def labels(self, *values: str) -> Observed:
        """The values of these labels. Raises ValueError for another number of labels."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)} of them")
        found = self._observed.get(values)
        if found is None:
            found = self._observed[values] = Observed(self._bounds)
        return found

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value of a histogram without labels."""
        self.labels().observe(value, trace_id)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        names: list[str] = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        for values, observed in list(self._observed.items()):
            pairs = zip(names, map(float, accumulate(observed.counts)), strict=True)
            exemplars = observed.exemplars
            counts = [(*pair, exemplars[index]) if index in exemplars else pair for index, pair in enumerate(pairs)]
            family.add_metric(values, counts, sum_value=observed.total)
        yield family


# From 20 microseconds (a wait in an idle queue) to a minute (twice the longest deadline by default). From 0.1 ms to
# 10 ms, where steps and windows are, each bound is a third to two thirds above the one before, which is the largest
# error of a quantile; beyond, it is 2 to 3 times that. Bounds are round: "how many took longer than 5 ms" is exact.
REQUEST_SECONDS = (
    *(0.000_02, 0.000_05),
    *(0.000_1, 0.000_15, 0.000_2, 0.000_3, 0.000_5, 0.000_7),
    *(0.001, 0.001_5, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
# Runs are shorter than requests: to 1 s.
RUN_SECONDS = REQUEST_SECONDS[:21]
# Batches are counted, and their size is bounded by max_batch_size: powers of two.
BATCH_ITEMS = tuple(float(2**power) for power in range(11))
# Share of a batch's positions that is padding: bounded by one half, see the batcher.
PADDING_SHARE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
# Total variation of two distributions, in [0, 1]: float32 noise to entirely different, by decades.
TOTAL_VARIATION = tuple(10.0**-power for power in range(8, -1, -1))
# The same scale, with a bucket for exact answers.
ERROR_BOUND = (0.0, *TOTAL_VARIATION)


class Metrics:
    """The metrics, as attributes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets, registry)

        # HTTP and WebSocket requests.
        self.http_requests = counter("wane_http_requests", "HTTP requests answered.", "route", "method", "status")
        self.http_request_seconds = histogram(
            "wane_http_request_seconds", "HTTP requests, start to end.", REQUEST_SECONDS, "route"
        )
        self.request_errors = counter(
            "wane_request_errors",
            "Requests and messages that failed, by the failure's code and the name of the key, which may be none.",
            "code",
            "key",
        )
        self.websockets = gauge("wane_websockets", "WebSockets that are open.")
        self.websocket_messages = counter("wane_websocket_messages", "Messages answered, by their status.", "status")
        self.websocket_message_seconds = histogram(
            "wane_websocket_message_seconds", "Messages of WebSockets, from received to answered.", REQUEST_SECONDS
        )
        self.connections_rejected = counter(
            "wane_connections_rejected",
            "Connections that the server ended, by reason: too_many, long_head, long_trailers, slow_head, slow_body, "
            "full (of bodies and messages), malformed, handshake (of a WebSocket), unread (cut off), frames (of a "
            "WebSocket, without a message).",
            "reason",
        )
        # By route, method and status, the seconds and traces of requests that are not counted yet.
        self._counted: dict[tuple[str, str, int], list[tuple[float, str | None]]] = {}
        # The metrics of these labels are looked up once: there are few, and many requests.
        self._of_request = cache(
            lambda route, *rest: (self.http_requests.labels(route, *rest), self.http_request_seconds.labels(route))
        )
        self._of_message = cache(lambda status: self.websocket_messages.labels(status))
        self.ready = gauge("wane_ready", "1 from when every model is loaded, or failed to be, until the server drains.")
        self.model_loads = counter(
            "wane_model_loads",
            "Models asked to be loaded, at start or later: outcome loaded, same or failed.",
            "outcome",
        )
        self.model_info = gauge("wane_model_info", "1 for each loaded model.", "model", "version", "device")

        # Answers, by operation (predict, step, score, generate, compare) and the mode that was used.
        self.answers = counter("wane_answers", "Requests answered by an engine.", "model", "operation", "mode")
        self.answer_seconds = histogram(
            "wane_answer_seconds",
            "Predictions and steps, by phase: queue, compute, total.",
            REQUEST_SECONDS,
            "model",
            "mode",
            "phase",
        )

        self.answer_error_bound = histogram(
            "wane_answer_error_bound",
            "Error bounds of predictions and steps, total variation; answers without a bound are not counted.",
            ERROR_BOUND,
            "model",
            "mode",
        )
        self.answers_top1_proved = counter(
            "wane_answers_top1_proved",
            "Predictions and steps whose first token is proved to be the never-interrupted model's.",
            "model",
            "mode",
        )

        # The batcher.
        self.queue_items = gauge("wane_queue_items", "Work that waits for the runner.", "model")
        self.queue_wait_seconds = counter(
            "wane_queue_wait_seconds",
            "Time that work has waited for the runner, summed over all of it, once it was run or dropped; its rate is "
            "how much was waiting on average. What is refused waits for nothing.",
            "model",
            "role",
        )
        self.batch_items = histogram("wane_batch_items", "Items of a batch.", BATCH_ITEMS, "model", "role")
        self.batch_seconds = histogram("wane_batch_seconds", "Runs of a graph.", RUN_SECONDS, "model", "role")
        self.batch_padding_share = histogram(
            "wane_batch_padding_share", "Share of a batch that is padding.", PADDING_SHARE, "model", "role"
        )
        self.queue_dropped = counter(
            "wane_queue_dropped",
            "Work dropped before its batch: reason abandoned (the client left) or deadline.",
            "model",
            "reason",
        )
        self.queue_rejected = counter("wane_queue_rejected", "Work refused because the queue was full.", "model")
        self.queue_failed = counter("wane_queue_failed", "Work whose run failed.", "model")

        # Sessions.
        self.sessions_resident = gauge("wane_sessions_resident", "Sessions whose state is in memory.", "model")
        self.sessions_parked = gauge(
            "wane_sessions_parked", "Sessions that were used here and have no state in memory; once a second.", "model"
        )
        self.state_bytes = gauge("wane_state_bytes", "Memory in use for states.", "model")
        self.state_rebuilds = counter("wane_state_rebuilds", "States rebuilt from a tail.", "model")
        self.state_replays = counter(
            "wane_state_replays", "States brought up to tokens that other replicas had appended.", "model"
        )
        self.states_evicted = counter("wane_states_evicted", "States dropped to make room for others.", "model")
        self.sessions_evicted_memory = counter(
            "wane_sessions_evicted_memory", "Sessions ended early for lack of memory.", "model"
        )
        self.state_faults = counter("wane_state_faults", "Faults of kept states: must stay 0.", "model")
        self.steps_replayed = counter("wane_steps_replayed", "Steps answered again without appending.", "model")
        self.step_conflicts = counter("wane_step_conflicts", "Comparisons lost against another writer.", "model")

        # The store that replicas share.
        self.store_up = gauge("wane_store_up", "1 while the session store can be reached.")
        self.store_roundtrip_seconds = histogram(
            "wane_store_roundtrip_seconds", "Round trips to the session store.", REQUEST_SECONDS, "store"
        )
        self.store_roundtrip_commands = histogram(
            "wane_store_roundtrip_commands", "Commands of a round trip to the session store.", BATCH_ITEMS, "store"
        )
        self.sessions_not_durable = gauge(
            "wane_sessions_not_durable", "Sessions with tokens that only this process has."
        )
        self.sessions_conflict_discarded = counter(
            "wane_sessions_conflict_discarded", "Sessions whose tokens that were not durable were lost."
        )

        # Agreement of window and recurrent answers.
        self.agreement_compared = counter("wane_agreement_compared", "Pairs of answers compared.", "model")
        self.agreement_top1_matches = counter(
            "wane_agreement_top1_matches", "Pairs with the same first token.", "model"
        )
        self.agreement_top1_proved = counter(
            "wane_agreement_top1_proved", "Pairs whose first tokens the window alone proves to be the same.", "model"
        )
        self.agreement_total_variation = histogram(
            "wane_agreement_total_variation", "Total variation of a pair.", TOTAL_VARIATION, "model"
        )
        self.agreement_bound_violations = counter(
            "wane_agreement_bound_violations", "Pairs further apart than is claimed: must stay 0.", "model"
        )

        # Shadows: live answers that were sampled, to be given by the other mode too.
        self.shadow = counter(
            "wane_shadow",
            "Sampled answers, by outcome: compared, dropped (there was no idle time), failed.",
            "model",
            "outcome",
        )
        self.shadow_cpu_seconds = counter("wane_shadow_cpu_seconds", "Processor time of shadows.", "model")

    def count_request(self, route: str, method: str, status: int, seconds: float, trace_id: str | None = None) -> None:
        """Counts an HTTP request; those of one turn of the event loop together. `trace_id`: of one that is traced."""
        if not self._counted:
            asyncio.get_running_loop().call_soon(self._count_requests)
        labels = route, method, status
        known = self._counted.get(labels)
        if known is None:
            known = self._counted[labels] = []
        known.append((seconds, trace_id))

    def _count_requests(self) -> None:
        counted, self._counted = self._counted, {}
        for labels, known in counted.items():
            requests, durations = self._of_request(*labels)
            requests.inc(len(known))
            for seconds, trace_id in known:
                durations.observe(seconds, trace_id)

    def count_message(self, status: int, seconds: float, trace_id: str | None = None) -> None:
        """Counts a message of a WebSocket that was answered."""
        self._of_message(status).inc()
        self.websocket_message_seconds.observe(seconds, trace_id)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics as text, and its content type: OpenMetrics, with exemplars, if the client accepts it."""
        self._count_requests()
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
