"""Shadows: repeats a sample of live answers in the other mode, to measure agreement on live traffic.

A sampled answer is copied together with its tokens, so later steps of its session change neither. The other mode runs
in a separate process, one piece at a time, and a piece starts only while the live runner is idle. Live work never
queues behind a shadow, and, if the system supports low-priority processes, does not compete with it for a processor.
Samples without idle time are dropped and counted. Neither a client nor the shutdown waits for a shadow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Role, StateTensor
from wane.service.batching.batcher import Batcher
from wane.service.engine.agreement import Source
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.forward import RunResult, tail
from wane.service.engine.stats import Stats
from wane.service.runners.runner import NEXT, RADIUS, Array
from wane.service.runners.subprocess import RunnerLost
from wane.service.state.pool import HIDDEN
from wane.service.types import Agreement, Latency, Mode

logger = logging.getLogger("wane.engine")

MOST_CASES = 64
MOST_TOKENS = 1 << 18
"""Limits on queued answers and on their tokens, about two megabytes. More are dropped."""

PIECE_TOKENS = 64
"""Longest piece of a sequence that runs between two checks for live work."""

PAUSE_S = 0.001
"""Pause after a batch before a shadow starts: the batch's answers are still to be sent."""

NO_TOKENS = np.empty(0, np.int64)
NO_TIME = Latency(0.0, 0.0, 0.0)


