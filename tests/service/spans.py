"""Access to finished spans, in the form in which the exporter receives the spans."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from wane.service.observability.tracing import Sampling, Tracing


class Spans:
    """The finished spans of `tracing`. A test gets a span by the span's name."""

    def __init__(self, sampler: str = "", share: str = "") -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider, Sampling(sampler, share))

    @property
    def all(self) -> list[ReadableSpan]:
        """All finished spans, in the order in which they ended."""
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    identity: int = span.context.span_id
    return identity


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    identity: int = span.context.trace_id
    return identity


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]
