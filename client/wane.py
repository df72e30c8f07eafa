"""The clients: `Wane`, and `AsyncWane` for asyncio. Both have the same methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Self, Unpack

import httpx

from .answers import Generated, GeneratedToken
from .calls import Calls, Events
from .driver import AsyncDriver, Awaiting, Blocking, Driver, awaiting, blocking
from .errors import WaneError
from .options import ClientOptions, GenerateOptions, Input, SessionOptions
from .retry import Servers
from .session import LEAVING_S, Facts, Steps


class Wane(Blocking[Calls]):
    """A client of one server, or of several replicas. Threads may share it. A `with` block closes its connections."""

    predict = blocking(Calls.predict)
    compare = blocking(Calls.compare)
    score = blocking(Calls.score)
    generate = blocking(Calls.generate)
    models = blocking(Calls.models)
    report = blocking(Calls.report)

    def __init__(
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        """`addresses` are those of one server or of several replicas; default: WANE_URL, separated by commas.
        `transport` is httpx's, for example with certificates of one's own. Raises ValueError."""
        super().__init__(Calls(Servers.of(addresses, options)), Driver(transport))

    def session(self, name: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Returns the session with this id, or a new session."""
        return Session(Steps.of(self._plans, name, options), self._driver)

    def generate_stream(self, input: Input, **options: Unpack[GenerateOptions]) -> Generation:  # noqa: A002
        """Like `generate`, but returns an iterator of the tokens, as they are generated."""
        return Generation(self._plans.generation(input, options), self._driver)

    def close(self) -> None:
        """Closes the connections."""
        self._driver.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session(Blocking[Steps], Facts):
    """A session, for one thread at a time. A `with` block opens it, and ends it on the server if its id is new."""

    append = blocking(Steps.append)
    type = blocking(Steps.type)
    predict = blocking(Steps.predict)
    generate = blocking(Steps.generate)
    rewind = blocking(Steps.rewind)
    close = blocking(Steps.close)

    @contextmanager
    def stream(self) -> Iterator[Session]:
        """Within the block, steps go over one WebSocket. Needs the extra `stream`."""
        socket = self._plans.streamed()
        try:
            yield self
        finally:
            self._plans.socket = None
            self._driver.close(socket)

    def __enter__(self) -> Self:
        self._driver.run(self._plans.open())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._plans.owned and kind is None:
            self.close()
        elif self._plans.owned:  # what was raised is raised further
            with suppress(WaneError):
                self.close(deadline_s=LEAVING_S)


class Generation(Blocking[Events]):
    """Iterates once over generated tokens. Afterwards `result` is the whole answer, except log-probabilities."""

    result: Generated | None = None

    def __iter__(self) -> Iterator[GeneratedToken]:
        self._plans.begin()
        try:
            while isinstance(found := self._driver.run(self._plans.token()), GeneratedToken):
                yield found
            self.result = found
        finally:
            if self._plans.reply is not None:
                self._driver.end(self._plans.reply)


class AsyncWane(Awaiting[Calls]):
    """Like `Wane`, for tasks of asyncio. Its methods are coroutines, except `session` and `generate_stream`."""

    predict = awaiting(Calls.predict)
    compare = awaiting(Calls.compare)
    score = awaiting(Calls.score)
    generate = awaiting(Calls.generate)
    models = awaiting(Calls.models)
    report = awaiting(Calls.report)

    def __init__(
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        """See `Wane`."""
        super().__init__(Calls(Servers.of(addresses, options)), AsyncDriver(transport))

    def session(self, name: str | None = None, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Returns the session with this id, or a new session."""
        return AsyncSession(Steps.of(self._plans, name, options), self._driver)

    def generate_stream(self, input: Input, **options: Unpack[GenerateOptions]) -> AsyncGeneration:  # noqa: A002
        """Like `generate`, but returns an asynchronous iterator of the tokens, as they are generated."""
        return AsyncGeneration(self._plans.generation(input, options), self._driver)

    async def close(self) -> None:
        """Closes the connections."""
        await self._driver.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSession(Awaiting[Steps], Facts):
    """Like `Session`, for one task at a time."""

    append = awaiting(Steps.append)
    type = awaiting(Steps.type)
    predict = awaiting(Steps.predict)
    generate = awaiting(Steps.generate)
    rewind = awaiting(Steps.rewind)
    close = awaiting(Steps.close)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncSession]:
        """Within the block, steps go over one WebSocket. Needs the extra `stream`."""
        socket = self._plans.streamed()
        try:
            yield self
        finally:
            self._plans.socket = None
            await self._driver.close(socket)

    async def __aenter__(self) -> Self:
        await self._driver.run(self._plans.open())
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if self._plans.owned and kind is None:
            await self.close()
        elif self._plans.owned:
            with suppress(WaneError):
                await self.close(deadline_s=LEAVING_S)


class AsyncGeneration(Awaiting[Events]):
    """Like `Generation`, for `async for`."""

    result: Generated | None = None

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        self._plans.begin()
        try:
            while isinstance(found := await self._driver.run(self._plans.token()), GeneratedToken):
                yield found
            self.result = found
        finally:
            if self._plans.reply is not None:
                await self._driver.end(self._plans.reply)