class ShadowProcess(Protocol):
    """The runner of shadows. Only `kill` may be called while another call runs."""

    cpu_s: float
    """Processor time in seconds that the runs have taken outside of the calling thread."""

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Like `Runner.run`. Raises RunnerLost if no more runs are possible."""
        ...

    def kill(self) -> None:
        """Kills the process without waiting for its exit."""
        ...

    def wait(self) -> None:
        """Waits for the process to exit."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A live answer, and the `tokens`, int64 (n), that the other mode runs from the zero state.

    `plan` covers both modes; `live` is the part that answered, and `recurrent` its mode. `history`: int64, the tokens
    of the model's cache.
    """

    plan: AnswerPlan
    tokens: NDArray[np.int64]
    history: NDArray[np.int64]
    live: ModeResult
    recurrent: bool


class Shadow:
    """One model's shadow answers. All methods must be called on the event loop's thread."""

    def __init__(
        self,
        rate: float,
        runner: ShadowProcess,
        state: Sequence[StateTensor],
        batcher: Batcher,
        answer_builder: AnswerBuilder,
        report: Stats,
        *,
        window: int,
        random: Random,
    ) -> None:
        """`rate` is the share of answers that `random` samples; `window` is the model's k."""
        self._rate = rate
        self._runner = runner
        self._state = state
        self._batcher = batcher
        self._answer_builder = answer_builder
        self._report = report
        self._window = window
        self._random = random
        self._cases: deque[Case] = deque()
        self._tokens = 0
        self._work: Iterator[Agreement | None] | None = None
        self._running: asyncio.Future[tuple[Agreement | None, float]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow")
        batcher.on_idle = self._wake

    @property
    def idle(self) -> bool:
        """Whether no shadow is queued or runs."""
        return not self._cases and self._work is None and self._running is None and self._timer is None

    def chosen(self) -> bool:
        """Returns whether the next answer is sampled."""
        return not self._closed and self._random.random() < self._rate

    def offer(self, plan: AnswerPlan, input_ids: NDArray[np.int64], live: ModeResult) -> None:
        """Queues a copy of a sampled answer, or drops it if the queue is full."""
        case = self._case(plan, input_ids, live)
        if len(self._cases) == MOST_CASES or self._tokens + len(case.tokens) > MOST_TOKENS:
            self._report.shadowed("dropped")
            return
        self._cases.append(case)
        self._tokens += len(case.tokens)
        self._wake()

    def close(self) -> None:
        """Drops the queued answers, and kills the other process without waiting for it."""
        if self._closed:
            return
        self._closed = True
        self._batcher.on_idle = None
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(len(self._cases) + (self._work is not None)):
            self._report.shadowed("dropped")
        self._cases.clear()
        self._work = None
        if self._running is not None:
            self._running.cancel()
        self._runner.kill()
        self._thread.submit(self._runner.wait)
        self._thread.shutdown(wait=False)

    def _case(self, plan: AnswerPlan, input_ids: NDArray[np.int64], live: ModeResult) -> Case:
        """Copies an answer into a case: its row is a view that would keep the whole batch in memory."""
        result = RunResult.of(live.result.network_logits.copy(), live.result.hidden.copy(), live.result.radius)
        cache, history = self._answer_builder.cache, NO_TOKENS
        if cache is not None and live.result.mixed is not None:
            history = input_ids[max(len(input_ids) - cache.length, len(input_ids) > plan.position) :].copy()
            result = result.mix(cache, history, plan.position)
        recurrent = plan.mode is Mode.RECURRENT
        if recurrent:
            k = self._window if len(input_ids) > plan.position else min(self._window, len(input_ids))
            tokens, plan = tail(input_ids, plan.position, k).copy(), plan._replace(mode=Mode.BOTH, window=k)
        else:
            tokens = input_ids
            context_length = plan.position if len(input_ids) > plan.position else len(input_ids)
            plan = plan._replace(mode=Mode.BOTH, context_length=context_length)
        return Case(plan, tokens, history, ModeResult(result, live.bound, live.latency), recurrent)

    def _wake(self) -> None:
        """Schedules the next piece, if there is one and none runs."""
        if (self._cases or self._work is not None) and self._timer is None and self._running is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._begin)

    def _begin(self) -> None:
        """Starts the next piece, if the runner is idle; a busy runner calls `_wake` when it becomes idle."""
        self._timer = None
        if not self._batcher.idle:
            return
        if self._work is None:
            case = self._cases.popleft()
            self._tokens -= len(case.tokens)
            self._work = self._answer(case)
        self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._piece, self._work)
        self._running.add_done_callback(self._end)

    def _end(self, done: asyncio.Future[tuple[Agreement | None, float]]) -> None:
        """Records the result of a piece, and schedules the next."""
        self._running = None
        if self._closed or done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._work = None
            self._report.shadowed("failed")
            logger.error("a shadow failed", exc_info=error)
            if isinstance(error, RunnerLost):
                self.close()
        else:
            agreement, cpu_s = done.result()
            self._report.shadow_took(cpu_s)
            if agreement is not None:
                self._work = None
                self._report.shadowed("compared")
                self._report.compared(agreement, Source.SHADOW)
        self._wake()

    def _answer(self, case: Case) -> Iterator[Agreement | None]:
        """Runs a case: yields None after each piece but the last, then the agreement of the two answers."""
        if case.recurrent:
            lengths = np.array([len(case.tokens)])
            outputs = self._runner.run("window", {"tokens": case.tokens[None], "lengths": lengths})
            logits, radius = outputs["logits"], outputs.get(RADIUS)
        else:
            state = {tensor.name: np.zeros((1, *tensor.shape), np.float32) for tensor in self._state}
            for start in range(0, len(case.tokens), PIECE_TOKENS):
                if start:
                    yield None
                piece = case.tokens[None, start : start + PIECE_TOKENS]
                outputs = self._runner.run("advance", {"tokens": piece, "lengths": np.array([piece.size]), **state})
                state = {name: outputs[NEXT + name] for name in state}
            logits, radius = self._runner.run("head", {HIDDEN: outputs[HIDDEN]})["logits"], None
        if not (np.isfinite(logits).all() and np.isfinite(outputs[HIDDEN]).all()):
            raise FloatingPointError("the model's output is not finite")
        found = None if radius is None or not np.isfinite(radius[0]) else float(radius[0])
        result = RunResult.of(logits[0], outputs[HIDDEN][0], found)
        other = self._answer_builder.part(case.plan, result, NO_TIME, case.history, recurrent=not case.recurrent)
        pair = (case.live, other) if case.recurrent else (other, case.live)
        yield self._answer_builder.apart(case.plan, *pair)

    def _piece(self, work: Iterator[Agreement | None]) -> tuple[Agreement | None, float]:
        """Runs the next piece on the shadow's thread. Returns its result and its processor time in seconds."""
        begun_s = time.thread_time() + self._runner.cpu_s
        found = next(work)
        return found, time.thread_time() + self._runner.cpu_s - begun_s
