"""Many steps of one call."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from tests.service.engine_harness import EngineHarness
from wane.service.batching.ticket import Ticket
from wane.service.engine.pending import Pending
from wane.service.engine.step_many import step_many
from wane.service.errors import EarlierStepFailed, InvalidRequest
from wane.service.types import Answer, Latency, Mode, StateSource, StepRequest


class Stepper:
    """Answers once `go` is set, and fails at token 0; `order` is what it was asked, `most` at how many at a time."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []
        self.busy = self.most = 0

    def submit(self, request: StepRequest) -> Pending[Answer]:
        return Pending(self._step(request), Ticket())

    async def _step(self, request: StepRequest) -> Answer:
        self.order.append((request.session, request.tokens[0]))
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        if request.tokens == (0,):
            raise InvalidRequest("no zeros")
        return Answer(Mode.RECURRENT, (), Latency(0, 0, 0), StateSource.RESIDENT, 0.0, position=request.tokens[0])


def requests(*steps: tuple[str, int]) -> list[StepRequest]:
    return [StepRequest(session, (token,)) for session, token in steps]


async def test_outcomes_come_in_the_order_of_the_steps_and_sessions_run_side_by_side() -> None:
    stepper = Stepper()
    outcomes = await step_many(stepper.submit, requests(("a", 1), ("b", 2), ("c", 3)))
    assert [outcome.position for outcome in outcomes if isinstance(outcome, Answer)] == [1, 2, 3]
    assert stepper.most == 3


async def test_steps_of_one_session_run_one_after_the_other_in_their_order() -> None:
    stepper = Stepper()
    await step_many(stepper.submit, requests(("a", 1), ("b", 5), ("a", 2), ("a", 3)))
    assert [token for session, token in stepper.order if session == "a"] == [1, 2, 3]
    assert stepper.most == 2


async def test_behind_a_failure_only_its_own_session_s_steps_are_not_taken() -> None:
    stepper = Stepper()
    outcomes = await step_many(stepper.submit, requests(("a", 1), ("a", 0), ("b", 2), ("a", 3), ("b", 4)))
    assert [type(outcome) for outcome in outcomes] == [Answer, InvalidRequest, Answer, EarlierStepFailed, Answer]
    assert ("a", 3) not in stepper.order


async def test_a_step_behind_a_failure_is_told_of_its_session_by_the_id_that_its_owner_knows() -> None:
    outcomes = await step_many(Stepper().submit, requests(("alice/a", 0), ("alice/a", 1)))
    assert "session 'a' " in str(outcomes[1])


async def test_every_step_of_a_call_is_submitted_in_the_context_of_the_call(harness: EngineHarness) -> None:
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    seen: list[str] = []

    def submit(request: StepRequest) -> Pending[Answer]:
        seen.append(caller.get())
        return harness.engine.submit(request)

    await harness.engine.create_session("s")
    caller.set("the call")
    await step_many(submit, requests(("s", 5), ("s", 6)))  # the second goes on where the first one's batch is over
    assert seen == ["the call", "the call"]
