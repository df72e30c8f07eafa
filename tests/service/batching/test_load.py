"""Tests of sessions under load on a shipped model. They check that every answer is correct and that every token is
appended once.

Some tests have more sessions than the engine has room for states, so the engine constantly evicts and rebuilds states.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest

from tests.service.shipped import PATHS, opened
from wane.models.manifest import Role
from wane.service.batching.cost_model import warm_up
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import MarginProof
from wane.service.errors import DeadlineExceeded, Overloaded, PositionConflict, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.runners.runner import Array, Feeds, Runner
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.state.pool import RESERVED
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest, StepRequest

MODEL = next((path for path in PATHS if path.name == "gated-stable"), PATHS[0])
SESSIONS = 60
STATES = 36  # the number of slots; each step of a batch needs two, for the states before and after the step
LOGPROB = 1e-4  # allows for float32 rounding between different graphs and batches


class Counted:
    """A runner that counts its runs by role and number of rows."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.device, self.top = runner.device, runner.top
        self.outputs = runner.outputs
        self.memory = runner.memory
        self.rows: Counter[tuple[Role, int]] = Counter()

    def run(self, role: Role, feeds: Feeds) -> Mapping[str, Array]:
        self.rows[role, len(next(iter(feeds.values())))] += 1
        return self._runner.run(role, feeds)

    def close(self) -> None:
        self._runner.close()


class Load:
    """An engine with room for few states, the engine's runner, and the tokens that the test has appended to every
    session."""

    def __init__(self, max_queue: int = 1024, session_history_tokens: int | None = None) -> None:
        bundle, runner = opened(MODEL)
        self.runner = Counted(runner)
        manifest = bundle.manifest
        floats = manifest.architecture.hidden + sum(self._size(tensor.shape) for tensor in manifest.state)
        settings = Settings(max_batch_size=16, max_queue=max_queue, state_budget_bytes=4 * floats * (RESERVED + STATES))
        keep = session_history_tokens or manifest.max_window
        self.store = MemoryStore(keep, settings.session_ttl_s, settings.session_budget_bytes)
        margin = MarginProof(bundle.weights())
        self.metrics = Metrics()
        self.engine = Engine(manifest, bundle.vocabulary, margin, self.runner, self.store, settings, self.metrics)
        # This call replaces `Engine.warm_up`, which would also measure the costs of runs. The tests here do not need
        # the costs, because their sessions are in recurrent mode.
        warm_up(self.runner, self.engine.state_cache, bundle.manifest, max_batch_size=1)
        self.runner.rows.clear()
        self.appended: dict[str, list[int]] = {}

    @staticmethod
    def _size(shape: Sequence[int]) -> int:
        size = 1
        for extent in shape:
            size *= extent
        return size

    async def start(self, count: int = SESSIONS) -> list[str]:
        for _ in range(count):
            self.appended[(await self.engine.create_session(mode=Mode.RECURRENT)).session] = []
        return list(self.appended)

    def token(self) -> int:
        return random.randrange(2, self.engine.vocabulary.size)

    async def step(self, session: str) -> Answer:
        """Appends a token at the session's position. Records the token after the answer."""
        token = self.token()
        request = StepRequest(session, (token,), expected_position=len(self.appended[session]))
        answer = await self.engine.submit(request)
        self.appended[session].append(token)
        assert answer.position == len(self.appended[session])
        return answer

    async def check(self) -> None:
        """Asserts for every session that its position is the number of its appended tokens, and that its prediction
        equals the model's prediction after these tokens."""
        for session, tokens in self.appended.items():
            answer = await self.engine.submit(PredictRequest(session=session, top_k=20))
            assert answer.position == len(tokens)
            assert answer.error_bound == 0.0
            if not tokens:
                continue
            whole = await self.engine.submit(PredictRequest(tuple(tokens), mode=Mode.RECURRENT, top_k=20))
            assert logprobs(answer) == pytest.approx(logprobs(whole), abs=LOGPROB)
        self.engine.state_cache.check_integrity(idle=True)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model": self.engine.name, **labels}) or 0.0


def logprobs(answer: Answer) -> dict[int, float]:
    return {one.token_id: one.logprob for one in answer.predictions}


@pytest.fixture
async def make_load() -> AsyncIterator[Callable[..., Load]]:
    loads: list[Load] = []

    def make(**options: int) -> Load:
        random.seed(3)
        loads.append(Load(**options))
        return loads[-1]

    yield make
    for load in loads:
        await load.engine.drain()
        load.engine.state_cache.check_integrity(idle=True)
        await load.engine.close()


async def test_sessions_answer_correctly_while_their_states_are_evicted(
    make_load: Callable[..., Load],
) -> None:
    load = make_load()
    sessions = await load.start()
    states: Counter[StateSource] = Counter()

    async def client(own: Sequence[str]) -> None:
        for _ in range(30):
            states[(await load.step(random.choice(own))).state] += 1

    await asyncio.gather(*(client(sessions[first::8]) for first in range(8)))
    assert states.total() == sum(map(len, load.appended.values())) == 8 * 30
    assert states[StateSource.REBUILT] == load.sample("wane_state_rebuilds_total") > 0
    assert states[StateSource.RESIDENT] > 0
    assert load.sample("wane_states_evicted_total") > 0
    await load.check()


