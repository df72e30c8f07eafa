"""Tests of WebSockets of sessions, with a real client and a real server, over the fake engine."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.service import fake_engine
from tests.service.conftest import LIMIT, SocketServer
from tests.service.engine_harness import EngineHarness
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.live_server import TIMEOUT_S, LiveServer
from tests.service.problems import assert_members
from tests.service.server_harness import served
from wane.service.api.body import Decoder, only_token
from wane.service.api.openapi import SOCKET
from wane.service.api.routes import stream
from wane.service.api.schemas.sessions import StreamBody
from wane.service.auth.keyring import Principal
from wane.service.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PositionConflict,
    TooLarge,
    Unavailable,
    UnknownSession,
)
from wane.service.net.connection import MOST_EARLY
from wane.service.settings import Settings
from wane.service.types.answer import Prediction
from wane.service.types.common import Mode
from wane.service.types.request import Owner, PredictRequest, StepRequest

KEY = "alice-0123456789abcdefgh"
PATH = "/v1/sessions/s/stream"


def url_of(server: SocketServer | LiveServer, path: str = PATH) -> str:
    return server.url.replace("http://", "ws://") + path


@asynccontextmanager
async def opened(server: SocketServer, path: str = PATH, **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(url_of(server, path), proxy=None, **options) as socket:
        yield socket


async def ask(socket: ClientConnection, message: object) -> Any:
    await socket.send(json.dumps(message))
    return json.loads(await socket.recv())


async def closed(socket: ClientConnection) -> tuple[int | None, str | None]:
    """Waits until the server closes the WebSocket. Returns the close code and the reason."""
    with pytest.raises(ConnectionClosed):
        await socket.recv()
    return socket.close_code, socket.close_reason


async def test_each_message_is_answered_like_a_step(server: SocketServer, engine: FakeEngine) -> None:
    async with opened(server) as socket, httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        answer = await ask(socket, {"tokens": [1, 2]})
        assert answer == (await client.post("/v1/sessions/s/tokens", json={"tokens": [1, 2]})).json()
        assert (await ask(socket, {"input": "abc"}))["position"] == 3


async def test_line_separators_are_escaped_in_messages(
    server: SocketServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\u2028b\u2029c"
    monkeypatch.setattr(fake_engine, "PREDICTIONS", (Prediction(7, text, 0.5, -0.6931),))
    async with opened(server) as socket:
        await socket.send('{"tokens":[1]}')
        answer = await socket.recv()
        engine.failure = InvalidRequest(text)
        await socket.send('{"tokens":[1]}')
        problem = await socket.recv()
    assert not {*"\u2028\u2029"} & {*answer, *problem}
    assert json.loads(answer)["predictions"][0]["token"] == text
    assert text in json.loads(problem)["error"]["detail"]


@pytest.mark.parametrize("binary", [False, True])
async def test_a_byte_order_mark_of_a_message_is_ignored(
    server: SocketServer, engine: FakeEngine, binary: bool
) -> None:
    message = '\ufeff{"tokens": [1, 2]}'
    async with opened(server) as socket:
        await socket.send(message.encode() if binary else message)
        assert json.loads(await socket.recv())["position"] == 2


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[2J"], ids=ascii)
async def test_control_characters_of_a_name_are_escaped_in_messages(
    server: SocketServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fake_engine, "PREDICTIONS", (Prediction(7, name, 0.5, -0.6931),))
    async with opened(server) as socket:
        await socket.send('{"tokens":[1]}')
        answer = await socket.recv()
    assert isinstance(answer, str) and answer.isprintable()
    assert json.loads(answer)["predictions"][0]["token"] == name


async def test_the_options_of_a_message_reach_the_engine(server: SocketServer, engine: FakeEngine) -> None:
    message = {"tokens": [1], "top_k": 2, "mode": "both", "expected_position": 4, "idempotency_key": "k"}
    async with opened(server) as socket:
        await ask(socket, message)
    (asked,) = engine.asked
    assert isinstance(asked, StepRequest)
    assert asked == StepRequest("s", (1,), Mode.BOTH, 4, "k", 2, asked.deadline)
    assert asked.deadline is not None


async def test_a_rewind_is_answered_with_the_prediction_at_its_position(
    server: SocketServer, engine: FakeEngine
) -> None:
    async with opened(server) as socket:
        assert (await ask(socket, {"rewind": 7}))["predictions"]
    rewound, asked = engine.asked
    assert rewound == ("s", 7)
    assert isinstance(asked, PredictRequest) and asked.session == "s"


async def test_messages_sent_before_earlier_answers_are_answered_one_after_another_in_order(
    server: SocketServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []
    busy = 0
    step = engine.step

    async def counted(request: StepRequest) -> Any:
        nonlocal busy
        busy += 1
        at_once.append(busy)
        await asyncio.sleep(0)
        busy -= 1
        return await step(request)

    monkeypatch.setattr(engine, "step", counted)
    async with opened(server) as socket:
        for length in range(1, 50):
            await socket.send(json.dumps({"tokens": [1] * length}))
        assert [json.loads(await socket.recv())["position"] for _ in range(1, 50)] == list(range(1, 50))
    assert set(at_once) == {1}


async def test_messages_received_during_an_answer_keep_their_order(
    server: SocketServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wane.service.api.disconnect.DISCONNECT_GRACE_S", 0)
    engine.wait = asyncio.Event()
    async with opened(server) as socket:
        await socket.send(json.dumps({"tokens": [1]}))
        # Waits until the engine has the first message. Otherwise the number of unprocessed messages might reach the
        # limit, and the server would not read the ping.
        await engine.waiting.wait()
        for length in range(2, MOST_EARLY + 1):
            await socket.send(json.dumps({"tokens": [1] * length}))
        await (await socket.ping())  # a pong proves that the server has received the messages
        engine.wait.set()
        positions = [json.loads(await socket.recv())["position"] for _ in range(MOST_EARLY)]
    assert positions == list(range(1, MOST_EARLY + 1))


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ('{"tokens": [1],,}', 400, "not_json"),
        ("{}", 422, "invalid_request"),
        ('{"tokens": [1], "rewind": 0}', 422, "invalid_request"),
        ('{"rewind": 0, "top_k": 3}', 422, "invalid_request"),
        ('{"rewind": 0, "tokens": NaN, "tokens": [5]}', 422, "invalid_request"),
        ('{"tokens": []}', 422, "invalid_request"),
        ('{"temprature": 1}', 422, "invalid_request"),
        ('{"tokens": ["1"]}', 422, "invalid_request"),
        ("[]", 422, "invalid_request"),
    ],
)
async def test_an_invalid_message_leaves_the_socket_open(
    server: SocketServer, engine: FakeEngine, message: str, status: int, code: str
) -> None:
    async with opened(server, additional_headers={"x-request-id": "mine"}) as socket:
        await socket.send(message)
        error = json.loads(await socket.recv())["error"]
        assert_members(error, status, code)
        assert error["request_id"] == "mine"
        assert (await ask(socket, {"tokens": [1]}))["position"] == 1


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (InvalidRequest("no", "tokens"), 422),
        (Overloaded("no"), 429),
        (DeadlineExceeded("no"), 504),
        (TooLarge("no"), 413),
    ],
    ids=lambda case: getattr(case, "code", ""),
)
async def test_a_failure_without_effect_on_the_session_leaves_the_socket_open(
    server: SocketServer, engine: FakeEngine, failure: Exception, status: int
) -> None:
    async with opened(server) as socket:
        engine.failure = failure
        assert (await ask(socket, {"tokens": [1]}))["error"]["status"] == status
        engine.failure = None
        assert (await ask(socket, {"tokens": [1]}))["position"] == 1


@pytest.mark.parametrize(
    ("failure", "close"),
    [
        (UnknownSession("gone"), 4404),
        (PositionConflict("elsewhere", 7), 4409),
        (Unavailable("stopping"), 1012),
        (RuntimeError("a secret"), 1011),
    ],
    ids=lambda case: str(case),
)
async def test_a_failure_that_closes_the_socket_is_its_last_message(
    server: SocketServer, engine: FakeEngine, failure: Exception, close: int
) -> None:
    engine.failure = failure
    async with opened(server) as socket:
        error = (await ask(socket, {"tokens": [1]}))["error"]
        assert "secret" not in str(error)
        assert error.get("position") == getattr(failure, "position", None)
        assert await closed(socket) == (close, error["code"])


@pytest.mark.parametrize(
    ("session", "code", "close"), [("unknown", "unknown_session", 4404), ("s", "unavailable", 1012)]
)
async def test_a_socket_without_a_session_receives_the_error_and_is_closed(
    server: SocketServer, registry: FakeRegistry, session: str, code: str, close: int
) -> None:
    if code == "unavailable":
        registry.failure = Unavailable("loading")
    async with opened(server, f"/v1/sessions/{session}/stream") as socket:
        # The first message may create the session, so the server refuses an unknown session only after this message.
        if code == "unknown_session":
            await socket.send('{"tokens": [1]}')
        assert json.loads(await socket.recv())["error"]["code"] == code
        assert await closed(socket) == (close, code)


async def test_a_disconnection_cancels_the_wait_for_the_engine(server: SocketServer, engine: FakeEngine) -> None:
    engine.wait = asyncio.Event()
    async with opened(server) as socket:
        await socket.send('{"tokens": [1]}')
        await engine.waiting.wait()
    await engine.cancelled.wait()


async def test_a_message_over_the_limit_closes_with_1009(server: SocketServer, engine: FakeEngine) -> None:
    async with opened(server) as socket:
        await socket.send('{"tokens": [1]}'.ljust(LIMIT))
        assert json.loads(await socket.recv())["position"] == 1
        await socket.send('{"tokens": [1]}'.ljust(LIMIT + 1))
        assert (await closed(socket))[0] == 1009


async def test_an_idle_stream_is_closed(
    server: SocketServer, engine: FakeEngine, travel: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "settings", lambda _: Settings(stream_idle_s=8))
    async with opened(server) as socket:
        for _ in range(2):
            travel(5)
            assert (await ask(socket, {"tokens": [1]}))["position"] == 1
        travel(9)
        assert await closed(socket) == (1000, "idle for 8 s")


async def test_a_draining_server_closes_with_1012(
    server: SocketServer, engine: FakeEngine, registry: FakeRegistry
) -> None:
    async with opened(server) as socket:
        await ask(socket, {"tokens": [1]})
        server.handle_exit(signal.SIGTERM, None)
        assert (await closed(socket))[0] == 1012
    await server.draining_is_over()


async def test_streams_and_messages_are_counted_and_a_stream_is_logged_once(
    server: SocketServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        before = await counted(client)
        async with opened(server, additional_headers={"x-request-id": "mine"}) as socket:
            await ask(socket, {"tokens": [1]})
            await ask(socket, {"tokens": []})
            assert (await counted(client))["wane_websockets"] == before["wane_websockets"] + 1
        server.should_exit = True
        while server.server_state.tasks:
            await asyncio.gather(*server.server_state.tasks)
    metrics = server.app.state.metrics.render()[0].decode()
    after = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    for status in ("200", "422"):
        name = f'wane_websocket_messages_total{{status="{status}"}}'
        assert float(after[name]) == before.get(name, 0) + 1
    (line,) = [vars(record)["fields"] for record in caplog.records if record.msg == "socket"]
    assert (line["request_id"], line["path"], line["messages"], line["code"]) == ("mine", PATH, 2, 1000)


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    lines = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


# Keys.


@asynccontextmanager
async def opened_with_key(harness: EngineHarness) -> AsyncIterator[ClientConnection]:
    """Opens a WebSocket of a session with the API key of the session's owner."""
    async with served(harness, api_keys=f"alice:{KEY}") as server:
        await harness.engine.create_session("mine", owner=Owner("alice"))
        headers = {"authorization": f"Bearer {KEY}"}
        async with opened(server, "/v1/sessions/mine/stream", additional_headers=headers) as socket:
            yield socket


