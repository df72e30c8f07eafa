"""Sends the same random history of steps to two engines. One engine buffers its sessions, and commits batches of steps
by arrays. The other commits them by its store.

    python -m tests.service.engine.columns_fuzz --steps 1000000
    python -m tests.service.engine.columns_fuzz --steps 100000 --cache
    python -m tests.service.engine.columns_fuzz --steps 50000 --bundle models/bundles/lstm
    python -m tests.service.engine.columns_fuzz --write tests/service/engine/columns_record.json.gz

Compares every answer, error and session record bit for bit, except the latencies. The last command writes the results
of a few episodes to a file, with which a test compares later versions of the code.

An episode is one history on two new engines. In every second episode the engines have room for all states. In the other
episodes the two engines evict states at different times. So in those episodes the fuzz does not compare the fields that
depend on an eviction (`OF_STATES`). It allows rounding differences in those episodes, and in all episodes if a bundle
is given.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
from msgspec.structs import replace
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.models.caches import random_cache
from tests.service.engine_harness import Clock, EngineHarness, InOrder, LinearCosts, name_vocabulary
from wane.models.bundle import Bundle
from wane.models.manifest import CacheModel
from wane.service.engine.engine import Engine
from wane.service.engine.pending import Pending
from wane.service.engine.steps.answers import StepAnswer
from wane.service.engine.top1_proof import MarginProof
from wane.service.errors import UnknownSession, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.runners.onnx import OnnxRunner
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import SessionRecord, Store
from wane.service.settings import Settings
from wane.service.types.answer import Answer, Prediction, SessionView
from wane.service.types.common import Mode
from wane.service.types.request import Filter, History, PredictRequest, StepRequest

# Ordinary steps use only tokens with an id below TOKENS. A run with the token POISON fails. The token HOT makes the
# session's state NaN.
TOKENS = 24
POISON, HOT, UNKNOWN = TOKENS, TOKENS + 1, 1_000_000
SESSIONS = 40
MAX_BATCH = 8
EPISODE_STEPS = 2_000
TTL_S = 512.0
CACHE_TOKENS = 12
# A revision's low BRANCH_BITS bits are the number of the session's changes. Its higher bits are random.
BRANCH_BITS = 32
SLOTS_OF_FEW = 2 + 3 * MAX_BATCH
FIELDS = [*(name for name in Answer.__struct_fields__ if name != "latency"), "logits", "token_logprobs"]
OF_STATES = ("state", "error_bound", "state_error_bound")
"""The fields of an answer that depend on whether the state was resident or rebuilt."""
OF_BITS = ("predictions", "top1_proved", "logits", "token_logprobs")
"""The fields of an answer that rounding may change. There are two causes. A run that rebuilds a state does not output
the log-sum-exp of the logits, so the engine computes the log-sum-exp in higher precision. And in a run of real graphs a
row's values depend on the number of rows in the batch."""
ROUNDING = 1e-4  # the largest allowed difference of two log-probabilities


MakeEngine = Callable[[Store, Clock, Settings], tuple[Engine, Metrics, Any]]


