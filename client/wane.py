"""The client for asyncio."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, Unpack

import httpx

from .answers import Answer, Comparison, Data, Generated, GeneratedToken, Model, Report, Score
from .options import (
    ClientOptions,
    CompareOptions,
    GenerateOptions,
    Input,
    PredictOptions,
    ScoreOptions,
    SessionOptions,
    Timed,
    sequence,
)
from .servers import Servers
from .session import AsyncSession

BAR = 40


class _Progress(Data):
    """How many tokens of a score are done."""

    done: int
    total: int


class AsyncWane:
    """Like `Wane`, for tasks of asyncio. Its methods are coroutines, except `session` and `generate_stream`."""

    def __init__(
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        """See `Wane`."""
        self._servers = Servers(addresses, transport, options)
        self._kinds: dict[str, str] = {}  # the kind of each model's vocabulary

    async def predict(self, input: Input, **options: Unpack[PredictOptions]) -> Answer:  # noqa: A002
        """Predicts what follows a text, token ids, or a list of names of events."""
        body, deadline = self._servers.started(PredictOptions, options)
        return await self._servers.ask(Answer, "POST /v1/predict", body | sequence(input), deadline)

    async def compare(self, input: Input, **options: Unpack[CompareOptions]) -> tuple[Comparison, ...]:  # noqa: A002
        """Compares recurrent mode with windows of several sizes. Returns a comparison for each model."""
        body, deadline = self._servers.started(CompareOptions, options)
        kind = tuple[Comparison, ...]
        return await self._servers.ask(kind, "POST /v1/compare", body | sequence(input), deadline, member="models")

    async def score(self, input: Input, *, progress: bool = False, **options: Unpack[ScoreOptions]) -> Score:  # noqa: A002
        """Returns the log-probability of each token. `progress` shows a bar on stderr."""
        body, deadline = self._servers.started(ScoreOptions, options)
        body |= sequence(input)
        request, found = "POST /v1/score", dict[str, Any]()
        if not progress:
            return await self._servers.ask(Score, request, body, deadline)
        events = self._servers.events("/v1/score", body, deadline, ("progress", "tokens", "finish"))
        async with aclosing(events):
            async for name, content in events:
                if name == "progress":
                    now = self._servers.read(_Progress, request, content)
                    share = now.done / max(now.total, 1)
                    bar = "#" * int(BAR * share)
                    sys.stderr.write(f"\r[{bar:{BAR}}] {share:4.0%}" + "\n" * (share == 1))
                    continue
                part = self._servers.read(dict[str, Any], request, content)
                if name == "finish":
                    return self._servers.read(Score, request, part | found)
                for key, values in part.items():
                    found[key] = found.get(key, []) + values if isinstance(values, list) else values
        raise AssertionError("events end with an error or a result: this is a bug")

    async def generate(self, input: Input, **options: Unpack[GenerateOptions]) -> Generated:  # noqa: A002
        """Continues a text, token ids, or a list of names of events."""
        body, deadline = self._servers.started(GenerateOptions, options)
        return await self._servers.ask(Generated, "POST /v1/generate", body | sequence(input), deadline)

    def generate_stream(self, input: Input, **options: Unpack[GenerateOptions]) -> AsyncGeneration:  # noqa: A002
        """Like `generate`, but returns an asynchronous iterator of the tokens."""
        body, deadline = self._servers.started(GenerateOptions, options)
        return AsyncGeneration(self._servers, body | sequence(input), deadline)

    async def models(self, **options: Unpack[Timed]) -> tuple[Model, ...]:
        """Returns the served models. The default model is the first."""
        _, deadline = self._servers.started(Timed, options)
        return await self._servers.ask(tuple[Model, ...], "GET /v1/models", None, deadline, member="data")

    async def report(self, **options: Unpack[Timed]) -> Report:
        """Returns a server's statistics since its start."""
        _, deadline = self._servers.started(Timed, options)
        content = (await self._servers.reply("GET /v1/report", None, deadline)).content
        report = self._servers.read(Report, "GET /v1/report", content)
        return replace(report, document=json.loads(content))

    def session(self, name: str | None = None, **options: Unpack[SessionOptions]) -> AsyncSession:
        """Returns the session with this id, or a new session."""
        return AsyncSession(self._servers, self._kinds, name, options)

    async def close(self) -> None:
        """Closes the connections."""
        await self._servers.connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncGeneration:
    """Iterates once over generated tokens. Afterwards `result` is the whole answer, except log-probabilities."""

    def __init__(self, servers: Servers, body: dict[str, Any], deadline: float) -> None:
        self.result: Generated | None = None
        self._servers, self._begun = servers, False
        self._events = servers.events("/v1/generate", body, deadline, ("token", "finish"))

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        if self._begun:
            raise RuntimeError("a generation can be iterated over only once")
        self._begun = True
        async with aclosing(self._events):
            async for name, content in self._events:
                if name == "finish":
                    self.result = self._servers.read(Generated, "POST /v1/generate", content)
                    return
                yield self._servers.read(GeneratedToken, "POST /v1/generate", content)
