"""Steps and predictions that come whole do not go by way of the application, and mean the same; all else does."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.service.conftest import SocketServer, never
from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.fake_engine import FakeRegistry
from tests.service.slow_client import HANDSHAKE, MALFORMED, frame, statuses, until
from wane.service.api import encode
from wane.service.app import Application, create_app
from wane.service.auth.keyring import Principal
from wane.service.engine.engine import Engine
from wane.service.errors import RateLimited
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.server import WEBSOCKETS, protocols
from wane.service.settings import Settings
from wane.service.types import StepRequest

PREDICT = "/v1/predict"
PATH = "/v1/sessions/a/tokens"
ROUTE = "/v1/sessions/{session}/tokens"
WAIT_S = 120.0


class OneEngine(FakeRegistry):
    """A registry of one real engine, on a store that answers at once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine  # type: ignore[assignment]

    async def engine_for(  # type: ignore[override]
        self, session: str, model: str | None = None, deadline: float | None = None
    ) -> Engine:
        return self.engine_at_once(session)

    def engine_at_once(self, session: str) -> Engine:  # type: ignore[override]
        self.check_ready()
        return cast(Engine, self.engine)

    async def close(self) -> None:
        """The harness's fixture ends the engine."""


class ServerHarness(SocketServer):
    """The server over a harness's engine; `asked` has the paths of the requests that came to the application."""

    def __init__(self, harness: EngineHarness, **changes: Any) -> None:
        settings = Settings(**changes)
        self.harness = harness
        self.metrics = Metrics()
        self.catalog_ = OneEngine(harness.engine)
        app = create_app(settings, cast(ModelRegistry, self.catalog_), self.metrics, on_load_failure=never)
        super().__init__(app, self.catalog_)
        self.asked: list[str] = []
        self.clients: list[Client] = []

        async def note(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.asked.append(scope["path"])
            await Application.__call__(app, scope, receive, send)

        named = WEBSOCKETS | protocols(settings, self.metrics, app.fast_path)
        named["http"] = self.counting(named["http"])
        self.config = uvicorn.Config(note, port=0, **named, log_config=None)

    def counted(self, status: int, route: str = ROUTE) -> float:
        """How many requests to the route were counted with this status."""
        labels = {"route": route, "method": "POST", "status": str(status)}
        return self.metrics.registry.get_sample_value("wane_http_requests_total", labels) or 0.0


Serve = Callable[..., Any]


@pytest.fixture
def serve(make_harness: MakeHarness) -> Serve:
    """Serves a harness's engine with sessions a, b and c, whose states are resident."""

    @asynccontextmanager
    async def serving(harness: EngineHarness | None = None, **changes: Any) -> AsyncIterator[ServerHarness]:
        harness = harness or make_harness()
        for name in "abc":
            await harness.engine.create_session(name)
            await harness.engine.submit(StepRequest(name, (5,)))
        server = ServerHarness(harness, **changes)
        task = asyncio.create_task(server.serve())
        await server.listening.wait()
        try:
            async with asyncio.timeout(WAIT_S):
                yield server
        finally:
            for client in server.clients:
                client.writer.close()
            server.should_exit = True
            await task

    return serving


class Client:
    """One connection, which is spoken to in bytes."""

    def __init__(self, server: ServerHarness, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, server: ServerHarness) -> Client:
        """One of the server, which closes it in the end."""
        server.clients.append(cls(server, *await asyncio.open_connection(*server.address)))
        return server.clients[-1]

    async def say(self, *parts: bytes) -> None:
        """Every part in a packet of its own, once the one before it was looked at."""
        await self.server.say(self.writer, *parts)

    async def hear(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """The next answer: status, headers, document."""
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(body)

    async def ask(self, *parts: bytes) -> tuple[int, dict[str, Any]]:
        await self.say(*parts)
        status, _, document = await self.hear()
        return status, document


def step(body: object, *headers: str, path: str = PATH, version: str = "1.1") -> bytes:
    """A request, whole."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: wane", f"content-length: {len(content)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


def in_two(request: bytes) -> tuple[bytes, bytes]:
    """A request whose body comes later."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def shown(document: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is another one every time."""
    return {name: value for name, value in document.items() if name not in ("latency", "request_id", "session")}


async def test_a_step_never_reaches_the_application_and_is_answered_as_it_would_answer(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        await client.say(step({"tokens": [6]}, "x-request-id: mine"))
        status, headers, fast = await client.hear()
        assert (status, headers["x-request-id"], server.asked) == (200, "mine", [])
        other = "/v1/sessions/b/tokens"
        await client.say(*in_two(step({"tokens": [6]}, "x-request-id: mine", path=other)))
        status, general, slow = await client.hear()
        assert (status, server.asked) == (200, [other])
        assert shown(fast) == shown(slow)
        assert (fast["session"], fast["position"], fast["latency"].keys()) == ("a", 2, slow["latency"].keys())
        assert headers.keys() == general.keys()
        assert headers["content-type"] == general["content-type"]
        assert server.counted(200) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"tokens": [6, 7]},
        {"tokens": [6], "mode": "window", "window": 4, "top_k": 2},
        {"tokens": [6, 7, 8], "mode": "both"},
        {"tokens": [6], "tolerance": 0},
    ],
    ids=["auto", "window", "both", "tolerance"],
)
async def test_a_prediction_never_reaches_the_application_and_is_answered_as_it_would_answer(
    serve: Serve, body: dict[str, Any]
) -> None:
    async with serve() as server:
        client = await Client.of(server)
        status, fast = await client.ask(step(body, path=PREDICT))
        assert (status, server.asked) == (200, [])
        status, slow = await client.ask(*in_two(step(body, path=PREDICT)))
        assert (status, server.asked) == (200, [PREDICT])
        for document in (fast, slow):
            for part in document.get("modes", {}).values():
                del part["latency"]
        assert shown(fast) == shown(slow)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": "ab"}, 200),
        ({"inputs": [[5], [6]]}, 200),
        ({"session": "a"}, 200),
        ({"tokens": [6], "model": "another"}, 404),
        ({"tokens": [6], "window": 0}, 422),
        ({"tokens": []}, 422),
        ({}, 422),
    ],
    ids=["text", "many", "session", "other model", "no window", "no tokens", "nothing"],
)
async def test_what_is_not_one_plain_prediction_is_left_to_the_application(
    serve: Serve, body: dict[str, Any], status: int
) -> None:
    async with serve() as server:
        assert (await (await Client.of(server)).ask(step(body, path=PREDICT)))[0] == status
        assert server.asked == [PREDICT]


