"""Tests of engines that share their sessions through a real Redis. Every replica must see the same session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.engine.test_step import expected, ranked
from tests.service.engine_harness import EngineHarness, MakeHarness, listed
from tests.service.sessions.stores.proxy import proxy
from tests.service.sessions.stores.redis_server import RedisServer, redis_server
from tests.service.sessions.stores.test_redis import until
from wane.service.errors import IdempotencyKeyReused, PositionConflict, SessionExists, Unavailable, UnknownSession
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.factory import make_store
from wane.service.sessions.stores.redis import RedisStore
from wane.service.sessions.stores.store import Store
from wane.service.settings import Settings
from wane.service.types.answer import Answer, NewSession, SessionView
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import History, PredictRequest, StepRequest

pytestmark = pytest.mark.stack

MakeReplica = Callable[..., Awaitable[EngineHarness]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server that writes to disk before it acknowledges a command."""
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def make_replica(make_harness: MakeHarness, redis: RedisServer) -> AsyncIterator[MakeReplica]:
    """A function that makes engines with their sessions in `redis`. Its argument `port` is the port of a proxy to
    Redis, or 0 to connect without a proxy."""
    stores: list[Store] = []

    async def make(port: int = 0, harness_options: dict[str, Any] | None = None, **changes: Any) -> EngineHarness:
        # A test may stop a proxy, and the store detects this only by its timeout. So the timeout is short with a proxy,
        # and long without a proxy.
        timeout_ms = 1000 if port else 60_000
        given = {"store": f"redis://127.0.0.1:{port or redis.port}/0", "store_timeout_ms": timeout_ms, **changes}
        store = make_store(Settings(**given), 16, Metrics())
        await store.open()
        stores.append(store)
        settings = {f"settings_{name}": value for name, value in given.items()}
        return make_harness(store=store, **(harness_options or {}), **settings)

    yield make
    for store in stores:
        await store.close()


async def step(harness: EngineHarness, token: int, position: int | None = None, key: str | None = None) -> Answer:
    return await harness.engine.submit(StepRequest("s", (token,), expected_position=position, idempotency_key=key))


async def test_a_session_continues_at_another_replica_without_a_rebuild(
    make_replica: MakeReplica,
) -> None:
    harnesses = [await make_replica() for _ in range(3)]
    view = await harnesses[0].engine.create_session("s")
    assert view.durable is True
    input_ids: list[int] = []
    for index in range(30):
        input_ids.append(5 + index)
        answer = await step(harnesses[index % 3], input_ids[-1], index)
        assert listed(answer) == expected(harnesses[0], input_ids)
        assert (answer.position, answer.durable, answer.replayed) == (index + 1, True, False)
        assert answer.state is (StateSource.REBUILT if index in (1, 2) else StateSource.RESIDENT)
    assert [harness.sample("wane_state_rebuilds_total") for harness in harnesses] == [0, 1, 1]


