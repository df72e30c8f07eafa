"""Measures parked sessions, which have a history but no state: the resident memory of a process with a million of them,
and the store's time per call.

    python -m benchmarks.parked [--sessions N] [--history TOKENS] [--json FILE]

The resident memory of a process is compared with 1 GiB. Each way to store the sessions is measured in its own process:

- objects: a dict of Python objects. Each object has its history in a list of ints. All lists refer to the same int
objects.
- store: `MemoryStore`, which the server uses.
- server: the same store, in a process that has the default model loaded, verified and warmed up.

Histories are filled in four passes over all sessions, because the histories of concurrent sessions grow together. Each
pass appends a quarter of every history. Then a tenth of the sessions is deleted and created again, twice (the churn).
If the resident memory grows during the churn, this is memory that was freed but could not be reused. At the end all
sessions expire at the same time, and repeated calls of `count` delete them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.summary import provenance, rounded, write_json
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import Commit, SessionRecord, TokenHistory, of_tokens
from wane.service.settings import Settings
from wane.service.types.common import Mode

SHIPPED = Path("models/bundles/gated-stable")
VOCABULARY = 2048
PIECES = 4
CHURNS = 2
CHURNED = 10  # A churn deletes one in CHURNED sessions and creates a new session for each deleted session.
TIMED = 20_000
TTL_S = 24 * 3600
WAYS = ("objects", "store", "server")
GIB = 2**30
Result = dict[str, Any]


class Kept(Protocol):
    """The interface of the measured stores of sessions."""

    async def start(self, session: str) -> None: ...
    async def append(self, session: str, tokens: tuple[int, ...]) -> None: ...
    async def delete(self, session: str) -> None: ...


@dataclass
class Plain:
    """A session in `Objects`. Its history is a list."""

    model: str = "m"
    model_version: str = "1"
    mode: str = "auto"
    position: int = 0
    revision: int = 0
    history: list[int] = field(default_factory=list)
    touched_s: float = 0.0
    last: tuple[int, bytes, str | None] | None = None


class Objects:
    """Stores sessions as a dict of Python objects."""

    def __init__(self, session_history_tokens: int) -> None:
        self._keep = session_history_tokens
        self._sessions: dict[str, Plain] = {}
        self._ints = list(range(VOCABULARY))

    async def start(self, session: str) -> None:
        self._sessions[session] = Plain(history=[0], touched_s=time.monotonic())

    async def append(self, session: str, tokens: tuple[int, ...]) -> None:
        plain = self._sessions[session]
        plain.last = (plain.position, of_tokens(tokens), None)
        plain.history = [*plain.history, *(self._ints[token] for token in tokens)][-self._keep :]
        plain.position += len(tokens)
        plain.revision += 1
        plain.touched_s = time.monotonic()

    async def delete(self, session: str) -> None:
        del self._sessions[session]


class Stored:
    """Stores sessions in the server's `MemoryStore`."""

    def __init__(self, session_history_tokens: int, models: ModelRegistry | None = None) -> None:
        self.models = models
        self.later_s = 0.0
        self.store = MemoryStore(session_history_tokens, TTL_S, 2**40, clock=lambda: time.monotonic() + self.later_s)
        self._empty = TokenHistory.start(0, VOCABULARY)

    async def start(self, session: str) -> None:
        assert await self.store.create(SessionRecord(session, "m", "1", Mode.AUTO, 0, self._empty))

    async def append(self, session: str, tokens: tuple[int, ...]) -> None:
        record = await self.store.get(session)
        assert record is not None
        assert await self.store.append_many([Commit(record, tokens)])

    async def delete(self, session: str) -> None:
        assert await self.store.delete(session)


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