async def test_every_message_is_charged_once(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[float] = []
    monkeypatch.setattr(Principal, "charge", lambda _, requests, before=0.0: charged.append(requests))
    async with opened_with_key(harness) as socket:
        charged.clear()
        assert (await ask(socket, {"tokens": [6, 7]}))["position"] == 2
        assert (await ask(socket, {"tokens": [6]}))["position"] == 3
        assert (await ask(socket, {"tokens": [6], "top_k": 0}))["error"]["status"] == 422
        assert charged == [1, 1, 1]


async def test_messages_over_the_rate_wait_for_the_rate(harness: EngineHarness, tmp_path: Path) -> None:
    """A client that does not wait has at most one refused message for each accepted one."""
    messages, keys = 40, tmp_path / "keys"
    keys.write_text(f"alice:sha256:{sha256(KEY.encode()).hexdigest()} rate=200 burst=1\n")
    async with served(harness, api_keys_file=keys) as server:
        await harness.engine.create_session("mine", owner=Owner("alice"))
        headers = {"authorization": f"Bearer {KEY}"}
        async with opened(server, "/v1/sessions/mine/stream", additional_headers=headers) as socket:
            for _ in range(messages):
                await socket.send('{"tokens": []}')
            codes = [json.loads(await socket.recv())["error"]["code"] for _ in range(messages)]
    assert set(codes) <= {"rate_limited", "invalid_request"}
    assert codes.count("rate_limited") <= messages // 2 + 1


# Parsing of messages.


@pytest.mark.parametrize(
    "message",
    [
        '{"tokens": [6]}',
        '{"tokens":[0]}',
        '{"tokens":[1],"tokens":[-7]}',
        '{"tokens":[18446744073709551615]}',
        '{"tokens":[18446744073709551616]}',
    ],
)
def test_a_one_token_message_is_read_as_its_body_type_reads_it(message: str) -> None:
    token, body = only_token(message), Decoder(Settings()).decode_now(message, StreamBody)
    assert token is not None and body.tokens is not None and [*body.tokens] == [token]
    plain = StepRequest("a", (token,))
    assert (body.mode, body.top_k, body.expected_position) == (plain.mode, plain.top_k, plain.expected_position)
    assert (body.idempotency_key, body.rewind) == (plain.idempotency_key, None)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "6",
        "[6]",
        "{}",
        '{"tokens":6}',
        '{"tokens":[]}',
        '{"tokens":[6,7]}',
        '{"tokens":[true]}',
        '{"tokens":[6.0]}',
        '{"tokens":["6"]}',
        '{"tokens":null}',
        '{"input":"a"}',
        '{"tokens":[6],"top_k":1}',
        '{"tokens":[6],"wrong":1}',
    ],
)
def test_every_other_message_is_read_by_its_body_type(message: str) -> None:
    assert only_token(message) is None


def test_every_close_code_is_explained() -> None:
    for code in (stream.INTERNAL, stream.RESTART, stream.NO_SESSION, stream.CONFLICT, 1009):
        assert str(code) in SOCKET