async def test_a_prediction_that_is_refused_is_answered_as_the_application_would(serve: Serve) -> None:
    refused = step({"tokens": [10_000]}, path=PREDICT)
    async with serve() as server:
        client = await Client.of(server)
        status, fast = await client.ask(refused)
        assert (status, server.asked) == (422, [])
        assert shown(fast) == shown((await client.ask(*in_two(refused)))[1])


async def test_a_prediction_whose_deadline_passes_is_told(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        late = step({"tokens": [6], "mode": "window"}, "x-request-timeout-ms: 30", path=PREDICT)
        status, document = await client.ask(late)
        assert (status, document["code"], server.asked) == (504, "deadline_exceeded", [])
        server.harness.runner.gate.set()
        assert (await client.ask(step({"tokens": [6]}, path=PREDICT)))[0] == 200


async def test_a_client_that_hangs_up_takes_its_prediction_back(serve: Serve) -> None:
    async with serve() as server:
        first, second = await Client.of(server), await Client.of(server)
        hold(server)
        await first.say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        await second.say(step({"tokens": [6], "mode": "window"}, path=PREDICT))
        await until(lambda: server.harness.engine._batcher.waiting == 1)
        second.writer.close()
        await until(lambda: server.counted(499, PREDICT) == 1)
        server.harness.runner.calls.clear()
        server.harness.runner.gate.set()
        assert (await first.hear())[0] == 200
        assert (await first.ask(step({"tokens": [7]})))[0] == 200
        assert [role for role, _ in server.harness.runner.calls] == ["step"]
        await asyncio.wait_for(server.catalog_.epochs.depart(), WAIT_S)


@pytest.mark.parametrize(
    "headers",
    [["x-wane-position: 1"], ["idempotency-key: k"], ["x-request-timeout-ms: 60000"]],
    ids=["position", "key", "timeout"],
)
async def test_headers_that_a_step_may_have_are_taken(serve: Serve, headers: list[str]) -> None:
    async with serve() as server:
        assert (await (await Client.of(server)).ask(step({"tokens": [6], "top_k": 2}, *headers)))[0] == 200
        assert server.asked == []


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([step({"tokens": [6, 7]})], 200, None),
        ([step({"tokens": [6], "mode": "window"})], 200, None),
        ([step({"tokens": [5], "expected_position": 0})], 200, None),
        ([step({"input": "ab"})], 200, None),
        ([step({"tokens": [6]}, "x-wane-position: x")], 422, "invalid_request"),
        ([step({"tokens": [6]}, "x-request-timeout-ms: never")], 422, "invalid_request"),
        ([step(b"{")], 400, "not_json"),
        ([step(b"")], 400, "not_json"),
        ([step({"tokens": [6], "tokes": 1})], 422, "invalid_request"),
        ([step({"tokens": "x"})], 422, "invalid_request"),
        ([step({"tokens": [6] * 9000})], 413, "too_large"),
        ([step({"tokens": [6]}, path="/v1/sessions/a/tokens/")], 404, "not_found"),
        ([step({"tokens": [6]}, path="/v1/sessions/a%0a/tokens")], 404, "not_found"),
        ([step({"tokens": [6]}, path="/v1/sessions/a b/tokens".replace(" ", "%20"))], 422, "invalid_request"),
        ([step({"tokens": [6]}, path="/v1/sessions/../tokens")], 422, "invalid_request"),
    ],
    ids=[
        "two tokens",
        "window",
        "replay",
        "text",
        "bad position",
        "bad timeout",
        "no json",
        "empty",
        "unknown field",
        "wrong type",
        "long",
        "other path",
        "control character",
        "no id",
        "dots",
    ],
)
async def test_what_is_not_one_plain_step_is_left_to_the_application(
    serve: Serve, parts: list[bytes], status: int, code: str | None
) -> None:
    async with serve(max_body_bytes=16_384) as server:
        answered, document = await (await Client.of(server)).ask(*parts)
        assert (answered, document.get("code")) == (status, code)
        assert len(server.asked) == 1


