"""A client of one session. It sends steps when they are due, and records their answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.stack.harness.connection import Broken, Connection, Reply
from tests.stack.harness.history import Append, Outcome

TIMEOUT_S = 120.0
"""The timeout of one answer, and also of one step with its retries, in seconds. Only a test that hangs reaches it."""

AGAIN_S = 0.02
"""The seconds between two attempts to send a step."""

RETRYABLE = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Timed:
    """An answered step. `due_s` is the time when the step was due, and `ended_s` the time when its answer arrived, in
    seconds of the event loop's clock."""

    due_s: float
    ended_s: float

    @property
    def latency_s(self) -> float:
        """The time from when the step was due until its answer arrived."""
        return self.ended_s - self.due_s


class Failed(Exception):
    """Raised if the answer to a request has an unexpected status."""


@dataclass(slots=True)
class SessionClient:
    """A session and its only client.

    If `retries` is true, each step names its expected position, and the client retries the step until it is answered.
    If `retries` is false, the client sends each step once, without a position. `answers` maps the position after each
    step to the JSON document of its answer.
    """

    port: int
    session: str
    random: Random
    vocabulary: int
    retries: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    position: int = 0
    tokens: list[int] = field(default_factory=list)
    history: list[Append] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    timed: list[Timed] = field(default_factory=list)
    repeated: int = 0
    failures: list[str] = field(default_factory=list)
    connection: Connection = field(init=False)
    _gap: asyncio.Timeout | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.connection = Connection(self.port)

    async def begin(self, first: int) -> None:
        """Creates the session, and sends a first step with `first` random tokens."""
        reply = await self.connection.ask(
            "POST", "/v1/sessions", {"session": self.session}, {**self.headers, "x-session-id": self.session}
        )
        if reply.status != 201:
            raise Failed(f"creating {self.session} gave {reply.status}: {reply.document}")
        await self.step(tuple(self.random.randrange(1, self.vocabulary) for _ in range(first)))
        self.timed.clear()

    async def step_at_rate(self, rate: float, over: asyncio.Event) -> None:
        """Sends steps of one token until `over` is set, `rate` steps a second on average. The due time of a step does
        not depend on the previous answer."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due += self.random.expovariate(rate)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due) as self._gap:
                    await over.wait()
                return
            self._gap = None
            due = min(due, clock())  # `due` is still in the future if `hurry` has ended the wait
            await self.step((self.random.randrange(1, self.vocabulary),), due)

    def hurry(self) -> None:
        """Makes `step_at_rate` send its next step immediately, as if the step were due."""
        if self._gap is not None and not self._gap.expired():
            self._gap.reschedule(0)

    async def step(self, tokens: tuple[int, ...], due_s: float | None = None) -> None:
        """Sends one step. Records the step, whatever its outcome."""
        clock = asyncio.get_running_loop().time
        invoked = clock()
        start = self.position if self.retries else None
        try:
            reply = await (self._until_answered(tokens, clock) if self.retries else self._once(tokens))
            if reply.status != 200:
                raise Failed(f"{reply.status}: {reply.document}")
        except (Broken, Failed, TimeoutError) as error:
            self.history.append(Append(tokens, Outcome.UNKNOWN, start, invoked))
            self.failures.append(f"{self.session} at {self.position}: {type(error).__name__} {error}")
            return
        position = reply.document["position"]
        self.history.append(Append(tokens, Outcome.ACKNOWLEDGED, position - len(tokens), invoked, clock()))
        self.timed.append(Timed(invoked if due_s is None else due_s, clock()))
        self.answers[position] = reply.document
        self.tokens += tokens
        self.position = position

    async def _once(self, tokens: tuple[int, ...], headers: dict[str, str] | None = None) -> Reply:
        async with asyncio.timeout(TIMEOUT_S):
            path = f"/v1/sessions/{self.session}/tokens"
            return await self.connection.ask("POST", path, {"tokens": tokens}, {**self.headers, **(headers or {})})

    async def _until_answered(self, tokens: tuple[int, ...], clock: Callable[[], float]) -> Reply:
        """Sends a step. Retries it while there is no answer, or while the answer has one of the statuses RETRYABLE."""
        give_up = clock() + TIMEOUT_S
        while True:
            try:
                reply = await self._once(tokens, {"x-wane-position": str(self.position)})
                if reply.status not in RETRYABLE or clock() > give_up:
                    return reply
            except (Broken, TimeoutError):
                if clock() > give_up:
                    raise
            self.repeated += 1
            await asyncio.sleep(AGAIN_S)
