"""Tests that a step behaves the same at every entrance (a subclass of `Entrance` in `entrances.py`) and with every
session store. Each test runs for every pair of an entrance and a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.service.engine_harness import EngineHarness, FakeProof, MakeHarness, name_vocabulary
from tests.service.entrances import ENTRANCES, TIMEOUT_S, Call, EngineEntrance, Entrance, entered
from tests.service.server_harness import repeatable
from tests.service.sessions.stores.redis_server import RedisServer, redis_server
from tests.service.slow_client import until
from wane.service.errors import SessionExists, UnknownSession
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.factory import make_store
from wane.service.sessions.stores.store import Store
from wane.service.settings import Settings
from wane.service.types.answer import NewSession
from wane.service.types.common import Mode
from wane.service.types.request import ANYBODY, Filter, StepRequest

EOS = 0
MakeReplica = Callable[..., Awaitable[EngineHarness]]
Step = dict[str, Any]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), ("--appendonly", "no")) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    """The kind of session store, `memory` or `redis`."""
    name: str = request.param
    return name


@pytest.fixture
async def open_store(store: str, request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Awaitable[Store]]]:
    """A function that returns an open store for one more replica. All replicas have the same sessions."""
    address = "memory" if store == "memory" else request.getfixturevalue("redis").url
    settings = Settings(store=address, store_namespace=f"t{id(request.node)}")
    stores: list[Store] = []

    async def opened() -> Store:
        if store != "memory" or not stores:
            stores.append(make_store(settings, 16, Metrics()))
            await stores[-1].open()
        return stores[-1]

    yield opened
    for one in stores:
        await one.close()


@pytest.fixture
def make_replica(store: str, open_store: Callable[[], Awaitable[Store]], make_harness: MakeHarness) -> MakeReplica:
    """A function that makes engines whose stores contain the same sessions."""

    async def made(**changes: Any) -> EngineHarness:
        return make_harness(store=await open_store(), **changes)

    return made


@pytest.fixture
async def harness(request: pytest.FixtureRequest, make_replica: MakeReplica) -> EngineHarness:
    """The harness of the engine that the entrance calls. `request.param` has options of the harness."""
    return await make_replica(**getattr(request, "param", {}))


@pytest.fixture(params=ENTRANCES)
async def entrance(
    request: pytest.FixtureRequest, harness: EngineHarness, travel: Callable[[float], None]
) -> AsyncIterator[Entrance]:
    """An entrance to an engine with the sessions a, b and c. Each session has received the token 5. The fixture depends
    on `travel`, so pytest restores the clock only after the server has stopped."""
    async with entered(request.param, harness) as entrance:
        yield entrance


def most_probable(harness: EngineHarness, *tokens: int) -> list[int]:
    """Returns the ids of the five most probable next tokens for a session that has received these tokens."""
    best: list[int] = np.argsort(-harness.runner.logits([EOS, *tokens]))[:5].tolist()
    return best


def predicted(answer: dict[str, Any]) -> list[int]:
    return [one["token_id"] for one in answer["predictions"]]


async def position(harness: EngineHarness, session: str) -> int:
    return (await harness.engine.get_session(session)).position


def close_gate(harness: EngineHarness) -> None:
    """Makes every run that begins from now on wait until the test sets the runner's `gate`."""
    harness.runner.busy.clear()
    harness.runner.gate.clear()


async def block(harness: EngineHarness) -> Awaitable[object]:
    """Begins a run that ends when the test sets the runner's `gate`. Other requests wait in the queue until the run
    ends."""
    close_gate(harness)
    blocking = harness.engine.submit(StepRequest("b", (8,)))
    await harness.runner.until_busy()
    return blocking


async def queued(harness: EngineHarness, call: Awaitable[Call]) -> Call:
    """Sends a step, and waits until the step is in the queue."""
    sent = await call
    await until(lambda: harness.sample("wane_queue_items") == 1)
    return sent


async def running(harness: EngineHarness, call: Awaitable[Call]) -> Call:
    """Sends a step, and waits until the step's run has begun. The run ends when the test sets the runner's `gate`."""
    close_gate(harness)
    sent = await call
    await harness.runner.until_busy()
    return sent


