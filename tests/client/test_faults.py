"""Tests of what goes wrong: answers in an unlucky order, cancelled tasks, late bytes, and exceptions in a block."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from tests.client.alike import Both
from tests.service.live_server import TIMEOUT_S
from tests.service.versions import TEXT_MODEL
from wane.client import AsyncWane, PositionConflict, TooLarge, Unavailable, UnknownSession, Unreachable, Wane
from wane.client.servers import refused

VIEW = {"model": "m", "model_version": "1", "device": "cpu", "mode": "auto", "position": 0}


def answer(position: int) -> tuple[int, dict[str, Any]]:
    """Returns the reply to a step, or to a prediction."""
    rest: dict[str, Any] = {"window": None, "predictions": [], "state": "full"}
    latency = {"queue_ms": 0, "compute_ms": 0, "total_ms": 0}
    bounds = {"error_bound": 0, "state_error_bound": 0, "top1_proved": False}
    return 200, {**VIEW, **rest, **bounds, "latency": latency, "position": position}


def refusal(status: int, code: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return status, {"code": code, "detail": "why", **more}


CREATED: tuple[int, dict[str, Any]] = (201, VIEW)
DELETED: tuple[int, dict[str, Any]] = (204, {})
LOST, EXISTS, DOWN = refusal(404, "unknown_session"), refusal(409, "session_exists"), refusal(503, "unavailable")


def at(position: int) -> tuple[int, dict[str, Any]]:
    return refusal(409, "position_conflict", position=position)


class Script:
    """A transport that answers requests with given replies. `sent` has the method, the last part of the path, and the
    body of each request, and `keys` its key."""

    def __init__(self, *replies: tuple[int, dict[str, Any]]) -> None:
        self.replies = list(replies)
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.before: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
        self.transport = httpx.MockTransport(self._respond)

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        await self.before()
        last = request.url.path.rpartition("/")[2]
        if last == "models":
            return httpx.Response(200, json={"data": []})
        body = json.loads(request.content or b"{}")
        if last == "tokenize":
            return httpx.Response(200, json={"tokens": [ord(letter) for letter in body["prompt"]]})
        self.sent.append((request.method, last, body))
        self.keys.append(request.headers.get("idempotency-key"))
        status, document = self.replies.pop(0)
        return httpx.Response(status, json=document)

    def asked(self) -> list[str]:
        return [f"{method} {last}" for method, last, _ in self.sent]


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.client.servers.FIRST_WAIT_S", 0)


def test_a_session_that_is_lost_while_it_gets_its_last_tokens_is_made_again(both: Both) -> None:
    script = Script(CREATED, answer(4), at(2), LOST, LOST, CREATED, answer(4))
    session = both("http://wane", transport=script.transport).session("s")
    session.append([5, 6, 7, 8])
    assert session.predict().position == 4
    assert script.sent[3][2]["tokens"] == [7, 8] and script.sent[5][2]["history"] == [5, 6, 7, 8]
    assert session.rebuilds == 1


def test_a_session_that_is_lost_while_a_rewind_asks_for_its_position_is_made_again(both: Both) -> None:
    too_far = refusal(422, "invalid_request", field="position")
    script = Script(CREATED, answer(4), too_far, LOST, CREATED, (200, VIEW))
    session = both("http://wane", transport=script.transport).session("s")
    session.append([5, 6, 7, 8])
    session.rewind(3)
    assert script.asked()[2:] == ["POST rewind", "GET s", "POST sessions", "POST rewind"]
    assert session.position == 3


def test_a_step_without_an_answer_keeps_its_key_while_others_are_refused(both: Both) -> None:
    script = Script(CREATED, DOWN, at(2), DOWN, answer(2), answer(4))
    session = both("http://wane", transport=script.transport, retry=False).session("s")
    for step, error in (([5, 6], Unavailable), ([7], PositionConflict), ([8], Unavailable)):
        with pytest.raises(error):
            session.append(step)
    assert session.append([5, 6]).position == 2
    session.append([5, 6])
    first, second, third, again, later = script.keys[1:]
    assert first == again and len({first, second, third, later}) == 4


def test_a_rewind_drops_a_step_without_an_answer(both: Both) -> None:
    script = Script(CREATED, DOWN, (200, VIEW), answer(1))
    session = both("http://wane", transport=script.transport, retry=False).session("s")
    with pytest.raises(Unavailable):
        session.append([5, 6])
    session.rewind(0)
    assert script.sent[-1][2] == {"position": 0}
    assert session.append(7).position == 1


def test_typing_does_not_delete_a_session_that_another_client_uses(both: Both) -> None:
    script = Script(CREATED, at(1))
    session = both("http://wane", transport=script.transport).session("s")
    with pytest.raises(PositionConflict):
        session.type("a")
    assert script.asked() == ["POST sessions", "POST tokens"]


def test_typing_does_not_delete_a_session_in_which_another_client_is_further(both: Both) -> None:
    too_far = refusal(422, "invalid_request", field="position")
    script = Script(CREATED, answer(3), too_far, (200, VIEW | {"position": 9}))
    session = both("http://wane", transport=script.transport).session("s")
    session.type("abc")
    with pytest.raises(PositionConflict) as raised:
        session.type("b")
    assert (raised.value.position, raised.value.status) == (9, 409)
    assert script.asked()[2:] == ["POST rewind", "GET s"]


@pytest.mark.parametrize(("name", "first"), [(None, answer(0)), ("s", DOWN)], ids=["its own", "after its own step"])
def test_typing_makes_a_session_again_that_only_this_client_has_changed(both: Both, name: Any, first: Any) -> None:
    script = Script(CREATED, first, at(2), DELETED, CREATED, answer(3))
    session = both("http://wane", transport=script.transport, retry=False).session(name)
    with suppress(Unavailable):
        session.type("" if name is None else "ab")
    assert session.type("xyz").position == 3
    assert script.asked()[3].startswith("DELETE")
    assert script.sent[4][2]["history"] == [ord(letter) for letter in "xyz"]


def test_a_history_that_is_too_long_for_the_server_is_halved(both: Both) -> None:
    refused_twice = refusal(413, "too_large")
    script = Script(CREATED, answer(4), LOST, refused_twice, refused_twice, CREATED, answer(5))
    session = both("http://wane", transport=script.transport).session("s")
    session.append([5, 6, 7, 8])
    assert session.append(9).position == 5
    histories = [(body["history"], body["position"]) for _, last, body in script.sent if "history" in body]
    assert histories == [([5, 6, 7, 8], 4), ([7, 8], 4), ([8], 4)]


def test_lost_tokens_that_are_too_many_for_the_server_are_sent_in_halves(both: Both) -> None:
    too_many = refusal(413, "too_large")
    script = Script(CREATED, answer(5), at(1), too_many, answer(3), too_many, answer(4), answer(5), answer(6))
    session = both("http://wane", transport=script.transport).session("s")
    session.append([5, 6, 7, 8, 9])
    assert session.append(4).position == 6
    sent = [(body["tokens"], body["expected_position"]) for _, last, body in script.sent[3:] if last == "tokens"]
    assert sent == [([6, 7, 8, 9], 1), ([6, 7], 1), ([8, 9], 3), ([8], 3), ([9], 4), ([4], 5)]


def test_a_server_that_neither_has_nor_makes_a_session_is_asked_with_pauses(both: Both) -> None:
    client = both("http://wane", transport=Script(CREATED, *[LOST, EXISTS] * 40).transport)
    session, now, turns = client.session("s"), [0.0], []

    def pause_s(turn: int) -> float:
        turns.append(turn)
        now[0] += 1
        return 0.0

    servers = client._inner._servers
    servers.clock, servers.pause_s = lambda: now[0], pause_s
    with pytest.raises(UnknownSession):
        session.append(5)
    assert turns == list(range(1, 11))


@pytest.mark.parametrize("deleted", [DELETED, DOWN], ids=["deleted", "not deleted"])
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_exception_in_a_block_ends_the_session_and_is_raised(
    both: Both, kind: type[BaseException], deleted: Any
) -> None:
    script = Script(CREATED, deleted)
    client = both("http://wane", transport=script.transport, retry=False)
    with pytest.raises(kind), client.session():
        raise kind
    assert script.asked()[1].startswith("DELETE")


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, even if the tests run in the background of a shell, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupted_call_does_not_block_the_session() -> None:
    script = Script(CREATED, DELETED)
    with pytest.raises(KeyboardInterrupt), Wane("http://wane", transport=script.transport).session() as session:

        async def interrupt() -> None:
            script.before = lambda: asyncio.sleep(0)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(TIMEOUT_S)

        script.before = interrupt
        session.append(5)
    assert script.asked() == ["POST sessions", f"DELETE {session.name}"]


def test_a_second_thread_in_a_session_is_refused() -> None:
    script = Script(CREATED, answer(1), answer(2))
    with Wane("http://wane", transport=script.transport) as wane:
        session = wane.session("s")
        session.append(5)
        refused_calls: list[str] = []

        def second() -> None:
            with suppress(AssertionError), pytest.raises(RuntimeError, match="a session is for one thread") as raised:
                session.append(6)
            refused_calls.append(str(raised.value))

        script.before = lambda: asyncio.to_thread(second)
        assert session.append(7).position == session.position == 2
    assert len(refused_calls) == 1 and script.sent[-1][2]["tokens"] == [7]


async def test_a_second_task_in_a_session_is_refused() -> None:
    script = Script(CREATED, answer(1))
    async with AsyncWane("http://wane", transport=script.transport) as wane:
        session = wane.session("s")
        found = await asyncio.gather(session.append(5), session.append(6), return_exceptions=True)
    assert {type(one).__name__ for one in found} == {"Answer", "RuntimeError"}


def test_cancelled_calls_leave_no_connection_in_the_pool(url: str) -> None:
    transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=4))

    async def turns(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async def run() -> None:
        async with AsyncWane(url, transport=transport, deadline_s=TIMEOUT_S) as wane:

            async def listen() -> None:
                async for _ in wane.generate_stream("The history", max_tokens=50, seed=1):
                    await asyncio.sleep(0)

            for number in range(200):
                tasks = [asyncio.ensure_future(wane.predict([5])), asyncio.ensure_future(listen())]
                await turns(number % 40)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for _ in range(8):
                await wane.predict([5])
            pool = transport._pool
            assert not pool._requests
            assert all(connection.is_idle() for connection in pool.connections)

    asyncio.run(run())


def test_a_session_of_a_cancelled_task_is_ended(url: str, http: httpx.Client) -> None:
    async def run() -> str:
        async with AsyncWane(url, deadline_s=TIMEOUT_S) as wane:
            opened = asyncio.Event()
            name = ""

            async def work() -> None:
                nonlocal name
                async with wane.session() as session:
                    name = session.name
                    opened.set()
                    await asyncio.sleep(TIMEOUT_S)

            task = asyncio.ensure_future(work())
            await opened.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return name

    assert http.get(f"/v1/sessions/{asyncio.run(run())}").status_code == 404


def test_a_call_that_needs_most_of_its_deadline_is_left_to_a_server_that_lives(both: Both) -> None:
    asked: list[str] = []
    probed = asyncio.Event()

    async def respond(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.url.host} {request.url.path}")
        if request.url.path == "/healthz":
            probed.set()
            return httpx.Response(401)
        await probed.wait()
        await asyncio.sleep(1.2)  # with the quarter before, more than half of the deadline
        return httpx.Response(200, json=answer(1)[1])

    client = both(["http://a", "http://b"], deadline_s=4, transport=httpx.MockTransport(respond))
    assert client.predict("a").position == 1
    assert asked == ["a /v1/predict", "a /healthz"]


def test_a_server_that_hangs_leaves_time_for_the_next_address(both: Both) -> None:
    asked: list[str] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.url.host} {request.url.path}")
        if request.url.host == "a":
            await asyncio.sleep(TIMEOUT_S)
        return httpx.Response(200, json=answer(1)[1])

    client = both(["http://a", "http://b"], deadline_s=2, transport=httpx.MockTransport(respond))
    assert client.predict("a").position == 1
    assert asked == ["a /v1/predict", "a /healthz", "b /v1/predict"]


def test_a_call_in_the_thread_that_runs_the_calls_is_refused() -> None:
    async def respond(request: httpx.Request) -> httpx.Response:
        with pytest.raises(RuntimeError, match="the thread that runs Wane's calls"):
            wane.models()
        return httpx.Response(200, json={"data": []})

    with Wane("http://wane", transport=httpx.MockTransport(respond)) as wane:
        assert wane.models() == ()


def test_a_forked_process_has_an_event_loop_of_its_own(url: str) -> None:
    program = f"""
