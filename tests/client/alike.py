"""Runs one test with the blocking client and with the asyncio client. `Alike` gives the objects of the asyncio client
the form of those of the other client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator
from contextlib import AbstractAsyncContextManager
from inspect import isawaitable
from typing import Any, Self

import httpx

from wane.client import AsyncWane, Wane


class Alike:
    """Calls the methods of an object of the asyncio client, and waits for their results."""

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self._inner, self._runner = inner, runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (lambda *given, **options: self._result(found(*given, **options))) if callable(found) else found

    def _result(self, found: Any) -> Any:
        if isawaitable(found):
            found = self._await(found)
        return Alike(found, self._runner) if isinstance(found, AbstractAsyncContextManager | AsyncIterable) else found

    def _await(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())

    def __enter__(self) -> Any:
        return self._result(self._inner.__aenter__())

    def __exit__(self, *raised: Any) -> Any:
        return self._await(self._inner.__aexit__(*raised))

    def __iter__(self) -> Iterator[Any]:
        inner = aiter(self._inner)
        try:
            while True:
                try:
                    yield self._await(anext(inner))
                except StopAsyncIteration:
                    return
        finally:
            self._await(inner.aclose())


class Both:
    """Makes clients of one kind, and closes them after the test."""

    def __init__(self, asynchronous: bool) -> None:
        self._runner = asyncio.Runner() if asynchronous else None
        self._made: list[Any] = []

    def __call__(self, *addresses: Any, transport: Any = None, **options: Any) -> Any:
        """Returns a client. `transport` must fit both kinds."""
        if self._runner is None:
            self._made.append(Wane(*addresses, transport=transport, **options))
        else:
            self._made.append(Alike(AsyncWane(*addresses, transport=transport, **options), self._runner))
        return self._made[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._made:
            one.close()
        if self._runner is not None:
            self._runner.close()


class Lossy(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Loses answers: the server carries out a request, but its client sees a lost connection. `loses` says for each
    request to `path` whether its answer is lost; further answers arrive. `sent` has all requests to `path`."""

    def __init__(self, path: str, loses: list[bool]) -> None:
        self.path, self.loses = path, list(loses)
        self.sent: list[httpx.Request] = []
        self._inner, self._async_inner = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        if self._is_lost(request):
            response.read()
            raise httpx.ReadError("the connection was lost")
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._async_inner.handle_async_request(request)
        if self._is_lost(request):
            await response.aread()
            raise httpx.ReadError("the connection was lost")
        return response

    def _is_lost(self, request: httpx.Request) -> bool:
        if not request.url.path.endswith(self.path):
            return False
        self.sent.append(request)
        return bool(self.loses) and self.loses.pop(0)

    def close(self) -> None:
        self._inner.close()

    async def aclose(self) -> None:
        await self._async_inner.aclose()