async def fill(kept: Kept, names: list[str], history: int) -> None:
    """Starts sessions and fills their histories in PIECES passes over all sessions."""
    for name in names:
        await kept.start(name)
    for _ in range(PIECES):
        tokens = tuple(random.randrange(VOCABULARY) for _ in range(history // PIECES))
        for name in names:
            await kept.append(name, tokens)


async def measure(way: str, count: int, history: int) -> Result:
    """Measures one way to store `count` sessions with histories of `history` tokens, in this process."""
    kept: Objects | Stored
    if way == "objects":
        kept = Objects(history)
    elif way == "store":
        kept = Stored(history)
    else:
        models = ModelRegistry(Settings(bundles=SHIPPED), Metrics())
        await models.load()
        kept = Stored(history, models)
    names = [secrets.token_urlsafe(16) for _ in range(count)]
    # The memory of the strings in `names` is subtracted here, so that it counts as memory of the sessions. The stores
    # refer to the same strings.
    before = resident_bytes() - sum(map(sys.getsizeof, names))
    await fill(kept, names, history)
    result: Result = {"way": way, "sessions": count, "session_history_tokens": history, "before_bytes": before}
    result["filled_bytes"] = resident_bytes()
    for _ in range(CHURNS):
        changed = random.sample(range(count), count // CHURNED)
        for index in changed:
            await kept.delete(names[index])
            names[index] = secrets.token_urlsafe(16)
        await fill(kept, [names[index] for index in changed], history)
    result["churned_bytes"] = resident_bytes()
    some = random.sample(names, min(TIMED, count))
    result["append_us"] = statistics.median([await timed(kept.append(name, (7,))) for name in some])
    result["collection_ms"] = statistics.median([await timed(asyncio.to_thread(gc.collect)) for _ in range(3)]) / 1e3
    if isinstance(kept, Stored):
        result["counted_bytes"] = kept.store.sessions.used_bytes
        result["get_us"] = statistics.median([await timed(kept.store.get(name)) for name in some])
        kept.later_s = 2 * TTL_S
        calls = []
        while kept.store.sessions.used_bytes:
            calls.append(await timed(kept.store.count("m")))
        result |= {"expiring_calls": len(calls), "expiring_call_ms": max(calls) / 1e3}
    return result


async def timed(call: Awaitable[object]) -> float:
    """Awaits `call`. Returns the call's duration in microseconds."""
    started = time.perf_counter()
    await call
    return 1e6 * (time.perf_counter() - started)


def apart(way: str, count: int, history: int) -> Result:
    """Measures one way to store sessions, in a new process."""
    command = [sys.executable, "-m", "benchmarks.parked", f"--way={way}", f"--sessions={count}", f"--history={history}"]
    result: Result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(f"{way}: {result['churned_bytes'] / GIB:.3f} GiB", file=sys.stderr, flush=True)
    return result


def show(results: list[Result]) -> None:
    """Prints the table.

    Its columns are, from left to right:

    - the resident memory of the process after the histories were filled, and after the churn;
    - the resident memory after the churn as a share of 1 GiB;
    - the memory per session as measured, and as counted by the store;
    - the median times of the calls `append` and `get`;
    - the time of a full garbage collection;
    - the longest call while all sessions expire.
    """
    first = results[0]
    made = f"{first['sessions']:,} parked sessions with histories of {first['session_history_tokens']} tokens"
    table = Table(title=made)
    memory = ("GiB", "churned", "of 1 GiB", "bytes each", "counted")
    for column in ("", *memory, "append us", "get us", "gc ms", "expiring ms"):
        table.add_column(column, justify="right")
    for result in results:
        count = result["sessions"]
        each = (result["churned_bytes"] - result["before_bytes"]) / count
        table.add_row(
            result["way"],
            f"{result['filled_bytes'] / GIB:.3f}",
            f"{result['churned_bytes'] / GIB:.3f}",
            f"{result['churned_bytes'] / GIB:.1%}",
            f"{each:.0f}",
            f"{result['counted_bytes'] / count:.0f}" if "counted_bytes" in result else "",
            f"{result['append_us']:.1f}",
            f"{result['get_us']:.1f}" if "get_us" in result else "",
            f"{result['collection_ms']:.0f}",
            f"{result['expiring_call_ms']:.1f}" if "expiring_call_ms" in result else "",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument(
        "--history",
        type=int,
        default=64,
        metavar="TOKENS",
        help="number of tokens in the history of each session (default 64)",
    )
    parser.add_argument("--way", choices=WAYS, help="measure one way to store sessions and print its figures as JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.way is not None:
        print(json.dumps(asyncio.run(measure(arguments.way, arguments.sessions, arguments.history))))
        return
    results: list[Result] = rounded([apart(way, arguments.sessions, arguments.history) for way in WAYS])
    show(results)
    if arguments.json is not None:
        write_json(arguments.json, {**provenance("benchmarks.parked", bundles=["gated-stable"]), "results": results})


if __name__ == "__main__":
    main()
