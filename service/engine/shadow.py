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
"""Pause in seconds before each check whether the runner is idle. In this time the answers of a batch are sent."""

NO_TOKENS = np.empty(0, np.int64)
NO_TIME = Latency(0.0, 0.0, 0.0)


Work = Iterator[Agreement | None]
"""The run of a sampled answer's tokens in the other mode, piece by piece: None after each piece except the last, and
then the agreement of the two answers."""


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
        self._queue: deque[tuple[int, Work]] = deque()  # with the number of each answer's tokens
        self._working: asyncio.Task[None] | None = None
        self._running: asyncio.Future[tuple[Agreement | None, float]] | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow")

    def chosen(self) -> bool:
        """Returns whether the next answer is sampled."""
        return not self._closed and self._random.random() < self._rate

    def offer(self, plan: AnswerPlan, input_ids: NDArray[np.int64], live: ModeResult) -> None:
        """Queues a copy of a sampled answer, or drops it if the queue is full. Without the copy, the answer's row,
        which is a view, would keep the whole batch in memory."""
        position, recurrent = plan.position, plan.mode is Mode.RECURRENT
        if recurrent:  # the tokens that the other mode runs from the zero state
            k = self._window if len(input_ids) > position else min(self._window, len(input_ids))
            tokens, plan = tail(input_ids, position, k).copy(), plan._replace(mode=Mode.BOTH, window=k)
        else:
            tokens, plan = input_ids, plan._replace(mode=Mode.BOTH, context_length=min(position, len(input_ids)))
        if len(self._queue) == MOST_CASES or sum([count for count, _ in self._queue]) + len(tokens) > MOST_TOKENS:
            self._report.shadowed("dropped")
            return
        row = live.result.row
        result = RunResult.of(live.result.network_logits.copy(), live.result.hidden.copy(), row.radius, row.norms)
        cache, history = self._answer_builder.cache, NO_TOKENS
        if cache is not None and live.result.mixed is not None:
            history = input_ids[max(len(input_ids) - cache.length, len(input_ids) > position) :].copy()
            result = result.mix(cache, history, position)
        copied = ModeResult(result, live.bound, live.latency)
        self._queue.append((len(tokens), self._answer(plan, tokens, history, copied, recurrent=recurrent)))
        if self._working is None:
            self._working = asyncio.create_task(self._work())

    def close(self) -> None:
        """Drops the queued answers, and does not wait for the running piece."""
        if self._closed:
            return
        self._closed = True
        for _ in self._queue:
            self._report.shadowed("dropped")
        self._queue.clear()
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        """Compares the queued answers, one after another."""
        try:
            while self._queue:
                _, work = self._queue.popleft()
                try:
                    agreement = await self._compare(work)
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

    async def _compare(self, work: Work) -> Agreement:
        """Runs the pieces of a shadow, each when the runner is idle. Returns the agreement of the two answers."""
        agreement = None
        while agreement is None:
            await asyncio.sleep(PAUSE_S)
            while not self._batcher.idle:  # noqa: ASYNC110  (an Event would add work to every batch)
                await asyncio.sleep(PAUSE_S)
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, _piece, work)
            agreement, cpu_s = await self._running
            self._report.shadow_took(cpu_s)
        return agreement

    def _answer(
        self, plan: AnswerPlan, tokens: NDArray[np.int64], history: NDArray[np.int64], live: ModeResult, recurrent: bool
    ) -> Work:
        """Runs `tokens` in the other mode than that of the answer `live`, which was recurrent or not. `plan` is the
        plan of an answer in mode both. `history` are the tokens in the model's cache for this sequence."""
        if recurrent:
            lengths = np.array([len(tokens)])
            outputs = self._runner.run("window", {"tokens": tokens[None], "lengths": lengths})
            logits, radius = outputs["logits"], outputs.get(RADIUS)
        else:
            state = {tensor.name: np.zeros((1, *tensor.shape), np.float32) for tensor in self._state}
            for start in range(0, len(tokens), PIECE_TOKENS):
                if start:
                    yield None
                piece = tokens[None, start : start + PIECE_TOKENS]
                outputs = self._runner.run("advance", {"tokens": piece, "lengths": np.array([piece.size]), **state})
                state = {name: outputs[NEXT + name] for name in state}
            logits, radius = self._runner.run("head", {HIDDEN: outputs[HIDDEN]})["logits"], None
        if not (np.isfinite(logits).all() and np.isfinite(outputs[HIDDEN]).all()):
            raise FloatingPointError("the model's output is not finite")
        finite_radius = None if radius is None or not np.isfinite(radius[0]) else float(radius[0])
        norms = outputs[NORMS][0].tolist() if NORMS in outputs else None
        result = RunResult.of(logits[0], outputs[HIDDEN][0], finite_radius, norms)
        other = self._answer_builder.part(plan, result, NO_TIME, history, recurrent=not recurrent)
        pair = (live, other) if recurrent else (other, live)
        yield self._answer_builder.apart(plan, *pair)


def _piece(work: Work) -> tuple[Agreement | None, float]:
    """Runs the next piece on the shadow's thread. Returns the piece's result, and the piece's processor time in
    seconds."""
    begun_s = time.thread_time()
    agreement = next(work)
    return agreement, time.thread_time() - begun_s