async def test_a_single_replica_makes_one_store_call_for_each_step(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make_replica()
    await harness.engine.create_session("s")
    await step(harness, 5)
    asked: list[str] = []
    assert isinstance(harness.store, RedisStore)
    run = harness.store.trips.run_many

    async def counted(script: str, *rest: Any, **given: Any) -> Any:
        asked.append(script)
        return await run(script, *rest, **given)

    monkeypatch.setattr(harness.store.trips, "run_many", counted)
    for token in range(6, 26):
        await step(harness, token)
    assert len(asked) == 20
    assert len(set(asked)) == 1


async def test_repeated_steps_are_recognised_at_every_replica(make_replica: MakeReplica) -> None:
    one, other = await make_replica(), await make_replica()
    await one.engine.create_session("s")
    first = await step(one, 5, 0)
    again = await step(other, 5, 0)
    assert (again.replayed, again.position, again.durable) == (True, 1, True)
    assert listed(again) == listed(first)
    await step(other, 6, key="k")
    assert (await step(one, 6, key="k")).replayed is True
    assert (await step(one, 6, 1, key="k")).replayed is True
    with pytest.raises(PositionConflict) as caught:
        await step(one, 7, 1)
    assert caught.value.position == 2
    assert (await step(one, 7)).position == 3
    assert (await step(other, 7)).position == 4  # the engine does not treat a step without a position as a repetition


async def test_a_reused_key_is_refused_at_every_replica(make_replica: MakeReplica) -> None:
    one, other = await make_replica(), await make_replica()
    await one.engine.create_session("s")
    await step(one, 5, 0, key="k")
    for harness in (one, other):
        for token, position in ((6, None), (6, 0), (6, 1), (5, 1)):
            with pytest.raises(IdempotencyKeyReused) as caught:
                await step(harness, token, position, key="k")
            assert caught.value.position == 1
    assert (await step(other, 5, key="k")).replayed is True


async def test_a_cached_key_that_the_store_has_dropped_is_accepted(
    make_replica: MakeReplica,
) -> None:
    one, other = await make_replica(), await make_replica()
    await one.engine.create_session("s")
    await step(one, 5, 0, key="k")
    await other.engine.rewind("s", 0)
    await step(other, 6, 0)
    answer = await step(one, 7, 1, key="k")
    assert (answer.position, answer.replayed) == (2, False)


async def test_a_session_with_a_history_is_the_same_at_every_replica(make_replica: MakeReplica) -> None:
    certified = {"certified": True, "window": 4, "max_window": 140}
    one, other = await make_replica(harness_options=certified), await make_replica(harness_options=certified)
    epsilon = one.manifest.certificate.error_bound_at
    history = History((5, 6, 7), 10)
    view = await one.engine.create_session("s", history=history)
    again = await other.engine.create_session("s", history=history)
    assert (type(view), type(again), again.durable) == (NewSession, SessionView, True)
    assert (view.state, view.error_bound) == (again.state, again.error_bound) == (StateSource.REBUILT, epsilon(3))
    input_ids = [5, 6, 7]
    for position, harness in ((10, other), (11, one), (12, other)):
        input_ids.append(position)
        answer = await step(harness, position, position)
        assert listed(answer) == ranked(one.runner.logits(input_ids))
        assert (answer.position, answer.error_bound) == (position + 1, epsilon(len(input_ids)))
    for harness in (one, other):
        with pytest.raises(SessionExists):
            await harness.engine.create_session("s", history=history)
        assert (await harness.engine.get_session("s")).error_bound == epsilon(6)
    assert (await one.engine.rewind("s", 8)).error_bound == epsilon(1)


async def test_rewind_and_delete_at_one_replica_apply_at_the_other(make_replica: MakeReplica) -> None:
    one, other = await make_replica(), await make_replica()
    await one.engine.create_session("s")
    for token in (5, 6, 7):
        await step(one, token)
    assert (await step(other, 8)).position == 4
    await other.engine.rewind("s", 1)
    await step(other, 9)
    await step(other, 10)
    await step(other, 11)
    with pytest.raises(PositionConflict):
        await step(one, 12, 3)
    answer = await step(one, 12, 4)
    assert listed(answer) == expected(one, [5, 9, 10, 11, 12])
    assert answer.state is StateSource.REBUILT
    await one.engine.delete_session("s")
    with pytest.raises(UnknownSession):
        await step(other, 13)
    await other.engine.create_session("s", Mode.WINDOW)
    assert (await one.engine.get_session("s")).mode is Mode.WINDOW


async def test_a_prediction_uses_the_session_s_current_tokens(make_replica: MakeReplica) -> None:
    one, other = await make_replica(), await make_replica()
    await one.engine.create_session("s")
    await step(one, 5)
    await step(other, 6)
    answer = await one.engine.submit(PredictRequest(session="s"))
    assert (answer.position, listed(answer)) == (2, expected(one, [5, 6]))


async def test_an_uncertified_models_state_is_restored_exactly(
    make_replica: MakeReplica,
) -> None:
    one = await make_replica(state_checkpoint_interval_tokens=8)
    await one.engine.create_session("s")
    input_ids = [5 + index % 50 for index in range(100)]
    for token in input_ids:
        await step(one, token)
    other = await make_replica(state_checkpoint_interval_tokens=8)
    answer = await step(other, 3, 100)
    assert (answer.state, answer.error_bound, answer.durable) == (StateSource.REBUILT, 0.0, True)
    assert listed(answer) == expected(one, [*input_ids, 3])
    assert other.runner.calls == [("advance", [input_ids[96:]]), ("step", [[3]])]
    other.engine.state_cache.drop("s")
    view = await other.engine.get_session("s")
    assert (view.state, view.error_bound) == (StateSource.REBUILT, 0.0)
    assert listed(await other.engine.submit(PredictRequest(session="s"))) == expected(one, [*input_ids, 3])


async def test_a_store_without_states_loses_the_effect_of_dropped_tokens(make_replica: MakeReplica) -> None:
    one, other = [await make_replica(store_policy="tail") for _ in range(2)]
    await one.engine.create_session("s")
    for index in range(40):
        await step(one, 5 + index)
    answer = await step(other, 3)
    assert answer.state is StateSource.REBUILT
    assert answer.error_bound is None  # the store keeps 16 of 40 tokens, and the model is not certified


async def test_a_certified_models_states_are_not_stored_and_have_a_bound(make_replica: MakeReplica) -> None:
    certified = {"certified": True, "max_window": 200}
    one, other = [await make_replica(harness_options=certified) for _ in range(2)]
    await one.engine.create_session("s")
    for index in range(40):
        await step(one, 5 + index)
    record = await other.store.get("s")
    assert record is not None
    assert record.snapshot is None
    answer = await step(other, 3)
    assert answer.state is StateSource.REBUILT
    assert answer.error_bound is not None
    assert 0 < answer.error_bound <= 1


async def test_a_stored_state_of_another_model_is_not_used(make_replica: MakeReplica) -> None:
    one, other = [await make_replica(state_checkpoint_interval_tokens=1) for _ in range(2)]
    other.engine.sessions.model_fingerprint = b"another"
    await one.engine.create_session("s")
    for index in range(40):
        await step(one, 5 + index)
    assert (await step(other, 3)).error_bound is None


async def test_a_replica_without_its_store_refuses_steps_while_the_other_replica_serves(
    make_replica: MakeReplica, redis: RedisServer
) -> None:
    async with proxy(redis.port) as between:
        severed, whole = await make_replica(between.port), await make_replica()
        await severed.engine.create_session("s")
        await step(severed, 5, 0)
        between.sever()
        with pytest.raises(Unavailable):
            await step(severed, 6, 1)
        assert not severed.store.standing.reachable
        severed.runner.calls.clear()
        with pytest.raises(Unavailable):
            await step(severed, 6, 1)
        assert severed.runner.calls == []  # the engine does not run a step that it cannot commit
        assert (await step(whole, 6, 1)).position == 2
        between.mend()
        await until(lambda: severed.store.standing.reachable)
        assert (await step(severed, 6, 1)).replayed is True
        answer = await step(severed, 7, 2)
        assert (listed(answer), answer.state) == (expected(severed, [5, 6, 7]), StateSource.RESIDENT)


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("worker", ["of the session", "another"])
async def test_a_fork_takes_the_state_of_its_session_to_other_replicas(
    make_replica: MakeReplica, earlier: int, worker: str
) -> None:
    first, second = [await make_replica(store_policy="state", state_checkpoint_interval_tokens=4) for _ in range(2)]
    await first.engine.create_session("s")
    for token in range(5, 27):  # more tokens than a session keeps, so that only a state has read all of them
        await step(first, token)
    await second.engine.get_session("s")
    if worker == "another":
        _, history = await first.engine.history("s", 22 - earlier)
        forked = await first.engine.create_session("t", history=history)
    else:
        forked = await first.engine.fork("s", "t", 22 - earlier)
    assert (forked.durable, forked.error_bound) == (True, 0.0)
    second.runner.calls.clear()
    answer = await second.engine.submit(StepRequest("t", (9,)))
    assert listed(answer) == expected(first, [*range(5, 27 - earlier), 9])
    assert (answer.state, answer.error_bound) == (StateSource.REBUILT, 0.0)
    assert sum(len(row) for _, rows in second.runner.calls for row in rows) <= 4 + 1