class PlainStore:
    """A wrapper of a `MemoryStore`, which leaves no session to a buffer."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def buffer(self, *_: object) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@dataclass(frozen=True, slots=True)
class Difference:
    """An action whose results differ between the two engines."""

    episode: int
    turn: int
    action: str
    columns: object
    general: object


def fake_engine(
    store: Store, clock: Clock, settings: Settings, cache: CacheModel | None = None
) -> tuple[Engine, Metrics, Any]:
    """Makes an engine with the fake runner. `cache` is the cache of the engine's model. Returns the engine, its metrics
    and its runner."""
    vocabulary = name_vocabulary(names=[f"t{index}" for index in range(TOKENS)])
    given = settings.model_dump(exclude_unset=True)
    harness = EngineHarness(vocabulary=vocabulary, store=store, certified=True, clock=clock, cache=cache, **given)
    harness.runner.poison, harness.runner.hot = POISON, HOT
    return harness.engine, harness.metrics, harness.runner


def cached_engine(store: Store, clock: Clock, settings: Settings) -> tuple[Engine, Metrics, Any]:
    """Like `fake_engine`, but the model has a cache of CACHE_TOKENS tokens."""
    return fake_engine(store, clock, settings, random_cache(Random(4), CACHE_TOKENS))


def bundle_engine(path: Path) -> MakeEngine:
    """Returns a function that makes engines of a bundle's model. ONNX Runtime runs the bundle's graphs."""
    bundle = Bundle.read(path)
    runner = OnnxRunner(bundle, "cpu", threads=1)
    margin = MarginProof(bundle.weights())

    def make(store: Store, clock: Clock, settings: Settings) -> tuple[Engine, Metrics, Any]:
        metrics = Metrics()
        made = bundle.manifest, bundle.vocabulary, margin, runner, store, settings, metrics, clock
        engine = Engine(*made, LinearCosts(), InOrder())
        engine.warm_up()
        return engine, metrics, None

    return make


class Side:
    """One of the two engines, the engine's store, and the engine's clock."""

    def __init__(self, make: MakeEngine, settings: Settings, *, in_columns: bool) -> None:
        self.clock = Clock()
        store = MemoryStore(settings.session_history_tokens, TTL_S, settings.session_budget_bytes, self.clock)
        self.store = store if in_columns else cast(Store, PlainStore(store))
        self.engine, self.metrics, self.runner = make(self.store, self.clock, settings)

    def count(self, name: str) -> int:
        """Returns the value of a counter."""
        labels = {"model": self.engine.name}
        return int(self.metrics.registry.get_sample_value(name, labels) or 0)

    async def settled(self) -> None:
        """Waits until no request is in flight."""
        await self.engine.admission.idle()

    async def record(self, session: str) -> object:
        """Returns the session's record from the store. Removes the random bits of the revision, because they differ
        between the two stores."""
        found = await self.store.get(session)
        return found and found._replace(revision=found.revision % (1 << BRANCH_BITS))

    async def close(self) -> None:
        await self.engine.drain()
        await self.engine.close()
        self.engine.state_cache.check_integrity(idle=True)


@dataclass(slots=True)
class Turn:
    """The requests that the fuzz submits in one event loop iteration. `leave` has the indexes of the requests that the
    fuzz cancels. `late` has the indexes of the requests whose deadline has passed. `reads` has the sessions that the
    fuzz reads. If `held` is true, the fuzz cancels some of the requests while they run."""

    requests: list[StepRequest | PredictRequest]
    leave: set[int]
    late: set[int]
    reads: list[str]
    ends: list[str]  # sessions that are deleted after the steps
    held: bool = False


class Episode:
    """One random history of steps, which is sent to two new engines."""

    def __init__(self, make: MakeEngine, seed: int, number: int) -> None:
        self.random = Random(f"{seed}.{number}")
        self.number = number
        self.is_exact = number % 2 == 0
        self.is_threaded = number % 4 >= 2
        self.counted: Counter[str] = Counter()
        self.differences: list[Difference] = []
        self.results: list[tuple[str, object]] = []
        """What each action had as its result, if `keeps_results`."""
        self.keeps_results = False
        self.turns = 0
        self.positions: dict[str, int] = {}
        self.last: dict[str, StepRequest] = {}
        self._make = make

    async def run(self, steps: int, progress: Callable[[int], object]) -> None:
        """Sends random steps to both engines until `steps` steps are sent, or until the results of the two engines
        differ."""
        self.sides = [self._side(in_columns=True), self._side(in_columns=False)]
        try:
            while self.counted["steps"] < steps and not self.differences:
                before = self.counted["steps"]
                await self._next()
                self.turns += 1
                progress(self.counted["steps"] - before)
            await self._compare_records()
        finally:
            for side in self.sides:
                if side.runner is not None:
                    side.runner.gate.set()
                await side.close()
        columns = self.sides[0]
        self.counted["evictions"] += columns.count("wane_states_evicted_total")
        self.counted["replays"] += columns.count("wane_steps_replayed_total")

    def _side(self, *, in_columns: bool) -> Side:
        settings = Settings(
            session_history_tokens=32 if self.is_exact else 2 * EPISODE_STEPS,
            max_batch_size=MAX_BATCH,
            session_ttl_s=TTL_S,
            inline_batch_max_us=0 if self.is_threaded else 1_000_000,
        )
        if not self.is_exact:
            probe = Side(self._make, settings, in_columns=False)
            bytes_each = probe.engine.state_cache.slot_bytes
            settings = settings.model_copy(update={"state_budget_bytes": SLOTS_OF_FEW * bytes_each})
        return Side(self._make, settings, in_columns=in_columns)

    # Actions.

    async def _next(self) -> None:
        chance = self.random.random()
        session = self._session()
        if chance < 0.01 or len(self.positions) < SESSIONS * self.random.random():
            await self._create(f"s{self.random.randrange(SESSIONS)}")
        elif chance < 0.02:
            self.positions.pop(session, None)
            await self._both(f"delete {session}", lambda side: side.engine.delete_session(session))
        elif chance < 0.03:
            position = max(0, self.positions.get(session, 0) - self.random.randrange(6))
            await self._both(f"rewind {session} to {position}", lambda side: side.engine.rewind(session, position))
        elif chance < 0.05:
            await self._both(f"read {session}", lambda side: side.engine.get_session(session))
        elif chance < 0.07:
            seconds = self.random.choice([1.0, 16.0, 64.0, 64.0, 256.0])
            for side in self.sides:
                side.clock.now_s += seconds
        elif chance < 0.075:
            await asyncio.gather(*[side.engine.report() for side in self.sides])
        elif chance < 0.08:
            await self._compare_records()
        else:
            await self._play(self._turn())

    def _session(self) -> str:
        """Returns a random session. The session nearly always exists."""
        if self.positions and self.random.random() < 0.99:
            return self.random.choice([*self.positions])
        return f"s{self.random.randrange(SESSIONS)}"

    async def _create(self, session: str) -> None:
        mode = self.random.choice([None, None, None, Mode.RECURRENT, Mode.WINDOW])
        history = History((5, 6), self.random.choice([2, 9])) if self.random.random() < 0.2 and self.is_exact else None
        await self._both(f"create {session}", lambda side: side.engine.create_session(session, mode, history=history))
        self.positions.setdefault(session, 0)

    def _turn(self) -> Turn:
        random = self.random
        held = self.is_threaded and self.sides[0].runner is not None and random.random() < 0.5
        turn = Turn([], set(), set(), [], [], held)
        names = [self._session() for _ in range(random.randint(1, MAX_BATCH))]
        for index, session in enumerate(names):
            if held and any(request.session == session for request in turn.requests):
                continue
            step = self._step(session, 2 + index if held else random.randrange(2, TOKENS))
            turn.requests.append(step)
            # The engine without columns recognises a repeated step before it queues the step. So on this engine even a
            # cancelled repeat resets the session's idle time. On the other engine it does not. The fuzz therefore does
            # not cancel a step that may be a repeat.
            may_leave = step.expected_position is None and step.idempotency_key is None
            if random.random() < 0.05 and not held and may_leave:
                turn.leave.add(len(turn.requests) - 1)
            elif random.random() < 0.03 and not held and may_leave:
                turn.late.add(len(turn.requests) - 1)
        if random.random() < 0.05:
            turn.requests.append(PredictRequest(session=random.choice(names)))
        if random.random() < 0.05:
            turn.reads.append(random.choice(names))
        if random.random() < 0.02:
            turn.ends.append(random.choice(names))
        return turn

    def _step(self, session: str, token: int) -> StepRequest:
        random, chance = self.random, self.random.random()
        position = self.positions.get(session, 0)
        step = StepRequest(session, (token,), top_k=random.choice([1, 5, 5, 9]))
        if random.random() < 0.25:
            step = replace(step, **self._asks())
        if chance < 0.60:
            return step
        if chance < 0.90:
            return replace(step, expected_position=position)
        if chance < 0.92:
            return replace(step, expected_position=max(0, position + random.choice([-1, 1])))
        if chance < 0.94:
            return self.last.get(session, step)
        if chance < 0.95:
            return replace(step, tokens=tuple(random.randrange(2, TOKENS) for _ in range(random.randint(2, 4))))
        if chance < 0.97:
            return replace(step, idempotency_key=random.choice(["one", "two"]))
        if chance < 0.98:
            return replace(step, mode=random.choice([Mode.RECURRENT, Mode.WINDOW, Mode.AUTO]))
        if self.sides[0].runner is None:
            return step
        return replace(step, tokens=(random.choice([POISON, HOT, UNKNOWN]),))

    def _asks(self) -> dict[str, Any]:
        """Returns what a step asks beside its token."""
        random = self.random
        some = tuple(random.sample(range(2, TOKENS), random.randint(1, 8)))
        filters = [
            Filter(exclude_seen=True),
            Filter(exclude_seen=True, include_unknown=True),
            Filter(exclude=some),
            Filter(exclude=some, exclude_seen=True, include_end=True),
            Filter(candidates=some, unknown=("nothing",)),
            Filter(candidates=some, exclude_seen=True),
        ]
        if random.random() < 0.6:
            return {"filter": random.choice(filters)}
        return random.choice(
            [
                {"prove": True},
                {"cache": False},
                {"logits": True},
                {"token_logprobs": True},
                {"unknown_names": ("none",)},
                {"mode": Mode.RECURRENT, "prove": True, "logits": True},
            ]
        )

    # Both engines.

    async def _both(self, action: str, call: Callable[[Side], Awaitable[object]]) -> None:
        results = []
        for side in self.sides:
            try:
                results.append(await call(side))
            except WaneError as error:
                results.append(error)
        self._compare(action, *results)

    async def _play(self, turn: Turn) -> None:
        running = [await self._submit(side, turn) for side in self.sides]
        if turn.held:  # cancels some of the steps that are now running on both engines
            both = [index for index in range(len(turn.requests)) if all(index in one[2] for one in running)]
            leaving = {index for index in both if self.random.random() < 0.3}
            for side, (pending, _, _) in zip(self.sides, running, strict=True):
                for index in leaving:
                    pending[index].cancel()
                side.runner.gate.set()
            turn.leave |= leaving
        outcomes = []
        for side, (pending, tasks, _) in zip(self.sides, running, strict=True):
            found = [None if index in turn.leave else await outcome(one) for index, one in enumerate(pending)]
            found += [await outcome(task) for task in tasks]
            await side.settled()
            if side.runner is not None:
                side.runner.calls.clear()
                side.runner.busy.clear()
            outcomes.append(found)
        self._count(turn, outcomes[0])
        for index, (one, other) in enumerate(zip(*outcomes, strict=True)):
            request: object = turn.requests[index] if index < len(turn.requests) else "delete"
            if index in turn.late:
                one, other = isinstance(one, Exception), isinstance(other, Exception)
            self._compare(repr(request), one, other)
            if isinstance(request, StepRequest) and isinstance(one, UnknownSession):
                self.positions.pop(request.session, None)
            if isinstance(request, StepRequest) and isinstance(one, Answer) and one.position is not None:
                self.positions[request.session] = one.position
                self.last[request.session] = replace(request, expected_position=one.position - len(request.tokens))

    async def _submit(self, side: Side, turn: Turn) -> tuple[list[Pending[Answer]], list[asyncio.Task[None]], set[int]]:
        """Submits the requests of `turn` in one event loop iteration.

        Returns the pending results, the tasks of the deletions and, if `turn.held` is true, the indexes of the running
        steps.
        """
        if turn.held:
            side.runner.gate.clear()
        passed = asyncio.get_running_loop().time() - 1
        pending = []
        for index, request in enumerate(turn.requests):
            pending.append(side.engine.submit(replace(request, deadline=passed if index in turn.late else None)))
        for index in turn.leave:
            pending[index].cancel()
        for session in turn.reads:
            asyncio.ensure_future(side.engine.get_session(session)).add_done_callback(asyncio.Future.exception)
        tasks = [asyncio.ensure_future(side.engine.delete_session(session)) for session in turn.ends]
        runs: set[int] = set()
        while turn.held and not all(one.done() for one in pending):
            await asyncio.sleep(0)
            if side.runner.calls:
                role, rows = side.runner.calls[-1]
                runs = {index for index, one in enumerate(turn.requests) if [*one.tokens] in rows and role == "step"}
                break
        return pending, tasks, runs

    def _count(self, turn: Turn, outcomes: Sequence[object]) -> None:
        counted = self.counted
        counted["steps"] += len(turn.requests)
        counted["in columns"] += sum(type(one) is StepAnswer for one in outcomes)
        counted["errors"] += sum(isinstance(one, Exception) for one in outcomes)
        counted["conflicts"] += sum(getattr(one, "code", "") == "position_conflict" for one in outcomes)
        counted["cancelled before a batch"] += 0 if turn.held else len(turn.leave)
        counted["cancelled in a batch"] += len(turn.leave) if turn.held else 0
        counted["late"] += len(turn.late)

    async def _compare_records(self) -> None:
        for index in range(SESSIONS):
            await self._both(f"record s{index}", partial(Side.record, session=f"s{index}"))

    def _compare(self, action: str, columns: object, general: object) -> None:
        one, other = self._shown(columns), self._shown(general)
        if self.keeps_results:
            self.results.append((action, one))
        is_alike = one == other
        if isinstance(columns, Answer) and isinstance(general, Answer):
            is_alike &= alike(columns.predictions, general.predictions)
        if not is_alike:
            self.differences.append(Difference(self.number, self.turns, action, one, other))

    def _shown(self, result: object) -> object:
        """Returns the fields of a result that the fuzz compares."""
        hidden: tuple[str, ...] = () if self.is_exact else OF_STATES
        if not (self.is_exact and self.sides[0].runner):
            hidden += OF_BITS
        if isinstance(result, Answer):
            shown = {name: getattr(result, name) for name in FIELDS if name not in hidden}
            if shown.get("logits") is not None:
                shown["logits"] = shown["logits"].tolist()
            return shown
        if isinstance(result, SessionView):
            return {name: getattr(result, name) for name in result.__struct_fields__ if name not in hidden}
        if isinstance(result, Exception):
            return type(result).__name__, str(result), getattr(result, "position", None)
        assert result is None or isinstance(result, SessionRecord | bool)
        return result


def alike(some: Sequence[Prediction], others: Sequence[Prediction]) -> bool:
    """Returns whether two lists of predictions are equal up to rounding. Compares the log-probabilities at each rank,
    and the two log-probabilities of each token that is in both lists."""
    known = {one.token_id: one.logprob for one in some}
    pairs = [(one.logprob, other.logprob) for one, other in zip(some, others, strict=True)]
    pairs += [(known[one.token_id], one.logprob) for one in others if one.token_id in known]
    return all(abs(one - other) < ROUNDING for one, other in pairs)


async def outcome(waited: Awaitable[Any]) -> object:
    """Waits for the request. Returns the result, or the error that the request raised."""
    try:
        return await waited
    except Exception as error:
        return error


async def run(
    steps: int, seed: int, make: MakeEngine = fake_engine, progress: Callable[[int], object] = lambda _: None
) -> tuple[Counter[str], list[Difference]]:
    """Runs episodes with `steps` steps in total. Stops after the first episode with a difference. Returns the number of
    steps, episodes, conflicts and other events by name, and the last episode's differences."""
    counted: Counter[str] = Counter()
    number = 0
    while counted["steps"] < steps:
        episode = Episode(make, seed, number)
        await episode.run(min(EPISODE_STEPS, steps - counted["steps"]), progress)
        counted += episode.counted
        counted["episodes"] += 1
        if episode.differences:
            return counted, episode.differences
        number += 1
    return counted, []