async def test_a_chunked_step_is_left_to_the_application_or_means_the_same(serve: Serve) -> None:
    chunked = b"POST %s HTTP/1.1\r\nhost: wane\r\ntransfer-encoding: chunked\r\n\r\n" % PATH.encode()
    async with serve() as server:
        status, document = await (await Client.of(server)).ask(chunked + b'e\r\n{"tokens": [6]\r\n1\r\n}\r\n0\r\n\r\n')
        assert (status, document["position"]) == (200, 2)


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(serve: Serve) -> None:
    head, body = in_two(step({"tokens": [6]}, "expect: 100-continue"))
    async with serve() as server:
        client = await Client.of(server)
        await client.say(head)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert (await client.ask(body))[0] == 200


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (step({"tokens": [6]}, path="/v1/sessions/nowhere/tokens"), 404, "unknown_session"),
        (step({"tokens": [6], "expected_position": 9}), 409, "position_conflict"),
        (step({"tokens": [10_000]}), 422, "invalid_request"),
    ],
    ids=["unknown session", "conflict", "no such token"],
)
async def test_a_step_that_is_refused_is_answered_as_the_application_would(
    serve: Serve, request_: bytes, status: int, code: str
) -> None:
    async with serve() as server:
        client = await Client.of(server)
        answered, fast = await client.ask(request_)
        assert (answered, fast["code"], server.asked) == (status, code, [])
        answered, slow = await client.ask(*in_two(request_))
        assert len(server.asked) == 1
        assert shown(fast) == shown(slow)
        assert server.counted(status) == 2