async def test_sessions_that_step_together_after_an_eviction_are_rebuilt_in_one_batch(
    make_load: Callable[..., Load],
) -> None:
    load = make_load()
    sessions = await load.start(16)
    await asyncio.gather(*(load.engine.submit(StepRequest(session, (5, 6, 7))) for session in sessions))
    for session in sessions:
        load.appended[session] = [5, 6, 7]
        load.engine.state_cache.drop(session)
    load.runner.rows.clear()
    answers = await asyncio.gather(*map(load.step, sessions))
    assert load.runner.rows == {("window", 16): 1}
    assert {(answer.state, answer.error_bound) for answer in answers} == {(StateSource.REBUILT, 0.0)}
    load.runner.rows.clear()
    answers = await asyncio.gather(*map(load.step, sessions))
    assert load.runner.rows == {("step", 16): 1}
    assert {answer.state for answer in answers} == {StateSource.RESIDENT}
    await load.check()


async def test_the_error_bound_of_a_session_rebuilt_from_a_part_of_its_tokens_holds(
    make_load: Callable[..., Load],
) -> None:
    load = make_load(session_history_tokens=20)
    (session,) = await load.start(1)
    tokens = tuple(load.token() for _ in range(200))
    await load.engine.submit(StepRequest(session, tokens))
    load.engine.state_cache.drop(session)
    for state in (StateSource.REBUILT, StateSource.RESIDENT):
        tokens = (*tokens, load.token())
        answer = await load.engine.submit(StepRequest(session, tokens[-1:], top_k=100))
        whole = await load.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT, top_k=100))
        assert answer.state is state
        first, second = ({one.token_id: one.probability for one in found.predictions} for found in (answer, whole))
        # Half the sum of the probability differences of the tokens that are in both lists is a lower bound of the total
        # variation distance between the two predictions.
        apart = sum(abs(first[token] - second[token]) for token in first.keys() & second.keys()) / 2
        assert answer.error_bound is not None
        assert 0 < apart <= answer.error_bound


@pytest.mark.parametrize("leave", ["cancelled", "late"])
async def test_a_step_whose_client_disconnects_is_appended_at_most_once(
    make_load: Callable[..., Load], leave: str
) -> None:
    load = make_load()
    sessions = await load.start(12)
    loop = asyncio.get_running_loop()
    outcomes: Counter[str] = Counter()

    async def client(session: str) -> None:
        tokens = load.appended[session]
        for turn in range(12):
            request = StepRequest(session, (load.token(),), expected_position=len(tokens))
            leaves = turn % 2 == 0
            if leaves and leave == "late":
                with pytest.raises(DeadlineExceeded):
                    await load.engine.submit(StepRequest(session, request.tokens, deadline=loop.time()))
                outcomes["left"] += 1
            elif leaves:
                step = asyncio.ensure_future(load.engine.submit(request))
                for _ in range(random.randrange(12)):
                    await asyncio.sleep(0)
                outcomes["left"] += step.cancel()
                await asyncio.wait([step])
            # If the first attempt had no effect, the engine appends the step's tokens now; otherwise it replays the
            # first attempt's answer.
            answer = await load.engine.submit(request)
            tokens.extend(request.tokens)
            outcomes["replayed"] += bool(answer.replayed)
            assert answer.position == len(tokens)

    await asyncio.gather(*map(client, sessions))
    assert outcomes["left"] > 0
    assert outcomes["replayed"] == load.sample("wane_steps_replayed_total")
    assert sum(map(len, load.appended.values())) == 12 * 12
    await load.check()


async def test_two_clients_of_one_session_append_each_position_once(
    make_load: Callable[..., Load],
) -> None:
    load = make_load()
    (session,) = await load.start(1)
    tokens = load.appended[session]
    conflicts: Counter[str] = Counter()

    async def client(name: str, own: Sequence[int]) -> None:
        position = 0
        for token in own:
            while True:
                request = StepRequest(session, (token,), expected_position=position, idempotency_key=f"{name}{token}")
                try:
                    answer = await load.engine.submit(request)
                except PositionConflict as conflict:
                    conflicts[name] += 1
                    position = conflict.position
                    continue
                break
            assert not answer.replayed
            assert answer.position == position + 1
            tokens[position:position] = [token]
            position += 1

    await asyncio.gather(client("a", range(100, 130)), client("b", range(200, 230)))
    assert sorted(tokens) == [*range(100, 130), *range(200, 230)]
    assert conflicts["a"] + conflicts["b"] > 0
    await load.check()


async def test_requests_that_need_more_states_than_exist_are_answered_or_refused(
    make_load: Callable[..., Load],
) -> None:
    load = make_load()
    sessions = await load.start(3 * STATES)
    results = await asyncio.gather(*map(load.step, sessions), return_exceptions=True)
    assert all(isinstance(result, Answer | Overloaded) for result in results)
    assert sum(isinstance(result, Answer) for result in results) == sum(map(len, load.appended.values()))
    refused = [result for result in results if isinstance(result, WaneError)]
    assert refused, "no step was refused, although there are fewer slots than steps"
    assert "states are in use" in str(refused[0])
    await load.check()
