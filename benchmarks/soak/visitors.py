"""The visitors, which are the clients of the soak that behave well. They create, step, read, rewind, delete and abandon
sessions, and check every answer.

The ledger records the acknowledged tokens of every session. The position in every answer is compared with the ledger. A
wrong position means that a step was lost or appended twice.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.soak.connection import Connection, Reply

LIVELY = 0.2  # share of lively sessions (those that are used often) among the created sessions
LIVELY_CALLS = 0.8  # share of lively sessions among the sessions that the actions use
LIVELY_ENDS = 0.6 / 2.8  # share of lively sessions in deletions: as many lively sessions are deleted as created

ACTIONS = {"step": 89.0, "start": 3.0, "end": 2.8, "look": 1.7, "predict": 1.5, "rewind": 1.0, "leave": 1.0}
STEPS = "/v1/sessions/{session}/tokens"
ROUTES = {
    "step": ("POST", STEPS),
    "leave": ("POST", STEPS),
    "start": ("POST", "/v1/sessions"),
    "end": ("DELETE", "/v1/sessions/{session}"),
    "look": ("GET", "/v1/sessions/{session}"),
    "predict": ("POST", "/v1/predict"),
    "rewind": ("POST", "/v1/sessions/{session}/rewind"),
}
EXPECTED = {"step": 200, "start": 201, "end": 204, "look": 200, "predict": 200, "rewind": 200}


@dataclass(slots=True)
class Kept:
    """The ledger's record of one session."""

    name: str
    lively: bool
    tokens: list[int] = field(default_factory=list)
    touched_s: float = 0.0


@dataclass
class Ledger:
    """The sessions that have no request in flight, with their acknowledged tokens, and the counts of requests and
    answers. `lively` are the sessions that are used often; `others` are used rarely. `states` counts answers by the
    source of the session's state. `wrong` has the error messages."""

    vocabulary: int
    ttl_s: float
    lively: list[Kept] = field(default_factory=list)
    others: list[Kept] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)  # number of requests by route
    answered: Counter[str] = field(default_factory=Counter)  # number of answers by route and status
    states: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    def take(self, share: float) -> Kept | None:
        """Removes a random session from the ledger for exclusive use and returns it. With probability `share`, the
        session is one of `lively`, and else one of `others`. Returns None if the chosen list is empty."""
        pool = self.lively if random.random() < share else self.others
        if not pool:
            return None
        index = random.randrange(len(pool))
        pool[index], pool[-1] = pool[-1], pool[index]
        return pool.pop()

    def give(self, kept: Kept) -> None:
        """Puts a session back into the ledger after its exclusive use."""
        (self.lively if kept.lively else self.others).append(kept)

    def count(self, action: str, reply: Reply | None) -> None:
        """Counts a request and its answer. reply: None if the client hung up."""
        method, route = ROUTES[action]
        self.asked[f"{method} {route}"] += 1
        if reply is None:
            self.outcomes["hung up"] += 1
        else:
            self.answered[f"{method} {route} {reply.status}"] += 1