async def test_a_key_that_comes_again_with_another_step_is_refused_whichever_way_the_step_goes(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        keyed = step({"tokens": [6], "expected_position": 1}, "idempotency-key: k")
        assert (await client.ask(keyed))[0] == 200
        for body in ({"tokens": [7], "expected_position": 1}, {"tokens": [6], "expected_position": 2}):
            again = step(body, "idempotency-key: k")
            before = len(server.asked)
            answered, fast = await client.ask(again)
            assert (answered, fast["code"], fast["position"]) == (409, "idempotency_key_reused", 2)
            assert len(server.asked) == before
            answered, slow = await client.ask(*in_two(again))
            assert (answered, shown(slow)) == (409, shown(fast))
        status, replay = await client.ask(keyed)
        assert (status, replay["replayed"], replay["position"]) == (200, True, 2)


async def test_requests_in_one_packet_are_answered_in_their_order(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        await client.say(step({"tokens": [6]}) + step({"tokens": [7]}) + b"GET /healthz HTTP/1.1\r\nhost: wane\r\n\r\n")
        positions = [(await client.hear())[2]["position"] for _ in range(2)]
        assert (positions, (await client.hear())[0]) == ([2, 3], 200)


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("goods", [1, 3])
async def test_a_malformed_request_is_answered_behind_the_steps_that_came_with_it(
    serve: Serve, bad: bytes, goods: int
) -> None:
    async with serve() as server:
        client = await Client.of(server)
        await client.say(b"".join(step({"tokens": [6 + one]}) for one in range(goods)) + bad)
        assert statuses(await client.reader.read()) == [200] * goods + [400]
        assert (await position(server, "a"), server.counted(200)) == (1 + goods, goods)


async def test_a_websocket_begins_behind_the_answer_to_a_step(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        await client.say(step({"tokens": [6]}) + HANDSHAKE.replace(b"/s/", b"/a/"))
        await server.harness.runner.until_busy()
        server.harness.runner.gate.set()
        status, _, document = await client.hear()
        assert (status, document["position"], server.asked) == (200, 2, [])
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        client.writer.write(frame(0x81, b'{"tokens": [7]}'))
        assert b'"position":3' in await client.reader.readuntil(b'"replayed":false}')


@pytest.mark.parametrize("first", [step({"tokens": [6]}, "connection: close"), step({"tokens": [6]}, version="1.0")])
async def test_a_step_behind_the_last_of_its_connection_is_not_applied(serve: Serve, first: bytes) -> None:
    async with serve() as server:
        client = await Client.of(server)
        await client.say(first + step({"tokens": [7]}))
        assert statuses(await client.reader.read()) == [200]
        assert await position(server, "a") == 2


async def test_white_space_around_a_header_is_no_part_of_it(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        padded = step({"tokens": [6]}, "x-wane-position:\t 1\t ", "idempotency-key: k ")
        assert (await client.ask(padded))[1]["replayed"] is False
        again = step({"tokens": [6]}, "x-wane-position: 1", "idempotency-key: k")
        assert (await client.ask(again))[1]["replayed"] is True
        assert (await client.ask(step({"tokens": [6]}, "idempotency-key:k\t")))[1]["replayed"] is True


async def test_a_request_that_comes_while_one_is_answered_waits_for_it(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        await client.say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        await client.say(b"GET /healthz HTTP/1.1\r\nhost: wane\r\n\r\n")
        server.harness.runner.gate.set()
        assert (await client.hear())[2]["position"] == 2
        assert (await client.hear())[0] == 200


@pytest.mark.parametrize(
    "request_",
    [step({"tokens": [6]}, "connection: close"), step({"tokens": [6]}, version="1.0")],
    ids=["close", "HTTP/1.0"],
)
async def test_a_connection_that_is_to_be_closed_is(serve: Serve, request_: bytes) -> None:
    async with serve() as server:
        client = await Client.of(server)
        await client.say(request_)
        status, headers, _ = await client.hear()
        assert (status, headers["connection"], server.asked) == (200, "close", [])
        assert await client.reader.read() == b""


def hold(server: ServerHarness) -> None:
    """From now on no run ends."""
    server.harness.runner.busy.clear()
    server.harness.runner.gate.clear()


async def position(server: ServerHarness, session: str) -> int:
    return (await server.harness.engine.get_session(session)).position


async def test_a_step_whose_deadline_passes_in_the_queue_leaves_no_trace(serve: Serve) -> None:
    async with serve() as server:
        first, second = await Client.of(server), await Client.of(server)
        hold(server)
        await first.say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        status, document = await second.ask(
            step({"tokens": [6]}, "x-request-timeout-ms: 30", path="/v1/sessions/b/tokens")
        )
        assert (status, document["code"], server.counted(504)) == (504, "deadline_exceeded", 1)
        server.harness.runner.gate.set()
        assert (await first.hear())[0] == 200
        assert await position(server, "b") == 1


async def test_a_step_whose_deadline_passes_while_it_runs_is_appended_and_told_so(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        status, document = await client.ask(step({"tokens": [6]}, "x-request-timeout-ms: 1000"))
        assert (status, "it still commits" in document["detail"]) == (504, True)
        server.harness.runner.gate.set()
        status, document = await client.ask(step({"tokens": [6], "expected_position": 1}))
        assert (status, document["replayed"], document["position"]) == (200, True, 2)


async def test_a_client_that_hangs_up_takes_back_what_has_not_begun(serve: Serve) -> None:
    async with serve() as server:
        first, second = await Client.of(server), await Client.of(server)
        hold(server)
        await first.say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        await second.say(step({"tokens": [6]}, path="/v1/sessions/b/tokens"))
        await until(lambda: server.harness.engine._batcher.waiting == 1)
        second.writer.close()
        await until(lambda: server.counted(499) == 1)
        server.harness.runner.gate.set()
        assert (await first.hear())[0] == 200
        assert await position(server, "b") == 1
        await asyncio.wait_for(server.catalog_.epochs.depart(), WAIT_S)


async def test_a_step_whose_client_hangs_up_while_it_runs_is_appended(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        await client.say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        client.writer.close()
        await until(lambda: server.counted(499) == 1)
        server.harness.runner.gate.set()
        status, document = await (await Client.of(server)).ask(step({"tokens": [7]}))
        assert (status, document["position"], server.counted(200)) == (200, 3, 1)


async def test_a_run_that_fails_is_told(serve: Serve) -> None:
    async with serve() as server:
        server.harness.runner.poison = 6
        client = await Client.of(server)
        assert (await client.ask(step({"tokens": [6]})))[0] == 500
        assert (await client.ask(step({"tokens": [7]})))[1]["position"] == 2


async def test_a_step_that_loses_to_another_writer_is_retried(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as server:
        lost = server.harness.lose_next_comparison(monkeypatch)
        status, document = await (await Client.of(server)).ask(step({"tokens": [6]}))
        assert (status, document["position"], len(lost), server.asked) == (200, 2, 1, [])


KEY = "alice-0123456789abcdefgh"


async def test_a_key_is_asked_for_and_charged_once_whichever_way_a_step_goes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(Principal, "charge", lambda _, requests, before=0.0: charged.append(requests))
    async with serve(api_keys=f"alice:{KEY}") as server:
        client, held = await Client.of(server), f"authorization: Bearer {KEY}"
        status, document = await client.ask(step({"tokens": [6]}))
        assert (status, document["code"], charged) == (401, "unauthorized", [])
        client = await Client.of(server)
        assert (await client.ask(step({"session": "a"}, held, path="/v1/sessions")))[0] == 201
        server.asked.clear()
        status, document = await client.ask(step({"tokens": [6]}, held))
        assert (status, document["session"], document["position"], server.asked) == (200, "a", 1, [])
        assert (await client.ask(step({"tokens": [6, 7]}, held)))[1]["position"] == 3
        assert (server.asked, charged) == ([PATH], [1.0, 1.0, 1.0])


async def test_a_step_over_the_rate_of_its_key_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Principal, requests: float, before: float = 0.0) -> None:
        raise RateLimited(f"{requests:g} too many, after {before:g}", 1.0)

    monkeypatch.setattr(Principal, "charge", refuse)
    async with serve(api_keys=f"alice:{KEY}") as server:
        status, document = await (await Client.of(server)).ask(step({"tokens": [6]}, f"authorization: Bearer {KEY}"))
        assert (status, document["code"]) == (429, "rate_limited")


async def test_the_access_log_says_of_a_step_what_it_says_on_the_other_way(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wane.access")
    conflict = step({"tokens": [6], "expected_position": 9})
    async with serve() as server:
        client = await Client.of(server)
        for request in ([step({"tokens": [6]})], in_two(step({"tokens": [7]}))):
            assert (await client.ask(*request))[0] == 200
        for request in ([conflict], in_two(conflict)):
            assert (await client.ask(*request))[0] == 409
    fast, slow, *refused = [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]
    assert fast.keys() == slow.keys()
    for name in ("client", "path", "method", "status", "model", "mode", "state", "batch_items", "trace_id"):
        assert fast[name] == slow[name]
    assert fast["bytes"] > 100
    assert refused[0].keys() == refused[1].keys() >= {"model", "error"}


async def test_behind_a_proxy_a_step_is_of_whom_the_proxy_says(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wane.access")
    async with serve(trusted_proxies="127.0.0.1") as server:
        client = await Client.of(server)
        for request in ([step({"tokens": [6]}, "x-forwarded-for: 192.0.2.7")], [step({"tokens": [6, 7]})]):
            assert (await client.ask(*request))[0] == 200
        assert server.asked == [PATH]
    clients = [vars(record)["fields"]["client"] for record in caplog.records if record.name == "wane.access"]
    assert clients == ["192.0.2.7", "127.0.0.1"]


async def test_a_full_queue_refuses(serve: Serve, make_harness: MakeHarness) -> None:
    async with serve(make_harness(max_queue=1)) as server:
        clients = [await Client.of(server) for _ in range(3)]
        hold(server)
        await clients[0].say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        await clients[1].say(step({"tokens": [6]}, path="/v1/sessions/b/tokens"))
        await until(lambda: server.harness.engine._batcher.waiting == 1)
        await clients[2].say(step({"tokens": [6]}, path="/v1/sessions/c/tokens"))
        status, headers, _ = await clients[2].hear()
        assert (status, "retry-after" in headers, server.asked) == (429, True, [])
        assert server.harness.sample("wane_queue_rejected_total") == 1
        server.harness.runner.gate.set()
        assert [(await client.hear())[0] for client in clients[:2]] == [200, 200]


async def test_a_server_that_ends_answers_what_it_has_begun_and_closes(serve: Serve) -> None:
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        await client.say(step({"tokens": [6]}))
        await server.harness.runner.until_busy()
        for connection in server.server_state.connections:
            connection.shutdown()
        server.harness.runner.gate.set()
        status, headers, _ = await client.hear()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.reader.read() == b""


@pytest.mark.parametrize("path", [PATH, PREDICT])
async def test_a_body_over_the_limit_is_refused_however_it_comes(serve: Serve, path: str) -> None:
    padded = step(b'{"tokens": [6]}' + b" " * 2000, path=path)
    async with serve(max_body_bytes=1024) as server:
        status, document = await (await Client.of(server)).ask(padded)
        assert (status, document["code"]) == (413, "too_large")


@pytest.mark.parametrize("path", [PATH, PREDICT])
async def test_what_nobody_expected_is_told_whenever_it_happens(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("this is a bug")

    async with serve() as server:
        client = await Client.of(server)
        with monkeypatch.context() as patched:  # before the engine is asked
            patched.setattr(server.catalog_, "engine_at_once", fails)
            patched.setattr(server.catalog_, "get", fails)
            status, document = await client.ask(step({"tokens": [6]}, path=path))
            assert (status, document["code"]) == (500, "internal")
        with monkeypatch.context() as patched:  # and when it has answered
            patched.setattr(encode, "answer", fails)
            status, document = await client.ask(step({"tokens": [6]}, path=path))
            assert (status, document["code"]) == (500, "internal")
        assert (await client.ask(step({"tokens": [6]}, path=path)))[0] == 200
        assert (server.counted(500, ROUTE if path == PATH else PREDICT), server.counted(200, PREDICT)) == (
            2,
            int(path == PREDICT),
        )
        await asyncio.wait_for(server.catalog_.epochs.depart(), WAIT_S)


async def test_a_prediction_that_the_server_cancels_is_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Engine, "predict", cancelled)
    async with serve() as server:
        status, document = await (await Client.of(server)).ask(step({"tokens": [6]}, path=PREDICT))
        assert (status, document["code"], server.asked) == (503, "unavailable", [])


@pytest.mark.parametrize("whole", [True, False])
async def test_a_malformed_request_is_answered_behind_the_step_that_runs(
    serve: Serve, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    first = step({"tokens": [6]})
    async with serve() as server:
        client = await Client.of(server)
        hold(server)
        await client.say(*([first] if whole else in_two(first)))
        await server.harness.runner.until_busy()
        await client.say(b"GET /healthz HTTP/1.1\r\nhost: wane\r\n\r\nPOST /v1/predict HT\r\n")
        await until(lambda: all(connection.discarding for connection in server.server_state.connections))
        server.harness.runner.gate.set()
        said = await client.reader.read()
        assert statuses(said) == [200, 200, 400] and server.counted(200) == 1
        await asyncio.wait_for(server.catalog_.epochs.depart(), WAIT_S)
    assert "asyncio" not in {record.name for record in caplog.records}


@pytest.mark.parametrize("body", [{"tokens": [6]}, {"tokens": [6], "expected_position": 9}], ids=["200", "409"])
async def test_a_connection_that_is_over_leaves_nothing_for_the_garbage_collector(
    serve: Serve, body: dict[str, Any]
) -> None:
    async with serve() as server:
        client = await Client.of(server)
        gc.disable()
        try:
            await client.ask(step(body))
            connection = weakref.ref(*server.server_state.connections)
            client.writer.close()
            await until(lambda: connection() is None)
        finally:
            gc.enable()
