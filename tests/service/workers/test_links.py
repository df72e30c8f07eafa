"""Two ends of a link between workers, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from wane.service.errors import Overloaded, PositionConflict, Unavailable, WaneError
from wane.service.net.connection import CONNECTION
from wane.service.net.limits import Limits
from wane.service.observability.metrics import Metrics
from wane.service.settings import Settings
from wane.service.workers.links import WINDOW_BYTES, Peers, Side

BUDGET = 1 << 16
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Reply = Callable[[BaseException | None, object], None]


class Client:
    """The connection of a request. If `content` is None, its body comes in pieces."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.has_ended = False
        self.on_lost: Callable[[], None] | None = None


def scope_of(client: Client) -> Scope:
    return {"type": "http", "method": "POST", "path": "/", "headers": [(b"a", b"b")], "state": {CONNECTION: client}}


async def no_body() -> Message:
    raise AssertionError("the body is read already")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class Steps:
    """Takes the steps that are passed on."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.replies: list[Reply] = []
        self.left = 0

    def __call__(self, reply: Reply, asked: Any) -> Side:
        self.asked.append(asked)
        self.replies.append(reply)
        return self

    def end(self, error: Exception | None, result: Any = None) -> None:
        assert error is None and result is None
        self.left += 1


@asynccontextmanager
async def linked(folder: Path, app: App, steps: Steps | None = None) -> AsyncIterator[Peers]:
    """Worker 0, whose requests for worker 1 are answered by `app` and `steps`."""
    limits = Limits(Settings(receive_budget_bytes=BUDGET, max_body_bytes=BUDGET // 2), Metrics())
    paths = [str(folder / "0"), str(folder / "1")]
    first, second = (Peers(paths, me, limits, 5, app, steps or Steps()) for me in (0, 1))
    async with await second.listen():
        yield first
        assert limits.taken_bytes == 0
        await first.close()
        for _ in range(10):  # until the other end is closed
            await asyncio.sleep(0)


class Answer:
    """ASGI's function `send`. Takes no event while `is_open` is not set."""

    def __init__(self) -> None:
        self.events: list[Message] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def __call__(self, event: Message) -> None:
        await self.is_open.wait()
        self.events.append(event)

    @property
    def body(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.events)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    assert [tuple(pair) for pair in scope["headers"]] == [(b"a", b"b")]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    more = True
    while more:
        event = await receive()
        more = event.get("more_body", False)
        await send({"type": "http.response.body", "body": event["body"], "more_body": more})


def pieces(count: int, size: int) -> Receive:
    left = count

    async def receive() -> Message:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": bytes(size), "more_body": left > 0}

    return receive


async def test_a_body_and_its_answer_pass_whole_and_in_pieces(tmp_path: Path) -> None:
    async with linked(tmp_path, echo) as peers:
        for content, receive, size in ((b"whole", no_body, 5), (None, pieces(300, 200), 60_000)):
            answer = Answer()
            await peers.pass_on(1, scope_of(Client(content)), receive, answer, {})
            assert answer.events[0]["status"] == 200
            assert len(answer.body) == size


@pytest.mark.parametrize("content", [bytes(BUDGET + 1), None])
async def test_a_body_over_the_receive_budget_is_refused(tmp_path: Path, content: bytes | None) -> None:
    async def reading(_: Scope, receive: Receive, __: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    async with linked(tmp_path, reading) as peers:
        with pytest.raises(Overloaded, match="receiving too much data"):
            await peers.pass_on(1, scope_of(Client(content)), pieces(20, BUDGET // 16), Answer(), {})


@pytest.mark.parametrize("size", [1 << 14, 0])
async def test_an_answer_waits_until_its_client_takes_it(tmp_path: Path, size: int) -> None:
    sent, count = 0, 1000

    async def streaming(_: Scope, __: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(count):
            await send({"type": "http.response.body", "body": bytes(size), "more_body": number < count - 1})
            sent += 1

    async with linked(tmp_path, streaming) as peers:
        answer = Answer()
        answer.is_open.clear()
        passing = asyncio.create_task(peers.pass_on(1, scope_of(Client(b"")), no_body, answer, {}))
        before = -1
        while sent != before or not sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent * size <= WINDOW_BYTES + size
        assert 0 < sent < count
        answer.is_open.set()
        await passing
        assert len(answer.body) == count * size
        assert len(answer.events) == count + 1


async def test_a_client_that_leaves_ends_the_request_in_the_other_worker(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def waiting(_: Scope, receive: Receive, __: Send) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    async with linked(tmp_path, waiting) as peers:
        client = Client(b"{}")
        passing = asyncio.create_task(peers.pass_on(1, scope_of(client), no_body, Answer(), {}))
        await until(lambda: client.on_lost is not None)
        assert client.on_lost is not None
        client.on_lost()
        await passing
        await asyncio.wait_for(ended.wait(), 5)


async def test_steps_pass_with_their_results_and_errors(tmp_path: Path) -> None:
    steps = Steps()
    async with linked(tmp_path, echo, steps) as peers:
        passed = [asyncio.create_task(peers.step(1, ["s", number])) for number in range(4)]
        await until(lambda: len(steps.asked) == len(passed))
        assert steps.asked == [["s", number] for number in range(4)]
        steps.replies[1](None, [b"{}", {}])
        steps.replies[0](PositionConflict("at 3", 3), None)
        steps.replies[2](ZeroDivisionError("private"), None)
        assert await passed[1] == [b"{}", {}]
        with pytest.raises(PositionConflict, match="at 3") as conflict:
            await passed[0]
        assert vars(conflict.value) == vars(PositionConflict("at 3", 3))
        with pytest.raises(RuntimeError, match="failed: ZeroDivisionError"):
            await passed[2]
        passed[3].cancel()
        await until(lambda: steps.left == 1)


async def test_what_waits_for_a_worker_that_ends_fails(tmp_path: Path) -> None:
    async def waiting(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        await receive()

    steps = Steps()
    async with linked(tmp_path, waiting, steps) as peers:
        asked = (peers.step(1, "s"), peers.pass_on(1, scope_of(Client(b"")), no_body, Answer(), {}))
        passed = [asyncio.ensure_future(one) for one in asked]
        await until(lambda: bool(steps.asked))
        await peers.close()
        for failed in await asyncio.gather(*passed, return_exceptions=True):
            assert isinstance(failed, Unavailable)
            assert "may have made the step" in str(failed)
    with pytest.raises(WaneError, match="starting again"):
        await peers.step(1, "s")