import os
from wane.client import Wane
assert Wane({url!r}).models()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(not Wane({url!r}).models())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_a_client_that_was_used_before_a_fork_works_in_the_new_process(url: str) -> None:
    program = f"""
import os, httpx
from wane.client import Wane
wane, other = Wane({url!r}), Wane({url!r}, transport=httpx.AsyncHTTPTransport())
assert wane.models() and other.models()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert wane.models() and other.models()
else:
    found = wane.models()
    try:
        other.models()
    except RuntimeError as error:
        os._exit(not (found and "make a new client" in str(error)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_python_exits_while_a_session_is_open(url: str) -> None:
    """Python closes the generators that hold them, and deletes the object, after it has stopped all other threads."""
    program = f"""
from wane.client import Wane
def steps():
    with Wane({url!r}) as wane, wane.session() as session:
        yield session.append([5]).position
def tokens():
    for token in Wane({url!r}).generate_stream([5], max_tokens=50):
        yield token
class Late:
    wane = Wane({url!r})
    def __del__(self):
        self.wane.models()
begun = steps(), tokens(), Late()
assert next(begun[0]) == 1 and next(begun[1]) and begun[2].wane.models()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "cannot be made while Python is exiting" in done.stderr


@pytest.mark.parametrize(
    "end", ["", "import atexit; atexit.register(gone)", "import atexit; atexit.register(wane.close)"]
)
def test_a_client_that_was_never_used_starts_no_thread_at_exit(end: str) -> None:
    program = f"""
import threading
from wane.client import Wane
wane = Wane("http://wane")
def gone():
    global wane
    del wane
    assert threading.active_count() == 1
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.client.blocking.LOOPS", {})
    with Wane("http://wane", transport=Script().transport) as wane:
        for _ in range(2):  # Python 3.12 starts no thread at exit
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cannot be started: no more"):
                patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more")))
                wane.models()
        assert wane.models() == ()


@pytest.fixture
def stalling() -> Iterator[str]:
    """The address of a server that answers with headers and the beginning of a body, and then waits."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    accepted.append(connection)
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n: wait\n\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in accepted:
            connection.close()


