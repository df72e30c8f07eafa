"""Steps, forks, continues, rewinds and deletes sessions at random, in an engine with room for few states. Compares
every distribution with a run of the same tokens that was never interrupted.

    python -m tests.service.engine.fork_fuzz --operations 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.service.engine_harness import EngineHarness, name_vocabulary
from wane.service.engine.agreement import FLOAT32_ROUNDING
from wane.service.engine.logits import log_softmax
from wane.service.errors import InvalidRequest, SessionExists
from wane.service.types.answer import Answer
from wane.service.types.request import ContinuationsRequest, Filter, StepRequest

EOS = 0
SLOTS = 14
SESSIONS = 8
EPISODE = 2_000  # the number of operations on one engine
NAMES = tuple(f"t{index}" for index in range(8))
ALL = Filter(include_end=True, include_unknown=True)
OPERATIONS = ("step", "step", "step", "fork", "fork", "continue", "rewind", "evict", "delete", "together")


class Episode:
    """One random history of the sessions of one engine. `tokens` has all tokens of each session, and `earliest` the
    earliest position to which each can be rewound."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = Random(f"{seed}.{number}")
        vocabulary = name_vocabulary(names=NAMES)
        slot_bytes = EngineHarness(vocabulary=vocabulary).engine.state_cache.slot_bytes
        self.harness = EngineHarness(vocabulary=vocabulary, certified=True, state_budget_bytes=SLOTS * slot_bytes)
        self.engine = self.harness.engine
        self.tokens: dict[str, list[int]] = {}
        self.counted: Counter[str] = Counter()
        self.made = 0

    def some(self, most: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(2, 2 + len(NAMES)), k=self.random.randint(1, most)))

    def name(self) -> str:
        self.made += 1
        return f"s{self.made}"

    def check(self, tokens: list[int], answer: Answer) -> None:
        """Compares an answer with the never-interrupted run over `tokens`."""
        truth = np.exp(log_softmax(self.harness.runner.logits([EOS, *tokens])))
        found = np.zeros(len(truth))
        for one in answer.predictions:
            found[one.token_id] = one.probability
        assert answer.position == len(tokens)
        assert answer.error_bound is not None
        assert np.abs(found - truth).sum() / 2 <= answer.error_bound + FLOAT32_ROUNDING
        self.counted["exact" if not answer.error_bound else "bounded"] += 1

    async def step(self, session: str, more: tuple[int, ...]) -> None:
        self.tokens[session] += more
        tokens = [*self.tokens[session]]
        self.check(tokens, await self.engine.submit(StepRequest(session, more, top_k=len(NAMES) + 2, filter=ALL)))

    async def fork(self, session: str) -> None:
        record, name = await self.engine.sessions.read(session), self.name()
        position = self.random.choice([None, self.random.randint(-1, record.position + 1)])
        try:
            view = await self.engine.fork(session, name, position)
        except InvalidRequest:
            assert position is not None
            assert not record.earliest <= position <= record.position
            self.counted["refused"] += 1
            return
        self.tokens[name] = self.tokens[session][: view.position]
        assert view.position == (record.position if position is None else position)
        again = await self.engine.fork(session, name, position)
        assert (again.session, again.position) == (name, view.position)
        if self.random.random() < 0.5:
            await self.step(name, self.some(2))
            try:
                await self.engine.fork(session, name, position)
                raise AssertionError("a session that has made a step was forked again")
            except SessionExists:
                self.counted["taken"] += 1

    async def continuations(self, session: str) -> None:
        each = tuple(self.some(6) for _ in range(self.random.randint(1, 5)))
        request = ContinuationsRequest(session, each, ((),) * len(each), top_k=len(NAMES) + 2, filter=ALL)
        for one, more in zip((await self.engine.continuations(request)).results, each, strict=True):
            self.check([*self.tokens[session], *more], one)
            for index, (token, logprob, bound) in enumerate(zip(more, one.logprobs, one.error_bounds, strict=True)):
                known = [EOS, *self.tokens[session], *more[:index]]
                truth = np.exp(log_softmax(self.harness.runner.logits(known))[token])
                assert bound is not None
                assert abs(np.exp(logprob) - truth) <= bound + FLOAT32_ROUNDING

    async def operate(self) -> None:
        """Makes one random operation."""
        while len(self.tokens) < 2:
            self.tokens[name := self.name()] = []
            await self.engine.create_session(name)
        if len(self.tokens) > SESSIONS:
            await self.delete(self.random.choice([*self.tokens]))
        operation, session = self.random.choice(OPERATIONS), self.random.choice([*self.tokens])
        self.counted[operation] += 1
        if operation == "step":
            await self.step(session, self.some(4))
        elif operation == "fork":
            await self.fork(session)
        elif operation == "continue":
            await self.continuations(session)
        elif operation == "rewind":
            record = await self.engine.sessions.read(session)
            position = self.random.randint(record.earliest, record.position)
            await self.engine.rewind(session, position)
            del self.tokens[session][position:]
        elif operation == "evict":
            self.engine.state_cache.drop(session)
        elif operation == "delete":
            await self.delete(session)
        else:  # steps, a fork and continuations of several sessions in the same turn of the event loop
            others = [one for one in self.tokens if one != session][:3]
            await asyncio.gather(*(self.step(one, self.some(2)) for one in others))
            await asyncio.gather(self.fork(session), self.continuations(session))

    async def delete(self, session: str) -> None:
        await self.engine.delete_session(session)
        del self.tokens[session]

    async def run(self, operations: int, progress: Callable[[], object]) -> None:
        for _ in range(operations):
            await self.operate()
            self.engine.state_cache.check_integrity(idle=True)
            progress()
        self.counted["evictions"] += round(self.harness.sample("wane_states_evicted_total"))
        await self.engine.drain()
        await self.engine.close()


async def run(operations: int, seed: int, progress: Callable[[], object] = lambda: None) -> Counter[str]:
    """Runs episodes. Returns how often each operation and each kind of answer occurred. Raises AssertionError at the
    first difference."""
    counted: Counter[str] = Counter()
    for number, start in enumerate(range(0, operations, EPISODE)):
        episode = Episode(seed, number)
        try:
            await episode.run(min(EPISODE, operations - start), progress)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, episode {number}: {error}") from error
        counted += episode.counted
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("operations", total=given.operations)
        counted = asyncio.run(run(given.operations, given.seed, lambda: progress.advance(task)))
    sys.stdout.write(f"{given.operations} operations, no difference: {dict(counted)}\n")


if __name__ == "__main__":
    main()