# Effects of a step.


@pytest.mark.parametrize(
    ("step", "tokens"),
    [
        ({"tokens": [6]}, (6,)),
        ({"tokens": [6, 7]}, (6, 7)),
        ({"input": "ab"}, None),
        ({"tokens": [6], "expected_position": 1, "idempotency_key": "k"}, (6,)),
    ],
    ids=["one token", "two tokens", "text", "position and key"],
)
async def test_every_entrance_appends_and_answers_a_step_like_the_engine(
    entrance: Entrance, harness: EngineHarness, step: Step, tokens: tuple[int, ...] | None
) -> None:
    tokens = tokens or tuple(harness.vocabulary.encode("ab"))
    answer = await entrance.step("a", **step)
    assert (answer["session"], answer["position"]) == ("a", 1 + len(tokens))
    assert (answer["state"], answer["replayed"]) == ("resident", False)
    assert predicted(answer) == most_probable(harness, 5, *tokens)
    assert repeatable(answer) == repeatable(await EngineEntrance(entrance.models).step("b", tokens=tokens))
    assert await position(harness, "a") == 1 + len(tokens)


EVENTS = name_vocabulary(names=[f"e{index}" for index in range(24)])
OPTIONS: dict[str, Step] = {
    "plain": {},
    "position": {"expected_position": 1},
    "key": {"idempotency_key": "k"},
    "position and key": {"expected_position": 1, "idempotency_key": "k"},
    "mode": {"mode": "recurrent"},
    "prove": {"prove": True},
    "create": {"create": True},
    "exclude": {"exclude": ["e1", "e2"]},
    "exclude_seen": {"exclude_seen": True},
    "candidates": {"candidates": ["e1", "e5"]},
    "top_k": {"top_k": 20},
}


def engine_options(option: Step) -> Step:
    """Returns the fields of a body as fields of a `StepRequest`."""
    fields, filters = dict(option), dict[str, Any]()
    for name in ("exclude", "exclude_seen", "candidates"):
        if name in fields:
            value = fields.pop(name)
            filters[name] = value if value is True else tuple(2 + int(event[1:]) for event in value)
    if "mode" in fields:
        fields["mode"] = Mode(fields["mode"])
    return fields | ({"filter": Filter(**filters)} if filters else {})


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "harness", [{"vocabulary": EVENTS}, {"vocabulary": EVENTS, "shadow_rate": 1.0}], ids=["", "shadows"], indirect=True
)
async def test_each_step_of_one_token_runs_as_a_row(entrance: Entrance, harness: EngineHarness, option: str) -> None:
    asked = OPTIONS[option]
    given = engine_options(asked) if isinstance(entrance, EngineEntrance) else asked
    harness.runner.calls.clear()
    ran = harness.engine.columns.ran
    answer = await entrance.step("a", tokens=[6], **given)
    again = await entrance.step("a", tokens=[7])
    assert (answer["position"], again["position"]) == (2, 3)
    assert harness.engine.columns.ran == ran + 2
    assert harness.runner.calls == [("step", [[6]]), ("step", [[7]])]
    listed = [one["token_id"] for one in answer["predictions"]]
    best = [*map(int, np.argsort(-harness.runner.logits([EOS, 5, 6])))]
    unlisted = {0, 1, *({5, 6} if option == "exclude_seen" else {3, 4} if option == "exclude" else set())}
    expected = [one for one in best if one not in unlisted and (option != "candidates" or one in (3, 7))]
    assert listed == expected[: len(listed)] and len(listed) == min(asked.get("top_k", 5), len(expected))


async def test_the_last_token_of_a_longer_step_runs_as_a_row(entrance: Entrance, harness: EngineHarness) -> None:
    harness.runner.calls.clear()
    ran = harness.engine.columns.ran
    answer = await entrance.step("a", tokens=[6, 7, 8])
    assert predicted(answer) == most_probable(harness, 5, 6, 7, 8)
    assert harness.engine.columns.ran == ran + 1
    assert harness.runner.calls == [("advance", [[6, 7]]), ("step", [[8]])]


