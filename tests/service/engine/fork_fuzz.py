"""Steps, forks, continues, rewinds and deletes sessions at random, in an engine with room for few states. Between them,
two owners predict, generate and score prompts that begin like earlier ones. Compares every distribution with a run of
the same tokens that was never interrupted.

    python -m tests.service.engine.fork_fuzz --operations 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from random import Random
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.service.engine_harness import HIDDEN, EngineHarness, name_vocabulary
from wane.service.engine.agreement import FLOAT32_ROUNDING
from wane.service.engine.logits import log_softmax
from wane.service.errors import InvalidRequest, SessionExists
from wane.service.state import pool
from wane.service.state.prefixes import BLOCK
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import (
    ContinuationsRequest,
    Filter,
    GenerateRequest,
    PredictRequest,
    ScoreRequest,
    StepRequest,
)
from wane.service.types.text import Finish, GeneratedToken

EOS = 0
SLOTS = 14
SESSIONS = 8
EPISODE = 2_000  # the number of operations on one engine
NAMES = tuple(f"t{index}" for index in range(8))
ALL = Filter(include_end=True, include_unknown=True)
SESSION_OPERATIONS = ("step", "step", "step", "fork", "fork", "continue", "rewind", "evict", "delete", "together")
PROMPT_OPERATIONS = ("predict", "predict", "generate", "score")
OPERATIONS = (*SESSION_OPERATIONS, *PROMPT_OPERATIONS)
OWNERS = ("ann", "bob")
LOGPROB_ROUNDING = 1e-4
LONGEST = 4 * BLOCK  # the longest prompt
PROMPTS = 4  # the number of earlier prompts of an owner that a prompt may begin like


class Episode:
    """One random history of the sessions of one engine. `tokens` has all tokens of each session, and `prompts` the
    prompts of each owner."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = Random(f"{seed}.{number}")
        vocabulary = name_vocabulary(names=NAMES)
        slot_bytes = EngineHarness(vocabulary=vocabulary).engine.state_cache.slot_bytes
        with patch.object(pool, "ENTRY_BYTES", slot_bytes):  # half of the slots may hold states of prompts
            self.harness = EngineHarness(vocabulary=vocabulary, certified=True, state_budget_bytes=SLOTS * slot_bytes)
        self.engine = self.harness.engine
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, list[tuple[int, ...]]] = {owner: [] for owner in OWNERS}
        self.cells: dict[tuple[int, ...], NDArray[np.float32]] = {(): np.zeros(HIDDEN, np.float32)}
        self.counted: Counter[str] = Counter()
        self.made = 0

    def some(self, most: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(2, 2 + len(NAMES)), k=self.random.randint(1, most)))

    def name(self) -> str:
        self.made += 1
        return f"s{self.made}"

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Returns the log-probabilities after a never-interrupted run of the fake runner's model over the start token
        and `tokens`: (V). Keeps the cell after each token, so that a token is computed once after each beginning."""
        runner, read = self.harness.runner, (EOS, *tokens)
        known = len(read)
        while read[:known] not in self.cells:
            known -= 1
        cell = self.cells[read[:known]]
        for end in range(known, len(read)):
            cell = runner.decay * cell + runner.embedding[read[end]]
            self.cells[read[: end + 1]] = cell
        return log_softmax(runner.head @ np.tanh(cell))

    def check(self, tokens: list[int], answer: Answer) -> None:
        """Compares an answer with the never-interrupted run over `tokens`."""
        truth = np.exp(self.logprobs(tokens))
        found = np.zeros(len(truth))
        for one in answer.predictions:
            found[one.token_id] = one.probability
        assert answer.position in {len(tokens), None}  # None: a prompt's
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
                truth = np.exp(self.logprobs([*self.tokens[session], *more[:index]])[token])
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
        if operation in PROMPT_OPERATIONS:
            owner = self.random.choice(OWNERS)
            prompted = {"predict": self.predict, "generate": self.generate, "score": self.score}[operation]
            for _ in range(self.random.randint(1, 3)):
                await prompted(owner, self.prompt(owner))
        elif operation == "step":
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

    def prompt(self, owner: str) -> tuple[int, ...]:
        """Returns a new prompt of an owner, or a beginning of an earlier prompt of either owner with new tokens."""
        earlier = self.prompts[self.random.choice([owner, owner, owner, *OWNERS])]
        if not earlier or self.random.random() < 0.1:
            return tuple(self.random.choices(range(2, 2 + len(NAMES)), k=self.random.randint(BLOCK // 2, 2 * BLOCK)))
        begin = self.random.choice(earlier[-PROMPTS:])
        cut = self.random.choice([len(begin), len(begin), self.random.randint(min(BLOCK, len(begin)), len(begin))])
        return (begin[:cut] + self.random.choice([(), self.some(4), self.some(20)]))[-LONGEST:]

    def remember(self, owner: str, tokens: tuple[int, ...], cached: int) -> None:
        """Checks that a prompt with `cached` tokens from a kept state begins like a prompt of the same owner."""
        self.counted["hits"] += bool(cached)
        if cached:
            begun = any(one[:cached] == tokens[:cached] for one in self.prompts[owner])
            assert begun, "a prompt continued a state that no prompt of its owner has left"
        self.prompts[owner].append(tokens)

    async def predict(self, owner: str, tokens: tuple[int, ...]) -> None:
        request = PredictRequest(tokens, mode=Mode.RECURRENT, owner=owner, top_k=len(NAMES) + 2, filter=ALL)
        answer = await self.engine.submit(request)
        self.check([*tokens], answer)
        self.remember(owner, tokens, answer.cached_tokens)

    async def generate(self, owner: str, tokens: tuple[int, ...]) -> None:
        request = GenerateRequest(tokens, max_tokens=self.random.randint(1, 3), owner=owner, seed=1)
        async with aclosing(await self.engine.generate(request)) as stream:
            items = [item async for item in stream]
        drawn = [item for item in items if isinstance(item, GeneratedToken)]
        all_tokens = (*tokens, *(one.token_id for one in drawn))
        self.check_logprobs(all_tokens, len(tokens), [one.logprob for one in drawn])
        assert isinstance(items[-1], Finish)
        self.remember(owner, tokens, items[-1].cached_tokens)
        self.remember(owner, all_tokens, 0)

    async def score(self, owner: str, tokens: tuple[int, ...]) -> None:
        method, top_k = self.random.choice([*ScoreMethod]), self.random.choice([None, 1])
        scored = await self.engine.score(ScoreRequest(tokens, method=method, owner=owner, top_k=top_k))
        self.check_logprobs(tokens, 0, scored.logprobs)
        self.counted["hits of scores"] += bool(scored.cached_tokens)
        self.remember(owner, tokens[:-1], scored.cached_tokens)

    def check_logprobs(self, tokens: tuple[int, ...], first: int, found: Sequence[float | None]) -> None:
        """Compares the log-probabilities of the tokens from index `first` on with the never-interrupted run."""
        assert len(found) == len(tokens) - first
        for index, value in enumerate(found, first):
            assert value is not None
            assert abs(value - self.logprobs(tokens[:index])[tokens[index]]) <= LOGPROB_ROUNDING

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
