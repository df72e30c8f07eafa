"""Tests of the spans of HTTP requests and WebSocket messages from a real client, over the fake engine."""

from __future__ import annotations

import json
from typing import cast

import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode
from websockets.asyncio.client import connect

from tests.service.conftest import SocketServer, never
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.spans import Spans, attributes, id_of, parent_of, trace_of
from wane.service.app import Application, create_app
from wane.service.engine.pending import Pending
from wane.service.errors import InvalidRequest, Unavailable
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import CURRENT
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.request import PredictRequest, StepRequest

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
STEP = "POST /v1/sessions/{session}/tokens"
MESSAGE = "WS /v1/sessions/{session}/stream"


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def app(spans: Spans) -> Application:
    """An application that records spans. It replaces the fixture `app` of conftest.py, which has no tracing."""
    registry = cast(ModelRegistry, FakeRegistry())
    return create_app(Settings(), registry, Metrics(), on_load_failure=never, tracing=spans.tracing)


async def step(client: httpx.AsyncClient, headers: dict[str, str], session: str = "s") -> httpx.Response:
    return await client.post(f"/v1/sessions/{session}/tokens", json={"tokens": [1]}, headers=headers)


async def test_a_step_is_a_span_of_its_clients_trace(client: httpx.AsyncClient, spans: Spans) -> None:
    response = await step(client, SAMPLED | {"x-request-id": "mine"}, "mine~s")
    assert response.status_code == 200
    (span,) = spans.all
    assert (span.name, span.kind) == (STEP, SpanKind.SERVER)
    assert (f"{trace_of(span):032x}", f"{parent_of(span):016x}") == (TRACE, SPAN)
    assert span.context is not None and dict(span.context.trace_state) == {"vendor": "1"}
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.route": "/v1/sessions/{session}/tokens",
        "http.response.status_code": 200,
        "url.path": "/v1/sessions/mine~s/tokens",
        "wane.request_id": "mine",
        "wane.model": "fake",
        "wane.mode": "recurrent",
        "wane.state": "resident",
        "wane.queue_ms": 0.25,
        "wane.compute_ms": 0.5,
        "wane.batch_items": 0,
    }


async def test_a_request_whose_client_does_not_sample_it_leaves_no_span(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    assert (await step(client, NOT_SAMPLED)).status_code == 200
    assert spans.all == []


async def test_an_unsampled_request_does_not_inherit_the_current_span(
    client: httpx.AsyncClient, engine: FakeEngine, spans: Spans
) -> None:
    seen: list[object] = []
    submit = engine.submit

    def note(request: PredictRequest | StepRequest) -> Pending[Answer]:
        seen.append(CURRENT.get())
        return submit(request)

    engine.submit = note  # type: ignore[method-assign]
    other = spans.tracing.begin(None, [], 0.0)
    assert other is not None
    CURRENT.set(other)
    await step(client, NOT_SAMPLED)
    assert seen == [None]


async def test_a_request_without_a_parent_starts_a_trace_that_the_log_names(
    client: httpx.AsyncClient, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wane.access")
    await step(client, {})
    (record,) = [record for record in caplog.records if record.name == "wane.access"]
    assert vars(record)["fields"]["trace_id"] == f"{trace_of(spans.one(STEP)):032x}"


async def test_each_answer_is_in_the_trace_of_its_request(
    client: httpx.AsyncClient, spans: Spans, engine: FakeEngine
) -> None:
    await step(client, SAMPLED)
    assert CURRENT.get() is None


@pytest.mark.parametrize(
    "error, status, code", [(Unavailable("no"), 503, StatusCode.ERROR), (InvalidRequest("no"), 422, StatusCode.UNSET)]
)
async def test_a_failed_span_has_the_error_code(
    client: httpx.AsyncClient, spans: Spans, engine: FakeEngine, error: Exception, status: int, code: StatusCode
) -> None:
    engine.failure = error
    await step(client, SAMPLED)
    span = spans.one(STEP)
    assert (attributes(span)["http.response.status_code"], span.status.status_code) == (status, code)
    assert attributes(span)["error.type"] == attributes(span)["wane.error"] == getattr(error, "code", None)


async def test_unknown_paths_and_methods_are_not_in_span_names(client: httpx.AsyncClient, spans: Spans) -> None:
    await client.request("BREW", "/v1/coffee")
    assert [span.name for span in spans.all] == ["HTTP unmatched"]


async def test_every_message_of_a_websocket_is_a_span(server: SocketServer, spans: Spans) -> None:
    url = server.url.replace("http://", "ws://") + "/v1/sessions/s/stream"
    async with connect(url, proxy=None, additional_headers=SAMPLED) as socket:
        for tokens in ([1], [], [1]):
            await socket.send(json.dumps({"tokens": tokens}))
            await socket.recv()
    first, bad, last = spans.named(MESSAGE)
    assert {f"{trace_of(span):032x}" for span in (first, bad, last)} == {TRACE}
    assert {f"{parent_of(span):016x}" for span in (first, bad, last)} == {SPAN}
    assert len({id_of(span) for span in (first, bad, last)}) == 3
    statuses = [attributes(span)["http.response.status_code"] for span in (first, bad, last)]
    assert statuses == [200, 422, 200]
    assert attributes(bad)["error.type"] == "invalid_request" and "error.type" not in attributes(last)


async def test_a_traced_request_is_an_exemplar_in_the_openmetrics_format(
    client: httpx.AsyncClient, spans: Spans
) -> None:
    await step(client, SAMPLED)
    await step(client, NOT_SAMPLED)
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    found = await client.get("/metrics", headers=accept | NOT_SAMPLED)
    assert found.headers["content-type"].startswith("application/openmetrics-text")
    named = [line for line in found.text.splitlines() if TRACE in line]
    assert len(named) == 1
    assert named[0].startswith('wane_http_request_seconds_bucket{le="')
    assert f'# {{trace_id="{TRACE}"}}' in named[0] and 'route="/v1/sessions/{session}/tokens"' in named[0]
    plain = await client.get("/metrics", headers=NOT_SAMPLED)
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert TRACE not in plain.text