async def test_the_first_step_and_a_waiting_step_of_a_session_run_as_rows(
    entrance: Entrance, harness: EngineHarness
) -> None:
    await harness.engine.create_session("d")
    harness.runner.calls.clear()
    ran = harness.engine.columns.ran
    first = await running(harness, entrance.send("d", tokens=[6]))
    waiting = await entrance.send("d", tokens=[7]) if isinstance(entrance, EngineEntrance) else None
    harness.runner.gate.set()
    assert (await first.outcome())["position"] == 1
    if waiting is not None:
        assert (await waiting.outcome())["position"] == 2
    assert harness.engine.columns.ran == ran + (1 if waiting is None else 2)
    assert {role for role, _ in harness.runner.calls} == {"step"}


# Retries and conflicts.


@pytest.mark.parametrize("said", [{"expected_position": 1}, {"idempotency_key": "k"}], ids=["position", "key"])
async def test_a_retried_step_is_answered_again_and_appended_once(
    entrance: Entrance, harness: EngineHarness, said: Step
) -> None:
    first, again = [await entrance.step("a", tokens=[6], **said) for _ in range(2)]
    assert (first["replayed"], again["replayed"]) == (False, True)
    assert (again["position"], predicted(again)) == (2, predicted(first))
    assert await position(harness, "a") == 2
    assert harness.sample("wane_steps_replayed_total") == 1


@pytest.mark.parametrize("other", [{"tokens": [7]}, {"expected_position": 2}], ids=["tokens", "position"])
async def test_a_different_step_with_the_last_idempotency_key_is_refused(
    entrance: Entrance, harness: EngineHarness, other: Step
) -> None:
    step = {"tokens": [6], "expected_position": 1, "idempotency_key": "k"}
    await entrance.step("a", **step)
    refused = await entrance.step("a", **(step | other))
    assert (refused["code"], refused["status"], refused["position"]) == ("idempotency_key_reused", 409, 2)
    assert (await entrance.step("a", **step))["replayed"] is True
    assert await position(harness, "a") == 2


@pytest.mark.parametrize(
    ("session", "step", "code"),
    [
        ("nowhere", {}, "unknown_session"),
        ("a", {"expected_position": 9}, "position_conflict"),
        ("a", {"tokens": [10_000]}, "invalid_request"),
        ("a", {"tokens": [-1]}, "invalid_request"),
    ],
    ids=["unknown session", "conflict", "unknown token", "negative token"],
)
async def test_an_invalid_step_is_refused(
    entrance: Entrance, harness: EngineHarness, session: str, step: Step, code: str
) -> None:
    refused = await entrance.step(session, **({"tokens": [6]} | step))
    assert refused["code"] == code
    assert refused.get("position") == (1 if code == "position_conflict" else None)
    assert (await entrance.step("a", tokens=[6]))["position"] == 2


# Creating a session.


async def test_a_step_with_create_makes_a_session_that_does_not_exist(
    entrance: Entrance, harness: EngineHarness
) -> None:
    first = await entrance.step("new", tokens=[6, 7], create=True)
    assert (first["created"], first["position"], first["replayed"]) == (True, 2, False)
    assert predicted(first) == most_probable(harness, 6, 7)
    then = await entrance.step("new", tokens=[8], create=True)
    assert (then["position"], predicted(then)) == (3, most_probable(harness, 6, 7, 8))
    assert "created" not in then
    view = await harness.engine.get_session("new")
    assert (view.position, view.mode) == (3, Mode.AUTO)


async def test_a_retry_of_the_step_that_created_a_session_says_so_again(
    entrance: Entrance, harness: EngineHarness
) -> None:
    step = {"tokens": [6], "create": True, "expected_position": 0}
    first, again = [await entrance.step("new", **step) for _ in range(2)]
    assert [(one["created"], one["replayed"], one["position"]) for one in (first, again)] == [
        (True, False, 1),
        (True, True, 1),
    ]
    assert predicted(again) == predicted(first) == most_probable(harness, 6)


