"""Traces requests with OpenTelemetry. Tracing requires the extra `otel`, and is enabled by the variable
`OTEL_EXPORTER_OTLP_ENDPOINT`.

    POST /v1/sessions/{session}/tokens      the request in the middleware. Its parent is the client's span
      queue                                 from queueing until the run starts. One for each of the request's batches
      batch                                 from the start of the run until the results are delivered. Has a link
                                            to every sampled request in the batch
        run                                 the run of the model's graph

A batch is exported once, in the trace of its first sampled request. The `queue` spans of the batch's other sampled
requests link to the batch's span.

This module decides whether a request is sampled before it calls OpenTelemetry. The decision reads two bytes of
`traceparent` or a random number, so a request that is not sampled has no further cost. The spans of a sampled request
are created when the request or its batch has ended, from times that are also measured for requests that are not
sampled. A thread of OpenTelemetry exports the spans. OpenTelemetry drops spans if the queue of this thread is full.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from random import getrandbits
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from wane.service.observability.logs import SERVICE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind, Tracer

TRACEPARENT = re.compile(
    rb"(?!ff)(?!00.{53}-)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
SAMPLER = "OTEL_TRACES_SAMPLER"
SHARE = "OTEL_TRACES_SAMPLER_ARG"
SAMPLERS = ("always_on", "always_off", "traceidratio")
PARENT_BASED = "parentbased_"
FLUSH_S = 5  # the longest time for the export of the last spans at shutdown

Attribute = str | bool | int | float


class Parent(NamedTuple):
    """A `traceparent` header: the trace's id, the id of the client's span, and whether that span is sampled."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def of(cls, traceparent: bytes | None) -> Parent | None:
        """Parses the header. Returns None if it is missing or invalid under the W3C's recommendation."""
        match = None if traceparent is None else TRACEPARENT.fullmatch(traceparent)
        return None if match is None else cls(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & 1))


class Sampling:
    """Decides which requests are traced. `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` configure the decision. By
    default requests with a sampled parent and requests without a parent are traced."""

    BITS = 64  # the number of low bits of a trace's id that determine whether the trace is sampled

    def __init__(self, name: str = "", share: str = "") -> None:
        name = name or f"{PARENT_BASED}always_on"
        if name.removeprefix(PARENT_BASED) not in SAMPLERS:
            SERVICE.warning("%s is %s, which is not supported; parentbased_always_on is used", SAMPLER, name)
            name = f"{PARENT_BASED}always_on"
        self.follows_parent = name.startswith(PARENT_BASED)
        part = 0.0 if name.endswith("always_off") else 1.0
        if name.endswith("traceidratio"):
            try:
                part = float(share or 1)
            except ValueError:
                part = -1.0
            if not 0 <= part <= 1:
                SERVICE.warning("%s is %s, but must be a number from 0 to 1; 1 is used", SHARE, share)
                part = 1.0
        self.below = round(part * (1 << self.BITS))

    def takes(self, parent: Parent | None) -> bool:
        if parent is None:
            return getrandbits(self.BITS) < self.below
        if self.follows_parent:
            return parent.sampled
        return parent.trace_id % (1 << self.BITS) < self.below


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The trace of a sampled request. All times are in seconds on the clock of `time.perf_counter`. `offset_ns` is the
    Unix epoch time minus `time.perf_counter`, in nanoseconds. It is the same for all spans of a request."""

    tracer: Tracer
    span: Span
    offset_ns: int

    @property
    def trace_id(self) -> str:
        """The trace's id in the format of `traceparent`."""
        return f"{self.span.get_span_context().trace_id:032x}"

    def end(self, name: str, status: int, attributes: Mapping[str, object], error: str | None, ended_s: float) -> None:
        """Ends the request's span. Omits `attributes` that are None. Marks the span as failed if `status` is 500 or
        more."""
        span = self.span
        span.update_name(name)
        span.set_attributes({key: value for key, value in attributes.items() if isinstance(value, Attribute)})
        if error is not None:
            span.set_attribute("error.type", error)
        if status >= 500:
            _fail(span, error)
        span.end(self._ns(ended_s))

    def skipped(self, queued_s: float, left_s: float, reason: str) -> None:
        """Creates the span of a work item that left the queue without a run."""
        span = self._child("queue", queued_s)
        span.set_attribute("error.type", reason)
        _fail(span, reason)
        span.end(self._ns(left_s))

    def _child(self, name: str, started_s: float, of: Span | None = None, to: Sequence[Span] = ()) -> Span:
        """Starts a child span. The span's parent is `of`, or the request's span if `of` is None. `to` are the spans
        that the new span links to."""
        from opentelemetry.trace import Link, set_span_in_context

        return self.tracer.start_span(
            name,
            set_span_in_context(of or self.span),
            links=[Link(span.get_span_context()) for span in to],
            start_time=self._ns(started_s),
        )

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self.offset_ns