def test_a_body_that_stalls_is_late_at_the_deadline(both: Both, stalling: str) -> None:
    client = both(stalling, deadline_s=0.2)
    for call in (lambda: client.predict("a"), lambda: list(client.generate_stream("a"))):
        with pytest.raises(Unreachable, match="the answer was not complete in time"):
            call()


def test_a_very_long_deadline_is_possible(wane: Any) -> None:
    assert wane.predict([5], deadline_s=1e300).predictions
    assert len(list(wane.generate_stream([5], max_tokens=2, deadline_s=1e300))) == 2
    with wane.session() as session, session.stream():
        assert session.append(5, deadline_s=1e300).position == 1


def test_a_websocket_that_is_closed_for_a_long_message_is_too_large() -> None:
    found = refused(ConnectionClosedError(Close(1009, "the message is too long"), None))
    assert isinstance(found, httpx.Response) and (found.status_code, found.text) == (413, "the message is too long")
    assert isinstance(refused(ConnectionClosedError(Close(1001, ""), None)), str)


def test_a_message_that_is_too_long_is_refused_at_once(wane: Any) -> None:
    with wane.session(model=TEXT_MODEL) as session, session.stream():
        session.append(5)
        with pytest.raises(TooLarge):
            session.append([5] * 1_000_000)
        assert session.append(6).position == 2


def test_no_log_has_the_key(both: Both, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with both(url, key="my-secret", deadline_s=TIMEOUT_S).session() as session, session.stream():
        session.append(5)
    assert caplog.records and "my-secret" not in caplog.text


def test_no_error_has_the_key_or_a_password() -> None:
    for arguments, options in (
        (("http://a",), {"key": b"my-secret"}),
        (("http://a",), {"key": "my-secret\n"}),
        (("http://me:my-secret@a",), {}),
        (("me:my-secret@a",), {}),
    ):
        with pytest.raises(ValueError) as raised:
            Wane(*arguments, **options)
        assert "secret" not in str(raised.value)