async def test_a_retry_of_a_first_step_that_did_not_create_its_session_does_not_say_so(
    entrance: Entrance, harness: EngineHarness
) -> None:
    await harness.engine.create_session("made")
    for replayed in (False, True):
        answer = await entrance.step("made", tokens=[6], create=True, expected_position=0)
        assert (answer["replayed"], answer["position"], "created" in answer) == (replayed, 1, False)


@pytest.mark.parametrize("session", ["new", "gone"])
async def test_a_step_with_a_later_position_creates_no_session(
    entrance: Entrance, harness: EngineHarness, session: str
) -> None:
    if session == "gone":
        await entrance.step("gone", tokens=[6], create=True)
        await harness.engine.delete_session("gone")
    refused = await entrance.step(session, tokens=[6], create=True, expected_position=1)
    assert (refused["code"], refused["status"]) == ("unknown_session", 404)
    with pytest.raises(UnknownSession):
        await harness.engine.get_session(session)


async def test_a_deleted_session_starts_again_and_its_next_step_says_so(
    entrance: Entrance, harness: EngineHarness
) -> None:
    assert "created" not in await entrance.step("a", tokens=[6], create=True)
    await harness.engine.delete_session("a")
    answer = await entrance.step("a", tokens=[6], create=True)
    assert (answer["created"], answer["position"]) == (True, 1)
    assert predicted(answer) == most_probable(harness, 6)


async def test_two_steps_that_create_the_same_session_create_it_once(
    entrance: Entrance, harness: EngineHarness, make_replica: MakeReplica
) -> None:
    other = await make_replica()
    step = await running(harness, entrance.send("new", tokens=[6], create=True))
    created = await other.engine.submit(StepRequest("new", (99,), creator=ANYBODY))
    harness.runner.gate.set()
    answer = await step.outcome()
    assert (created.created, created.position) == (True, 1)
    assert "created" not in answer
    assert (answer["position"], predicted(answer)) == (2, most_probable(harness, 99, 6))


async def test_an_invalid_first_step_creates_no_session(entrance: Entrance, harness: EngineHarness) -> None:
    refused = await entrance.step("new", tokens=[10_000], create=True)
    assert refused["code"] == "invalid_request"
    with pytest.raises(UnknownSession):
        await harness.engine.get_session("new")


async def test_a_first_step_that_is_cancelled_in_the_queue_creates_no_session(
    entrance: Entrance, harness: EngineHarness
) -> None:
    blocking = await block(harness)
    call = await queued(harness, entrance.send("new", tokens=[6], create=True))
    await call.disconnect()
    await entrance.none_in_flight()
    harness.runner.gate.set()
    await blocking
    with pytest.raises(UnknownSession):
        await harness.engine.get_session("new")
    assert harness.sample("wane_queue_dropped_total", reason="abandoned") == 1


async def test_a_creation_is_sent_again_before_the_first_step(entrance: Entrance, harness: EngineHarness) -> None:
    first, again = [await harness.engine.create_session("new", Mode.WINDOW) for _ in range(2)]
    assert [isinstance(one, NewSession) for one in (first, again)] == [True, False]
    await entrance.step("new", tokens=[6])
    with pytest.raises(SessionExists):
        await harness.engine.create_session("new", Mode.WINDOW)


# Two writers.


async def test_two_clients_of_a_session_are_answered_one_after_another(
    entrance: Entrance, harness: EngineHarness
) -> None:
    harness.runner.calls.clear()
    first = await running(harness, entrance.send("a", tokens=[6]))
    second = await entrance.send("a", tokens=[7])
    harness.runner.gate.set()
    assert [(await call.outcome())["position"] for call in (first, second)] == [2, 3]
    assert harness.runner.calls == [("step", [[6]]), ("step", [[7]])]


async def test_a_step_that_loses_a_commit_race_is_retried_on_the_new_state(
    entrance: Entrance, harness: EngineHarness, make_replica: MakeReplica
) -> None:
    other = await make_replica()
    step = await running(harness, entrance.send("a", tokens=[6]))
    await other.engine.submit(StepRequest("a", (99,)))
    harness.runner.gate.set()
    answer = await step.outcome()
    assert (answer["position"], answer["state"], answer["replayed"]) == (3, "resident", False)
    assert predicted(answer) == most_probable(harness, 5, 99, 6)
    assert harness.sample("wane_step_conflicts_total") == 1