def trace_batch(
    waiting: Mapping[Traced, float],
    model: str,
    role: str,
    device: str,
    items: int,
    failed: int,
    began_s: float,
    ended_s: float,
) -> None:
    """Creates the spans of a finished batch. `waiting` has the sampled requests in the batch, with the time at which
    each request was queued. `failed` is the number of items in the batch that have no result."""
    first = next(iter(waiting))
    handed_out_s = time.perf_counter()
    batch = first._child("batch", began_s, to=[traced.span for traced in waiting])
    run = first._child("run", began_s, of=batch)
    for traced, queued_s in waiting.items():
        queue = traced._child("queue", queued_s, to=() if traced is first else [batch])
        queue.set_attribute("wane.model", model)
        queue.end(traced._ns(began_s))
    for span in (run, batch):
        span.set_attributes({"wane.model": model, "wane.graph": role, "wane.batch.items": items})
        if failed:
            span.set_attribute("wane.batch.failed", failed)
            _fail(span, "the model failed to run")
    run.set_attribute("wane.device", device)
    run.end(first._ns(ended_s))
    batch.end(first._ns(handed_out_s))


CURRENT: ContextVar[Traced | None] = ContextVar("wane.traced", default=None)
"""The trace of the request that is being answered, or None."""


class Tracing:
    """Creates and exports spans between `open` and `close`."""

    def __init__(self, provider: TracerProvider, sampling: Sampling) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("wane")
        self._sampling = sampling

    @classmethod
    def open(cls, environment: Mapping[str, str], version: str | None = None) -> Tracing | None:
        """Starts tracing as the OTEL_... variables configure it. Returns None if these variables set no endpoint or
        disable traces. Logs a warning and returns None if the extra is not installed."""
        is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(environment.get, ENDPOINTS)):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        except ImportError:
            SERVICE.warning("a trace endpoint is set, but OpenTelemetry is not installed: pip install '.[otel]'")
            return None
        protocol = next(filter(None, map(environment.get, PROTOCOLS)), PROTOCOL)
        if protocol != PROTOCOL:
            SERVICE.warning("traces are exported as %s, because %s is not supported", PROTOCOL, protocol)
        attributes: dict[str, Attribute] = {"service.name": "wane"}
        if version is not None:
            attributes["service.version"] = version
        resource = Resource.create(attributes).merge(OTELResourceDetector().detect())  # the variables override Wane
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, Sampling(environment.get(SAMPLER, ""), environment.get(SHARE, "")))

    def begin(self, parent: Parent | None, tracestate: Sequence[bytes], started_s: float) -> Traced | None:
        """Starts the span of a request. Returns the request's `Traced`, or None if the request is not sampled."""
        if not self._sampling.takes(parent):
            return None
        from opentelemetry.trace import SpanKind

        return self._start("request", SpanKind.SERVER, parent, tracestate, started_s)

    @contextmanager
    def calling(self, method: str, path: str, parent: Parent | None) -> Iterator[dict[str, str]]:
        """Creates the span of a call to a server. Yields the request headers with which that server continues the
        trace."""
        if not self._sampling.takes(parent):
            yield {}
            return
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._start(f"{method} {path}", SpanKind.CLIENT, parent, (), time.perf_counter()).span
        span.set_attribute("http.request.method", method)
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
        try:
            yield headers
        except Exception as error:
            span.record_exception(error)
            _fail(span, str(error))
            raise
        finally:
            span.end()

    def _start(
        self, name: str, kind: SpanKind, parent: Parent | None, tracestate: Sequence[bytes], started_s: float
    ) -> Traced:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

        context = Context()
        if parent is not None:
            state = TraceState.from_header([value.decode("latin-1") for value in tracestate])
            flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
            remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags, trace_state=state)
            context = set_span_in_context(NonRecordingSpan(remote), context)
        offset_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(name, context, kind, start_time=int(started_s * 1e9) + offset_ns)
        return Traced(self._tracer, span, offset_ns)

    def close(self) -> None:
        """Exports the remaining spans. Waits at most FLUSH_S seconds."""
        ending = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(FLUSH_S)


def _fail(span: Span, why: str | None) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, why)