RECORDED_STEPS = 1_000
RECORDED = [(make, number) for make in ("fake", "cached") for number in (0, 1)]
"""The recorded episodes, in which all runs are on the event loop, so that their order is always the same."""


async def recorded() -> list[list[tuple[str, object]]]:
    """Runs the recorded episodes. Returns the results of each, as JSON values."""
    episodes = []
    for make, number in RECORDED:
        episode = Episode({"fake": fake_engine, "cached": cached_engine}[make], 1, number)
        episode.keeps_results = True
        await episode.run(RECORDED_STEPS, lambda _: None)
        assert not episode.differences
        episodes.append(as_json(episode.results))
    return episodes


def as_json(results: object) -> Any:
    """Returns results as JSON values, with numbers of 8 digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.8g}")
        if isinstance(value, list):
            return [*map(rounded, value)]
        if isinstance(value, dict):
            # The record is older than `cached_tokens`, which is 0 in the answer to a step.
            return {name: rounded(one) for name, one in value.items() if (name, one) != ("cached_tokens", 0)}
        return value

    return rounded(json.loads(msgspec.json.encode(results, enc_hook=str)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the episodes and prints the result. Returns 1 if there is a difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.service.engine.columns_fuzz", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bundle", type=Path, help="the bundle to run in place of the fake model")
    parser.add_argument("--cache", action="store_true", help="give the fake model a cache")
    parser.add_argument("--write", type=Path, help="write the record of a few episodes to this file, and end")
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if given.write is not None:
        given.write.write_bytes(gzip.compress(json.dumps(asyncio.run(recorded())).encode(), mtime=0))
        return 0
    make = fake_engine if given.bundle is None else bundle_engine(given.bundle)
    if given.cache:
        make = cached_engine
    columns = "{task.description}", MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*[TextColumn(one) if isinstance(one, str) else one for one in columns]) as bar:
        task = bar.add_task("steps", total=given.steps)
        counted, differences = asyncio.run(run(given.steps, given.seed, make, lambda count: bar.advance(task, count)))
    lines = [f"{count:9,} {name}" for name, count in counted.items()] + [f"{len(differences):9,} differences"]
    for one in differences:
        lines += ["", f"seed {given.seed}, episode {one.episode}, turn {one.turn}: {one.action}"]
        lines += [f"  columns: {one.columns}", f"  general: {one.general}"]
    print("\n".join(lines))  # noqa: T201
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