async def test_a_step_with_an_expected_position_that_loses_a_commit_race_is_a_conflict(
    entrance: Entrance, harness: EngineHarness, make_replica: MakeReplica
) -> None:
    other = await make_replica()
    step = await running(harness, entrance.send("a", tokens=[6], expected_position=1))
    await other.engine.submit(StepRequest("a", (99,)))
    harness.runner.gate.set()
    refused = await step.outcome()
    assert (refused["code"], refused["position"]) == ("position_conflict", 2)
    assert await position(harness, "a") == 2


async def test_concurrent_steps_on_two_replicas_both_commit(
    entrance: Entrance, harness: EngineHarness, make_replica: MakeReplica
) -> None:
    other = await make_replica()
    close_gate(other)
    theirs = other.engine.submit(StepRequest("a", (99,)))
    await other.runner.until_busy()
    ours = await running(harness, entrance.send("a", tokens=[6]))
    harness.runner.gate.set()
    other.runner.gate.set()
    positions = {(await theirs).position, (await ours.outcome())["position"]}
    assert positions == {2, 3}
    conflicts = [one.sample("wane_step_conflicts_total") for one in (harness, other)]
    assert sorted(conflicts) == [0, 1]


# Failures and refusals.


async def test_a_failed_run_changes_nothing(entrance: Entrance, harness: EngineHarness) -> None:
    harness.runner.poison = 6
    failed = await entrance.step("a", tokens=[6])
    assert (failed["code"], failed["status"]) == ("internal", 500)
    answer = await entrance.step("a", tokens=[7])
    assert (answer["position"], answer["state"]) == (2, "resident")
    assert predicted(answer) == most_probable(harness, 5, 7)


@pytest.mark.parametrize("harness", [{"max_queue": 1}], indirect=True, ids=["queue of 1"])
async def test_a_full_queue_refuses_and_releases_the_session(entrance: Entrance, harness: EngineHarness) -> None:
    blocking = await block(harness)
    waiting = harness.engine.submit(StepRequest("c", (8,)))
    refused = await entrance.step("a", tokens=[6])
    assert (refused["code"], refused["retryable"]) == ("overloaded", True)
    assert harness.sample("wane_queue_rejected_total") == 1
    harness.runner.gate.set()
    await blocking
    await waiting
    assert (await entrance.step("a", tokens=[6]))["position"] == 2


async def test_a_draining_engine_answers_admitted_steps_and_refuses_new_steps(
    entrance: Entrance, harness: EngineHarness
) -> None:
    admitted = await running(harness, entrance.send("a", tokens=[6]))
    draining = asyncio.ensure_future(harness.engine.drain())
    await asyncio.sleep(0)
    refused = await entrance.step("b", tokens=[6])
    assert (refused["code"], draining.done()) == ("unavailable", False)
    harness.runner.gate.set()
    assert (await admitted.outcome())["position"] == 2
    await draining


# Deadlines and disconnections.


async def test_a_step_whose_deadline_passes_in_the_queue_changes_nothing(
    entrance: Entrance, harness: EngineHarness, travel: Callable[[float], None]
) -> None:
    blocking = await block(harness)
    call = await queued(harness, entrance.send("a", tokens=[6]))
    travel(TIMEOUT_S + 1)
    late = await call.outcome()
    assert (late["code"], "still commits" in late["detail"]) == ("deadline_exceeded", False)
    harness.runner.gate.set()
    await blocking
    assert ("step", [[6]]) not in harness.runner.calls
    assert (await entrance.step("a", tokens=[6], expected_position=1))["replayed"] is False
    assert harness.sample("wane_queue_dropped_total", reason="deadline") == 1


async def test_a_step_whose_deadline_passes_during_its_run_fails_but_commits(
    entrance: Entrance, harness: EngineHarness, travel: Callable[[float], None]
) -> None:
    call = await running(harness, entrance.send("a", tokens=[6], expected_position=1))
    travel(TIMEOUT_S + 1)
    late = await call.outcome()
    assert (late["code"], "still commits" in late["detail"]) == ("deadline_exceeded", True)
    harness.runner.gate.set()
    again = await entrance.step("a", tokens=[6], expected_position=1)
    assert (again["replayed"], again["position"]) == (True, 2)


