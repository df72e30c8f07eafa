"""Repeats a sample of live answers in the other mode, to measure the agreement of both modes on live traffic.

A sampled answer is copied together with its tokens, so that later steps of the session do not change the copy. The run
in the other mode is called a *shadow*. It takes place on a thread of its own, one piece of the tokens at a time. A
piece starts only while the live runner is idle. Live work never queues behind a shadow, and competes with at most one
piece for a processor. Samples are dropped and counted if there is no idle time to run them. Neither a client nor the
shutdown waits for a shadow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import StateTensor
from wane.service.batching.batcher import Batcher
from wane.service.engine.agreement import Source
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.forward import RunResult, tail
from wane.service.runners.runner import HIDDEN, NEXT, NORMS, RADIUS, Runner
from wane.service.types.answer import Agreement
from wane.service.types.common import Mode
from wane.service.types.request import Latency

logger = logging.getLogger("wane.engine")

MOST_CASES = 64
MOST_TOKENS = 1 << 18
"""The largest number of queued answers, and the largest total number of the queued answers' tokens (about two
megabytes). Further samples are dropped."""

PIECE_TOKENS = 64
"""The number of tokens that run between two checks for live work."""

PAUSE_S = 0.001
"""Pause in seconds between the end of a batch and the start of a shadow. In this time the batch's answers are sent."""

NO_TOKENS = np.empty(0, np.int64)
NO_TIME = Latency(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A sampled live answer. `tokens`, int64 (n), are the tokens that the other mode runs from the zero state.

    `plan` is the plan of an answer in mode both. `live` is the result of the live answer's run, and `recurrent` says
    whether that run was in mode recurrent. `history`: int64, the tokens in the model's cache for this sequence.
    """

    plan: AnswerPlan
    tokens: NDArray[np.int64]
    history: NDArray[np.int64]
    live: ModeResult
    recurrent: bool


class Shadow:
    """Samples one model's live answers, repeats them as shadows, and compares each live answer with its shadow's
    answer. All methods must be called on the event loop's thread."""

    def __init__(
        self,
        rate: float,
        runner: Runner,
        state: Sequence[StateTensor],
        batcher: Batcher,
        answer_builder: AnswerBuilder,
        *,
        window: int,
        random: Random,
    ) -> None:
        """`rate` is the probability, from 0 to 1, that `random` samples an answer. `runner` runs the shadows on the
        CPU, beside the live runs. `window` is the model's default k."""
        self._rate = rate
        self._runner = runner
        self._state = state
        self._batcher = batcher
        self._answer_builder = answer_builder
        self._report = answer_builder.stats
        self._window = window
        self._random = random
        self._cases: deque[Case] = deque()
        self._working: asyncio.Task[None] | None = None
        self._running: asyncio.Future[tuple[Agreement | None, float]] | None = None
        self._is_idle = asyncio.Event()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow")
        batcher.on_idle = self._is_idle.set

    def chosen(self) -> bool:
        """Returns whether the next answer is sampled."""
        return not self._closed and self._random.random() < self._rate

    def offer(self, plan: AnswerPlan, input_ids: NDArray[np.int64], live: ModeResult) -> None:
        """Queues a copy of a sampled answer, or drops it if the queue is full."""
        case = self._case(plan, input_ids, live)
        tokens = sum(len(queued.tokens) for queued in (*self._cases, case))
        if len(self._cases) == MOST_CASES or tokens > MOST_TOKENS:
            self._report.shadowed("dropped")
            return
        self._cases.append(case)
        if self._working is None:
            self._working = asyncio.create_task(self._work())

    def close(self) -> None:
        """Drops the queued answers, and does not wait for the running piece."""
        if self._closed:
            return
        self._closed = True
        self._batcher.on_idle = None
        for _ in self._cases:
            self._report.shadowed("dropped")
        self._cases.clear()
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False)

    def _case(self, plan: AnswerPlan, input_ids: NDArray[np.int64], live: ModeResult) -> Case:
        """Copies a sampled answer into a `Case`. Without the copy, the answer's row, which is a view, would keep the
        whole batch in memory."""
        live_result = live.result
        result = RunResult.of(
            live_result.network_logits.copy(), live_result.hidden.copy(), live_result.row.radius, live_result.row.norms
        )
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

    async def _work(self) -> None:
        """Compares the queued answers, one after another."""
        try:
            while self._cases:
                case = self._cases.popleft()
                try:
                    agreement = await self._compare(case)
                except asyncio.CancelledError:
                    self._report.shadowed("dropped")
                    raise
                except Exception as error:
                    self._report.shadowed("failed")
                    logger.error("the repetition of a sampled answer in the other mode failed", exc_info=error)
                else:
                    self._report.shadowed("compared")
                    self._report.compared(agreement, Source.SHADOW)
        finally:
            self._working = None

    async def _compare(self, case: Case) -> Agreement:
        """Runs the pieces of a shadow, each when the runner is idle. Returns the agreement of the two answers."""
        work, agreement = self._answer(case), None
        while agreement is None:
            await asyncio.sleep(PAUSE_S)
            while not self._batcher.idle:
                self._is_idle.clear()
                await self._is_idle.wait()
                await asyncio.sleep(PAUSE_S)
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, _piece, work)
            agreement, cpu_s = await self._running
            self._report.shadow_took(cpu_s)
        return agreement

    def _answer(self, case: Case) -> Iterator[Agreement | None]:
        """Runs the tokens of a sampled answer in the other mode, piece by piece. Yields None after each piece except
        the last. After the last piece, yields the agreement of the two answers."""
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
        norms = outputs[NORMS][0].tolist() if NORMS in outputs else None
        result = RunResult.of(logits[0], outputs[HIDDEN][0], found, norms)
        other = self._answer_builder.part(case.plan, result, NO_TIME, case.history, recurrent=not case.recurrent)
        pair = (case.live, other) if case.recurrent else (other, case.live)
        yield self._answer_builder.apart(case.plan, *pair)


def _piece(work: Iterator[Agreement | None]) -> tuple[Agreement | None, float]:
    """Runs the next piece on the shadow's thread. Returns the piece's result, and the piece's processor time in
    seconds."""
    begun_s = time.thread_time()
    found = next(work)
    return found, time.thread_time() - begun_s
