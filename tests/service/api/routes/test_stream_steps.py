"""Steps over a WebSocket: charged, counted and answered once, in order, whatever becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.service.api.test_dispatch import Serve, ServerHarness, hold, position, serve  # noqa: F401  (a fixture)
from tests.service.conftest import make_harness  # noqa: F401  (a fixture)
from tests.service.engine_harness import MakeHarness
from tests.service.slow_client import WAIT_S, until
from wane.service.api.body import only_token, parsed, valid
from wane.service.api.routes.stream import Stream
from wane.service.api.schemas.sessions import StreamBody
from wane.service.auth.keyring import Principal
from wane.service.errors import RateLimited
from wane.service.types import Owner, StepRequest

KEY = "alice-0123456789abcdefgh"


@asynccontextmanager
async def opened(server: ServerHarness, session: str = "a", **options: Any) -> AsyncIterator[ClientConnection]:
    url = server.url.replace("http://", "ws://")
    async with connect(f"{url}/v1/sessions/{session}/stream", proxy=None, **options) as socket:
        yield socket


def step(**fields: object) -> str:
    return json.dumps({"tokens": [6]} | fields)


async def ask(socket: ClientConnection, message: str) -> Any:
    await socket.send(message)
    return json.loads(await socket.recv())


def counted(server: ServerHarness, status: int) -> float:
    return server.metrics.registry.get_sample_value("wane_websocket_messages_total", {"status": str(status)}) or 0.0


async def test_a_step_means_the_same_as_text_and_as_bytes_and_needs_no_task(serve: Serve) -> None:  # noqa: F811
    async with serve() as server, opened(server) as one, opened(server, "b") as other:
        for at in range(1, 4):
            before = asyncio.all_tasks()
            hold(server)
            await one.send(step(expected_position=at, top_k=2))
            await server.harness.runner.until_busy()
            assert asyncio.all_tasks() <= before
            server.harness.runner.gate.set()
            text = json.loads(await one.recv())
            await other.send(step(expected_position=at, top_k=2).encode())
            data = json.loads(await other.recv())
            assert text.pop("latency").keys() == data.pop("latency").keys()
            assert (text.pop("session"), data.pop("session")) == ("a", "b")
            assert text == data and text["position"] == at + 1
        assert counted(server, 200) == 6


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (step(tokens=[6, 7]), {"position": 3}),
        (step(mode="window"), {"mode": "window", "position": 2}),
        ('{"rewind": 0}', {"position": 0}),
        (step(expected_position=0, tokens=[5]), {"replayed": True, "position": 1}),
        (step(expected_position=7), {"status": 409}),
        (step(tokens=[]), {"status": 422}),
        (step(top_k=0), {"status": 422}),
        (step(tokens=[10**6]), {"status": 422}),
        ("{", {"status": 400}),
    ],
)
async def test_every_message_is_answered_and_counted_once(
    serve: Serve,  # noqa: F811
    message: str,
    answer: dict[str, object],
) -> None:
    async with serve() as server, opened(server) as socket:
        document = await ask(socket, message)
        document = document.get("error", document)
        assert {name: document[name] for name in answer} == answer
        assert counted(server, document.get("status", 200)) == 1


async def test_messages_that_do_not_wait_are_answered_in_their_order(serve: Serve) -> None:  # noqa: F811
    async with serve() as server, opened(server) as socket:
        for at in range(60):
            await socket.send(step(expected_position=1 + at))
        assert [json.loads(await socket.recv())["position"] for _ in range(60)] == list(range(2, 62))


async def test_a_message_is_charged_for_once_whichever_way_it_goes(
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(Principal, "charge", lambda _, requests, before=0.0: charged.append(requests))
    headers = {"authorization": f"Bearer {KEY}"}
    async with serve(api_keys=f"alice:{KEY}") as server:
        await server.harness.engine.create_session("mine", owner=Owner("alice"))
        async with opened(server, "mine", additional_headers=headers) as socket:
            charged.clear()
            assert (await ask(socket, step(tokens=[6, 7])))["position"] == 2
            assert (await ask(socket, step()))["position"] == 3
            assert (await ask(socket, step(top_k=0)))["error"]["status"] == 422
            assert charged == [1, 1, 1]


async def test_a_message_over_the_rate_of_its_key_is_told_so(
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[float] = []

    def refuse(_: Principal, requests: float, before: float = 0.0) -> None:
        refused.append(requests)
        raise RateLimited("too many", 1.0)

    async with serve(api_keys=f"alice:{KEY}") as server:
        await server.harness.engine.create_session("mine", owner=Owner("alice"))
        async with opened(server, "mine", additional_headers={"authorization": f"Bearer {KEY}"}) as socket:
            monkeypatch.setattr(Principal, "charge", refuse)
            assert (await ask(socket, step()))["error"]["code"] == "rate_limited"
            assert refused == [1]


async def test_a_deadline_that_passes_in_the_queue_leaves_no_trace_and_the_socket_open(serve: Serve) -> None:  # noqa: F811
    async with serve(request_timeout_ms=1500) as server, opened(server) as first, opened(server, "b") as second:
        hold(server)
        await first.send(step())
        await server.harness.runner.until_busy()
        error = (await ask(second, step()))["error"]
        assert error["code"] == "deadline_exceeded" and "still commits" not in error["detail"]
        assert "it still commits" in json.loads(await first.recv())["error"]["detail"]
        server.harness.runner.gate.set()
        assert (await ask(second, step(expected_position=1)))["position"] == 2
        assert (await ask(first, step(expected_position=2)))["position"] == 3


async def test_a_client_that_leaves_takes_back_what_has_not_begun(serve: Serve) -> None:  # noqa: F811
    async with serve() as server, opened(server) as first:
        hold(server)
        await first.send(step())
        await server.harness.runner.until_busy()
        async with opened(server, "b") as second:
            await second.send(step())
            await until(lambda: server.harness.engine._batcher.waiting == 1)
        await until(lambda: server.metrics.registry.get_sample_value("wane_websockets") == 1)
        server.harness.runner.gate.set()
        assert json.loads(await first.recv())["position"] == 2
        assert await position(server, "b") == 1
        await asyncio.wait_for(server.catalog_.epochs.depart(), WAIT_S)


async def test_a_step_whose_client_leaves_while_it_runs_is_appended(serve: Serve) -> None:  # noqa: F811
    async with serve() as server:
        hold(server)
        async with opened(server) as socket:
            await socket.send(step())
            await server.harness.runner.until_busy()
        server.harness.runner.gate.set()
        await until(lambda: server.metrics.registry.get_sample_value("wane_websockets") == 0)
        async with opened(server) as socket:
            assert (await ask(socket, step()))["position"] == 3
        await asyncio.wait_for(server.catalog_.epochs.depart(), WAIT_S)


async def test_a_run_that_fails_is_told_and_closes(serve: Serve) -> None:  # noqa: F811
    async with serve() as server, opened(server) as socket:
        server.harness.runner.poison = 6
        assert (await ask(socket, step()))["error"]["status"] == 500
        assert await position(server, "a") == 1


async def test_a_step_that_loses_to_another_writer_is_retried(
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve() as server, opened(server) as socket:
        lost = server.harness.lose_next_comparison(monkeypatch)
        assert (await ask(socket, step()))["position"] == 2
        assert len(lost) == 1


async def test_a_full_queue_refuses_once(serve: Serve, make_harness: MakeHarness) -> None:  # noqa: F811
    async with (
        serve(make_harness(max_queue=1)) as server,
        opened(server) as first,
        opened(server, "b") as second,
        opened(server, "c") as third,
    ):
        hold(server)
        await first.send(step())
        await server.harness.runner.until_busy()
        await second.send(step())
        await until(lambda: server.harness.engine._batcher.waiting == 1)
        assert (await ask(third, step()))["error"]["status"] == 429
        assert server.harness.sample("wane_queue_rejected_total") == 1
        server.harness.runner.gate.set()
        assert [json.loads(await socket.recv())["position"] for socket in (first, second)] == [2, 2]


async def test_a_stream_is_idle_from_its_last_message_on(serve: Serve) -> None:  # noqa: F811
    async with serve(stream_idle_s=1) as server, opened(server) as socket:
        hold(server)
        await socket.send(step())
        await server.harness.runner.until_busy()
        await asyncio.sleep(1.5)  # a message that is answered is no idle time
        server.harness.runner.gate.set()
        assert "predictions" in json.loads(await socket.recv())
        assert "predictions" in await ask(socket, step())
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (1000, "idle for 1 s")


@pytest.mark.parametrize(
    "message",
    [
        '{"tokens": [6]}',
        '{"tokens":[0]}',
        '{"tokens":[1],"tokens":[-7]}',
        '{"tokens":[123456789012345678901234567890]}',
    ],
)
def test_a_message_of_one_token_is_read_as_its_model_would_read_it(message: str) -> None:
    token, body = only_token(message), valid(parsed(message), StreamBody)
    assert token is not None and body.tokens == [token]
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
def test_any_other_message_is_left_to_its_model(message: str) -> None:
    assert only_token(message) is None


async def test_behind_a_long_message_more_are_read(serve: Serve) -> None:  # noqa: F811
    async with serve() as server, opened(server) as socket:
        assert (await ask(socket, step() + " " * 5000))["position"] == 2
        assert (await ask(socket, step()))["position"] == 3


async def test_what_nobody_expected_is_told_and_closes_the_socket(
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("this is a bug")

    monkeypatch.setattr(Stream, "answer", fails)
    async with serve() as server, opened(server) as socket:
        assert (await ask(socket, step(top_k=2)))["error"]["status"] == 500
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        assert counted(server, 500) == 1