async def test_a_step_whose_client_disconnects_before_its_run_changes_nothing(
    entrance: Entrance, harness: EngineHarness
) -> None:
    blocking = await block(harness)
    call = await queued(harness, entrance.send("a", tokens=[6]))
    await call.disconnect()
    await entrance.none_in_flight()
    harness.runner.gate.set()
    await blocking
    assert ("step", [[6]]) not in harness.runner.calls
    assert (await entrance.step("a", tokens=[6], expected_position=1))["replayed"] is False
    assert harness.sample("wane_queue_dropped_total", reason="abandoned") == 1


async def test_a_step_whose_client_disconnects_during_its_run_commits(
    entrance: Entrance, harness: EngineHarness
) -> None:
    call = await running(harness, entrance.send("a", tokens=[6], expected_position=1))
    await call.disconnect()
    await entrance.none_in_flight()
    harness.runner.gate.set()
    again = await entrance.step("a", tokens=[6], expected_position=1)
    assert (again["replayed"], again["position"]) == (True, 2)


# Searches for a proof.

SEARCH: Step = {"tokens": [6, 7, 8, 9, 10], "mode": Mode.WINDOW, "expected_position": 1, "prove": True}
with_rivals = pytest.mark.parametrize("harness", [{"certified": True, "radius": 1.0}], indirect=True, ids=["bounded"])


async def searching(proof: FakeProof, call: Awaitable[Call]) -> Call:
    """Awaits `call`, which sends a step, and waits until the search for the step's proof has begun. The search ends
    when the test sets the proof's `gate`."""
    proof.gate.clear()
    sent = await call
    await proof.until_busy()
    return sent


@with_rivals
async def test_a_proof_is_searched_for_only_on_request(entrance: Entrance, harness: EngineHarness) -> None:
    proof = FakeProof(harness.engine)
    plain = await entrance.step("a", **(SEARCH | {"prove": False}))
    assert (plain["position"], plain["top1_proved"], proof.asked) == (6, False, 0)
    asked = await entrance.step("b", **SEARCH)
    assert (asked["position"], asked["top1_proved"], proof.asked) == (6, True, 1)


@with_rivals
async def test_a_step_whose_deadline_passes_during_its_search_fails_and_releases_the_session(
    entrance: Entrance, harness: EngineHarness, travel: Callable[[float], None]
) -> None:
    proof = FakeProof(harness.engine)
    call = await searching(proof, entrance.send("a", **SEARCH))
    travel(TIMEOUT_S + 1)
    late = await call.outcome()
    assert (late["code"], "still commits" in late["detail"]) == ("deadline_exceeded", True)
    again = await entrance.step("a", **(SEARCH | {"prove": False}))
    assert (again["replayed"], again["position"]) == (True, 6)
    proof.gate.set()


@with_rivals
async def test_a_disconnection_during_the_search_ends_the_search_and_the_step_commits(
    entrance: Entrance, harness: EngineHarness
) -> None:
    proof = FakeProof(harness.engine)
    call = await searching(proof, entrance.send("a", **SEARCH))
    await call.disconnect()
    await entrance.none_in_flight()
    again = await entrance.step("a", **(SEARCH | {"prove": False}))
    assert (again["replayed"], again["position"]) == (True, 6)
    proof.gate.set()


# Another version of the model.


async def test_a_session_continues_after_its_model_is_replaced(
    entrance: Entrance, harness: EngineHarness, make_replica: MakeReplica
) -> None:
    new = await make_replica()
    step = await running(harness, entrance.send("a", tokens=[6]))
    entrance.models.swap(new.engine)
    harness.runner.gate.set()
    answer = await step.outcome()
    assert (answer["position"], answer["state"]) == (2, "resident")
    answer = await entrance.step("a", tokens=[7])
    assert (answer["position"], answer["state"]) == (3, "rebuilt")
    assert predicted(answer) == most_probable(new, 5, 6, 7)
    assert harness.engine.retired
