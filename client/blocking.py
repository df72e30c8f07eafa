"""The client without asyncio. All its calls run in one thread's event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from .answers import Generated, GeneratedToken
from .options import ClientOptions, GenerateOptions, Input, SessionOptions, Timed
from .session import AsyncSession
from .wane import AsyncGeneration, AsyncWane

P = ParamSpec("P")
T = TypeVar("T")

THREAD = "wane-client"
INTERRUPTED_S = 1.0  # how long an interrupted call may take to end


LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork copies no thread


def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process's calls, which a thread of its own runs. Raises RuntimeError if Python is
    exiting: it has stopped the thread, or does not start one."""
    if sys.is_finalizing():
        raise RuntimeError("a call of Wane cannot be made while Python is exiting")
    loop = LOOPS.get(os.getpid())
    if loop is None:
        made = asyncio.new_event_loop()
        loop = LOOPS.setdefault(os.getpid(), made)  # of several threads that are here, one makes it
        if loop is made:
            try:
                threading.Thread(target=loop.run_forever, name=THREAD, daemon=True).start()
            except RuntimeError as error:
                LOOPS.pop(os.getpid()).close()
                raise RuntimeError(f"the thread that runs Wane's calls cannot be started: {error}") from None
        else:
            made.close()
    return loop


def _begin(call: Awaitable[object], loop: asyncio.AbstractEventLoop) -> None:
    """Begins a call in the event loop."""

    async def run() -> None:
        await call

    asyncio.run_coroutine_threadsafe(run(), loop)


def _is_running() -> bool:
    """Whether this process has an event loop in which something may be open. What is open when Python exits ends with
    the process."""
    return os.getpid() in LOOPS and not sys.is_finalizing()


def _close(close: Callable[[], Awaitable[object]]) -> None:
    """Begins to close what was opened in the event loop."""
    if _is_running():
        _begin(close(), _loop())


def _run(call: Awaitable[T]) -> T:
    """Runs a call in the event loop. If this thread is interrupted, the call is cancelled."""
    try:
        if threading.current_thread().name == THREAD:  # such as where the loop's thread collects an abandoned generator
            raise RuntimeError("a call of Wane cannot be made in the thread that runs Wane's calls")
        loop_of_calls = _loop()
    except RuntimeError:
        if isinstance(call, Coroutine):
            call.close()
        raise
    future, over = Future[T](), threading.Event()

    async def run() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "this runs in a task: this is a bug"
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))  # no effect on a task that has ended
        with suppress(InvalidStateError):  # interrupted meanwhile
            try:
                future.set_result(await call)
            except BaseException as error:
                future.set_exception(error)
        over.set()

    try:
        _begin(run(), loop_of_calls)
        return future.result()
    finally:
        if future.cancel():
            over.wait(INTERRUPTED_S)


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Returns the method that waits for the result of an asyncio client's `method`."""

    @wraps(method)
    def wait(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _run(method(self._inner, *arguments, **options))

    return wait


class Wane:
    """A client of one server, or of several replicas. Threads may share it. A `with` block closes its connections."""

    predict = blocking(AsyncWane.predict)
    compare = blocking(AsyncWane.compare)
    score = blocking(AsyncWane.score)
    generate = blocking(AsyncWane.generate)
    models = blocking(AsyncWane.models)
    report = blocking(AsyncWane.report)

    def __init__(
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        """`addresses` are those of one server or of several replicas; default: WANE_URL, separated by commas.
        `transport` is httpx's asynchronous one, for example with certificates of one's own. Raises ValueError."""
        self._inner = AsyncWane(addresses, transport=transport, **options)
        servers = self._inner._servers  # which a session holds, too
        weakref.finalize(servers, _close, servers.connections.close).atexit = False

    def session(self, name: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Returns the session with this id, or a new session."""
        return Session(self._inner.session(name, **options))

    def generate_stream(self, input: Input, **options: Unpack[GenerateOptions]) -> Generation:  # noqa: A002
        """Like `generate`, but returns an iterator of the tokens, as they are generated."""
        return Generation(self._inner.generate_stream(input, **options))

    def close(self) -> None:
        """Closes the connections."""
        if _is_running():
            _run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """A session, for one thread at a time. A `with` block opens it, and ends it on the server if its id is new."""

    append = blocking(AsyncSession.append)
    type = blocking(AsyncSession.type)
    predict = blocking(AsyncSession.predict)
    generate = blocking(AsyncSession.generate)
    rewind = blocking(AsyncSession.rewind)
    continuations = blocking(AsyncSession.continuations)
    close = blocking(AsyncSession.close)

    def __init__(self, inner: AsyncSession) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """The session's id."""
        return self._inner.name

    @property
    def position(self) -> int:
        """The number of tokens after the last answer; 0 before the first call."""
        return self._inner.position

    @property
    def rebuilds(self) -> int:
        """How often a server was given tokens again that it had lost."""
        return self._inner.rebuilds

    def fork(self, name: str | None = None, position: int | None = None, **options: Unpack[Timed]) -> Session:
        """Starts another session with this session's tokens up to `position`, by default all. `name`: its id. Later
        steps of one of the two do not change the other."""
        return Session(_run(self._inner.fork(name, position, **options)))

    @contextmanager
    def stream(self) -> Iterator[Session]:
        """Within the block, steps go over one WebSocket. Needs the extra `stream`."""
        block = self._inner.stream()
        _run(block.__aenter__())
        try:
            yield self
        finally:
            _run(block.__aexit__(None, None, None))

    def __enter__(self) -> Self:
        _run(self._inner.__aenter__())
        return self

    def __exit__(self, *raised: Any) -> None:
        _run(self._inner.__aexit__(*raised))


class Generation:
    """Iterates once over generated tokens. Afterwards `result` is the whole answer, except log-probabilities."""

    def __init__(self, inner: AsyncGeneration) -> None:
        self._inner = inner

    @property
    def result(self) -> Generated | None:
        return self._inner.result

    def __iter__(self) -> Iterator[GeneratedToken]:
        tokens = aiter(self._inner)
        try:
            while (token := _run(anext(tokens, None))) is not None:
                yield token
        finally:
            _close(tokens.aclose)  # type: ignore[attr-defined]
