"""Tests of a rolling update. Two replicas with different versions of a model share one store, and sessions move between
the replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.service.shipped import FOLDER, opened
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest, StepRequest

VERSIONS = ("lstm", "rnn-stable")
MODEL = "small"
FLOAT32 = 1e-4
TAIL = 32


class Replicas:
    """A replica with version 1 and a replica with version 2. The versions are different models with the same
    tokenizer."""

    def __init__(self) -> None:
        settings = Settings(max_batch_size=8)
        self.store = MemoryStore(TAIL, settings.session_ttl_s, settings.session_budget_bytes)
        self.engines: list[Engine] = []
        self.metrics: list[Metrics] = []
        for index, name in enumerate(VERSIONS):
            bundle, runner = opened(FOLDER / name)
            changes = {"name": MODEL, "version": str(index + 1)}
            manifest = bundle.manifest.model_copy(update=changes)
            self.metrics.append(Metrics())
            engine = Engine(
                manifest,
                bundle.vocabulary,
                MarginProof(bundle.weights()),
                runner,
                self.store,
                settings,
                self.metrics[-1],
            )
            engine.warm_up()
            self.engines.append(engine)

    def sample(self, replica: int, name: str) -> float:
        return self.metrics[replica].registry.get_sample_value(name, {"model": MODEL}) or 0.0


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    replicas = Replicas()
    yield replicas
    for engine in replicas.engines:
        await engine.drain()
        engine.state_cache.check_integrity(idle=True)
        await engine.close()


def logprobs(answer: Answer) -> dict[int, float]:
    return {one.token_id: one.logprob for one in answer.predictions}


async def whole(engine: Engine, tokens: list[int]) -> dict[int, float]:
    return logprobs(await engine.submit(PredictRequest(tuple(tokens), mode=Mode.RECURRENT)))


async def test_each_version_rebuilds_a_moved_session_once(replicas: Replicas) -> None:
    session = (await replicas.engines[0].create_session(mode=Mode.RECURRENT)).session
    tokens: list[int] = []
    states: list[StateSource] = []
    for position in range(24):
        tokens.append(2 + position)
        engine = replicas.engines[position % 2]
        answer = await engine.submit(StepRequest(session, (tokens[-1],), expected_position=position))
        states.append(answer.state)
        assert (answer.position, answer.error_bound) == (position + 1, 0.0)
        assert logprobs(answer) == pytest.approx(await whole(engine, tokens), abs=FLOAT32)
    assert Counter(states) == {StateSource.RESIDENT: 23, StateSource.REBUILT: 1}
    assert states[:2] == [StateSource.RESIDENT, StateSource.REBUILT], (
        "the first step on a session without tokens must need no rebuild"
    )
    assert [replicas.sample(replica, "wane_state_replays_total") for replica in (0, 1)] == [11, 11]


async def test_sessions_on_random_replicas_are_seldom_rebuilt_and_always_correct(replicas: Replicas) -> None:
    sessions = [(await replicas.engines[0].create_session(mode=Mode.RECURRENT)).session for _ in range(6)]
    states: Counter[StateSource] = Counter()

    async def client(number: int, session: str) -> None:
        tokens: list[int] = []
        for turn in range(20):
            engine = replicas.engines[(turn * turn + number) // 3 % 2]
            new = [5 + (turn + number) % 50] * (1 + turn % 3)
            answer = await engine.submit(StepRequest(session, tuple(new), expected_position=len(tokens)))
            tokens += new
            states[answer.state] += 1
            if len(tokens) <= TAIL:
                assert logprobs(answer) == pytest.approx(await whole(engine, tokens), abs=FLOAT32)

    await asyncio.gather(*(client(*one) for one in enumerate(sessions)))
    assert states.total() == 6 * 20
    assert states[StateSource.REBUILT] <= 2 * len(sessions)