class Visitors:
    """Runs the visitors' actions and checks the answers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._started = 0

    async def act(self, connection: Connection, action: str) -> None:
        """Takes a session from the ledger and runs one action on it."""
        ledger = self.ledger
        kept = None if action == "start" else ledger.take(LIVELY_ENDS if action == "end" else LIVELY_CALLS)
        if kept is None:
            kept = self._new(random.random() < LIVELY)
            action = "start"
        if action in ("rewind", "predict") and not kept.tokens:
            action = "step"
        if action == "leave":
            token = self._token()
            await connection.leave("POST", STEPS.format(session=kept.name), self._step(kept, token))
            ledger.count("leave", None)
            # The client sends the same step again. The step's token must be appended exactly once.
            await self._ask(connection, "step", kept, token)
        else:
            await self._ask(connection, action, kept, self._token())

    async def _ask(self, connection: Connection, action: str, kept: Kept, token: int) -> None:
        ledger = self.ledger
        body: dict[str, object] | None = None
        if action == "start":
            body = {"session": kept.name}
        elif action == "step":
            body = self._step(kept, token)
        elif action == "predict":
            body = {"session": kept.name}
        elif action == "rewind":
            body = {"position": len(kept.tokens) - 1}
        method, route = ROUTES[action]
        started_s = time.monotonic()
        reply = await connection.ask(method, route.format(session=kept.name), body)
        now_s = time.monotonic()
        ledger.count(action, reply)
        if action == "step":
            ledger.latencies_s.append(now_s - started_s)
        # The session's idle time is at most this long. It may be shorter, because the server may have handled the
        # session's last request after `touched_s`.
        idle_s = now_s - kept.touched_s
        if reply.status == EXPECTED[action]:
            self._check(action, kept, token, reply)
            if action != "look":
                kept.touched_s = started_s
            if action != "end":
                ledger.give(kept)
        elif reply.status == 429:
            ledger.outcomes["refused"] += 1
            if action != "start":
                ledger.give(kept)
        elif reply.status == 404 and idle_s > ledger.ttl_s:
            ledger.outcomes["expired"] += 1
        else:
            ledger.wrong.append(
                f"unexpected answer to {action} of {kept.name} at position {len(kept.tokens)}, "
                f"idle for {idle_s:.1f} s: {reply}"
            )

    def _check(self, action: str, kept: Kept, token: int, reply: Reply) -> None:
        if action == "step":
            kept.tokens.append(token)
            self.ledger.states[reply.body["state"]] += 1
            self.ledger.outcomes["replayed"] += reply.body["replayed"]
        elif action == "rewind":
            kept.tokens.pop()
        if reply.body is not None and reply.body["position"] != len(kept.tokens):
            self.ledger.wrong.append(
                f"{action} of {kept.name}: the answer's position is {reply.body['position']}, "
                f"expected {len(kept.tokens)}"
            )

    async def populate(self, connection: Connection, lively: int, others: int) -> None:
        """Creates sessions: `lively` is the number of sessions that are used often, `others` the number of the other
        sessions."""
        for index in range(lively + others):
            await self._ask(connection, "start", self._new(index < lively), 0)

    def _new(self, lively: bool) -> Kept:
        self._started += 1
        return Kept(f"soak-{self._started}", lively)

    def _token(self) -> int:
        return random.randrange(2, self.ledger.vocabulary)

    def _step(self, kept: Kept, token: int) -> dict[str, object]:
        return {"tokens": [token], "expected_position": len(kept.tokens)}


async def closed(connections: list[Connection], visitors: Visitors, seconds: float) -> float:
    """Runs actions in a closed loop on every connection. Returns the number of actions per second."""
    ends_s = time.monotonic() + seconds
    done = 0

    async def one(connection: Connection) -> None:
        nonlocal done
        while time.monotonic() < ends_s:
            await visitors.act(connection, some_action())
            done += 1

    await asyncio.gather(*map(one, connections))
    return done / seconds


async def opened(connections: list[Connection], visitors: Visitors, rate: float, seconds: float) -> int:
    """Runs actions in an open loop at random times, `rate` per second. Returns the number of actions.

    If no connection is free, an action waits for one. No action starts after `seconds`.
    """
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in connections:
        free.put_nowait(connection)
    running: set[asyncio.Task[None]] = set()

    async def one(connection: Connection) -> None:
        try:
            await visitors.act(connection, some_action())
        except Exception as error:  # The soak reports this error at its end, together with the other errors.
            visitors.ledger.wrong.append(repr(error))
            connection.close()
        finally:
            free.put_nowait(connection)

    begun_s = time.monotonic()
    due_s, done = 0.0, 0
    while (due_s := due_s + random.expovariate(rate)) < seconds and time.monotonic() < begun_s + seconds:
        early_s = begun_s + due_s - time.monotonic()
        if early_s > 0:
            await asyncio.sleep(early_s)
        task = asyncio.create_task(one(await free.get()))
        running.add(task)
        task.add_done_callback(running.discard)
        done += 1
    await asyncio.gather(*running)
    return done


def some_action() -> str:
    """Returns a random action, drawn with the weights in ACTIONS."""
    return random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
