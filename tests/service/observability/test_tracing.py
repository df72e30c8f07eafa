"""Tests of the sampling of requests, and of the spans of requests and batches."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from tests.service.spans import Spans, attributes, id_of, linked, parent_of, trace_of
from wane.service.observability.tracing import Parent, Sampling, Traced, Tracing, trace_batch

ROOT = Path(__file__).parents[3]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
SAMPLED = Parent(int(TRACE, 16), int(SPAN, 16), sampled=True)
NOT_SAMPLED = SAMPLED._replace(sampled=False)
BELOW = SAMPLED._replace(trace_id=1)  # a trace with this id is sampled at every ratio above 0
ABOVE = SAMPLED._replace(trace_id=2**128 - 1)
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
BATCH: dict[str, Any] = {"model": "m", "role": "step", "device": "cpu", "items": 3, "began_s": 2.0, "ended_s": 2.5}


@pytest.mark.parametrize("flags, sampled", [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_traceparent_names_the_parent_span_and_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    assert Parent.of(f"00-{TRACE}-{SPAN}-{flags}".encode()) == SAMPLED._replace(sampled=sampled)


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        b"00",
        f"ff-{TRACE}-{SPAN}-01".encode(),
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"00-{TRACE.upper()}-{SPAN}-01".encode(),
        f"00-{TRACE}-{SPAN}-1".encode(),
        f"00-{TRACE}-{SPAN}-01-more".encode(),
        f"00-{TRACE}-{SPAN}-01\n".encode(),
    ],
)
def test_an_invalid_traceparent_is_ignored(given: bytes | None) -> None:
    assert Parent.of(given) is None


def test_a_later_version_may_have_more_fields() -> None:
    assert Parent.of(f"01-{TRACE}-{SPAN}-01-more".encode()) == SAMPLED


@pytest.mark.parametrize(
    "name, share, taken, left",
    [
        ("", "", [None, SAMPLED], [NOT_SAMPLED]),
        ("parentbased_always_on", "", [None, SAMPLED], [NOT_SAMPLED]),
        ("parentbased_always_off", "", [SAMPLED], [None, NOT_SAMPLED]),
        ("parentbased_traceidratio", "0", [SAMPLED], [None, NOT_SAMPLED]),
        ("parentbased_traceidratio", "1", [None, SAMPLED], [NOT_SAMPLED]),
        ("always_on", "", [None, SAMPLED, NOT_SAMPLED], []),
        ("always_off", "", [], [None, SAMPLED, NOT_SAMPLED]),
        ("traceidratio", "0.5", [BELOW, BELOW._replace(sampled=False)], [ABOVE]),
        ("traceidratio", "", [None, SAMPLED, ABOVE], []),
    ],
)
def test_the_environment_variables_choose_the_sampler(
    name: str, share: str, taken: list[Parent | None], left: list[Parent | None]
) -> None:
    sampling = Sampling(name, share)
    assert all(sampling.takes(parent) for parent in taken)
    assert not any(sampling.takes(parent) for parent in left)


def test_the_sampler_samples_its_ratio_of_requests_without_a_parent() -> None:
    sampling = Sampling("parentbased_traceidratio", "0.25")
    taken = sum(sampling.takes(None) for _ in range(10_000))
    assert 2200 < taken < 2800  # the limits are more than six standard deviations from the mean


@pytest.mark.parametrize(
    "name, share, said",
    [("jaeger_remote", "", "jaeger_remote"), ("traceidratio", "2", "2"), ("traceidratio", "x", "x")],
)
def test_an_unknown_sampler_is_logged_and_every_request_is_sampled(
    name: str, share: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Sampling(name, share).takes(ABOVE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and said in record.getMessage()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "wane"},
        ENDPOINT | {"OTEL_SDK_DISABLED": "true"},
        ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_is_off_without_an_endpoint_or_when_disabled(environment: dict[str, str]) -> None:
    assert Tracing.open(environment, "1") is None


def test_an_unsupported_protocol_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing.open(ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "1")
    assert tracing is not None
    tracing.close()
    assert ["http/protobuf, because grpc is not supported" in record.getMessage() for record in caplog.records] == [
        True
    ]


def test_a_warning_says_that_tracing_is_off_if_opentelemetry_is_not_installed() -> None:
    program = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as if it were not installed
from wane.service import server
from wane.service.observability.tracing import Tracing
assert Tracing.open({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "1") is None
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, "OpenTelemetry is not installed" in ended.stderr) == (0, True)


def begun(spans: Spans, parent: Parent | None = None, *tracestate: bytes) -> Traced:
    traced = spans.tracing.begin(parent, tracestate, 1.0)
    assert traced is not None
    return traced


def test_a_request_continues_its_clients_trace_and_state() -> None:
    spans = Spans()
    traced = begun(spans, SAMPLED, b"one=1", b"two=2")
    traced.end("POST /x", 200, {"http.route": "/x", "wane.position": None, "wane.queue_ms": 0.5}, None, 3.0)
    span = spans.one("POST /x")
    assert (traced.trace_id, parent_of(span)) == (TRACE, SAMPLED.span_id)
    assert span.context is not None and dict(span.context.trace_state) == {"one": "1", "two": "2"}
    assert attributes(span) == {"http.route": "/x", "wane.queue_ms": 0.5}
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time == 2_000_000_000
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("status, code", [(404, StatusCode.UNSET), (503, StatusCode.ERROR)])
def test_only_a_server_error_fails_the_span(status: int, code: StatusCode) -> None:
    spans = Spans()
    begun(spans).end("GET /x", status, {}, "its_code", 2.0)
    span = spans.one("GET /x")
    assert (span.status.status_code, attributes(span)) == (code, {"error.type": "its_code"})
    assert parent_of(span) is None


def test_a_batch_is_exported_once_and_linked_to_every_request_in_it() -> None:
    spans = Spans()
    first, second = begun(spans), begun(spans, SAMPLED)
    trace_batch({first: 1.25, second: 1.5}, failed=0, **BATCH)
    first.end("first", 200, {}, None, 3.0)
    second.end("second", 200, {}, None, 3.0)
    batch, run = spans.one("batch"), spans.one("run")
    one, two = spans.one("first"), spans.one("second")
    assert trace_of(batch) == trace_of(run) == trace_of(one) != trace_of(two)
    assert (parent_of(batch), parent_of(run)) == (id_of(one), id_of(batch))
    assert linked(batch) == [id_of(one), id_of(two)]
    queues = {parent_of(span): span for span in spans.named("queue")}
    assert set(queues) == {id_of(one), id_of(two)}
    assert (linked(queues[id_of(one)]), linked(queues[id_of(two)])) == ([], [id_of(batch)])
    known = {"wane.model": "m", "wane.graph": "step", "wane.batch.items": 3}
    assert attributes(batch) == known
    assert attributes(run) == known | {"wane.device": "cpu"}


def test_the_spans_of_a_request_are_nested_in_time() -> None:
    spans = Spans()
    first = begun(spans)
    trace_batch({first: 1.25}, failed=0, **BATCH)
    queue, run = spans.one("queue"), spans.one("run")
    assert queue.start_time and queue.end_time and run.start_time and run.end_time
    assert queue.end_time - queue.start_time == 750_000_000
    assert queue.end_time == run.start_time == spans.one("batch").start_time
    assert run.end_time - run.start_time == 500_000_000


def test_a_failed_run_has_a_failed_span() -> None:
    spans = Spans()
    trace_batch({begun(spans): 1.0}, failed=2, **BATCH)
    for name in ("run", "batch"):
        assert spans.one(name).status.status_code is StatusCode.ERROR
        assert attributes(spans.one(name))["wane.batch.failed"] == 2


def test_a_call_is_a_span_and_its_headers_continue_the_trace() -> None:
    spans = Spans()
    with spans.tracing.calling("GET", "/v1/report", SAMPLED) as headers:
        pass
    span = spans.one("GET /v1/report")
    assert (trace_of(span), parent_of(span)) == SAMPLED[:2]
    assert Parent.of(headers["traceparent"].encode()) == (trace_of(span), id_of(span), True)
    with spans.tracing.calling("GET", "/", NOT_SAMPLED) as headers:
        assert headers == {}


def test_the_span_of_a_failed_call_has_the_reason() -> None:
    spans = Spans()
    with pytest.raises(OSError), spans.tracing.calling("GET", "/", None):
        raise OSError("nobody there")
    span = spans.one("GET /")
    assert [event.name for event in span.events] == ["exception"]
    assert span.status.status_code is StatusCode.ERROR
