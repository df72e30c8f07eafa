"""The log-probability of every token of a text, given those before it.

In order, or in chunks side by side (`service/chunked/chunked.py`); which joints these may have follows from what was
asked for:

- a tolerance is a promise about `error_bound`. Where nothing is proved of the model there is no bound, so nothing but
  an exact run meets one;
- without a tolerance every joint is at most RESIDUAL, and `error_bound` says what is proved of that, if anything is.

In a truncated sequence every answer has a bound of its own: that of the number of tokens before it, plus what the
joints may add. A tolerance is for the joints only.

The bound of a run with joints is the smaller of two, both with the rounding of two float32 runs added: the
certificate's curve, at the tokens that chunks were warmed up over and one more, which the first answer knows; and what
the joints that were measured can come to (`models/certificate/propagation.py`). It is the worst over all positions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.propagation import MAX_TOKENS, Propagation
from wane.models.certificate.total_variation import total_variation
from wane.models.manifest import Manifest
from wane.service.aio.deadline import until
from wane.service.batching.cost_model import CostModel
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import EXACT, IN_ORDER, ChunkedRunner, ChunkPlan, Demand, Piece
from wane.service.engine import bounds
from wane.service.engine.backlog import Share
from wane.service.engine.forward import sequence
from wane.service.state.pool import ZERO, StatePool
from wane.service.types import (
    Identity,
    ScoredTokens,
    ScoreMethod,
    ScoreProgress,
    ScoreRequest,
    ScoreSummary,
    StateSource,
)

RESIDUAL = 1e-5
"""The greatest difference of a unit of the state at a joint, where no tolerance was asked for."""

FED_AT_ONCE = 16_384
"""Tokens that are made an array in one turn of the event loop."""

LARGEST_EXPONENT = 700.0  # exp of more is no float64

Item = ScoreProgress | ScoredTokens | ScoreSummary


class Scorer:
    """Scores by one model."""

    def __init__(
        self,
        manifest: Manifest,
        parallel: ChunkedRunner,
        pool: StatePool,
        cost_model: CostModel,
        executor: Executor,
    ) -> None:
        """`executor`: for arithmetic that would hold up the event loop."""
        self.propagation: Propagation | None = None
        self._certificate = manifest.certificate
        self._state = manifest.state
        self._least: float | None = None  # what joints of nothing but rounding can come to
        self.parallel = parallel
        self._pool = pool
        self._cost_model = cost_model
        self._eos_id = manifest.vocabulary.eos_id
        self._executor = executor

    @cached_property
    def _cut_off(self) -> tuple[float | None, ...]:
        """The bounds of answers that know the last 1, 2, ... tokens of more; the last one holds beyond, too."""
        certificate = self._certificate
        ends = range(1, max(len(certificate.error_bound), 1) + 1)
        found = [bounds.bound(certificate, known, known + 1) for known in ends]
        return tuple(None if one is None else one.variation for one in found)

    def seconds(self, request: ScoreRequest) -> float:
        """What the runs of a score are expected to take."""
        tokens = len(request.tokens)
        if request.method is ScoreMethod.PARALLEL:
            demand = Demand(RESIDUAL) if request.tolerance is None else EXACT
            parallel_cost = self.parallel.seconds(tokens, "scan", demand)
            if parallel_cost is not None:
                return parallel_cost
        return tokens / IN_ORDER["scan"] * self._cost_model.run("scan", IN_ORDER["scan"])

    async def score(
        self, request: ScoreRequest, identity: Identity, ticket: Ticket, share: Share
    ) -> AsyncGenerator[Item, None]:
        """What becomes known, as it does: the log-probabilities in order, then the score of all. To be closed. The
        `share` of the backlog is told how far it is."""
        await asyncio.sleep(0)  # to look through a long text took a turn of the event loop
        input_ids = await self._input_ids(request)
        demand = None
        if request.method is ScoreMethod.PARALLEL:
            with until(request.deadline):
                demand = await self._demand(request.tolerance)
        unpredicted = (None,) if request.truncated else ()  # without a start token nothing predicts the first token
        settled, total, plan = 0, 0.0, ChunkPlan()
        worst: list[float | None] = []
        with self._pool.lease() as slot:
            pieces = self.parallel.run("scan", input_ids[:-1], input_ids[1:], ticket, demand, read=ZERO, write=slot)
            try:
                while (piece := await self._next(pieces, request.deadline)) is not None:
                    plan = piece.plan
                    share.progress(piece.done / len(request.tokens))
                    if piece.logprobs is not None:
                        before = () if settled else unpredicted
                        logprobs = (*before, *piece.logprobs.tolist())
                        error_bounds: tuple[float | None, ...] | None = None
                        if request.truncated:
                            known = range(settled + len(before), settled + len(logprobs))
                            with until(request.deadline):
                                found = self._cut_off_at(known, await self._bound(plan))
                            worst.append(bounds.largest(found))
                            error_bounds = (*before, *found)
                        end = settled + len(logprobs)
                        yield ScoredTokens(settled, request.tokens[settled:end], logprobs, error_bounds)
                        settled = end
                        total += float(piece.logprobs.sum())
                    yield ScoreProgress(piece.done + len(unpredicted), len(request.tokens))
            finally:
                await pieces.aclose()
        share.progress(1)
        if not settled:  # one token, which nothing predicts: there was nothing to run
            yield ScoredTokens(0, request.tokens, unpredicted, unpredicted)
            yield ScoreProgress(1, 1)
            settled, worst = 1, [None]
        with until(request.deadline):
            bound = bounds.largest(worst) if request.truncated else await self._bound(plan)
        predicted = settled - len(unpredicted)
        yield ScoreSummary(
            *identity,
            perplexity=math.exp(min(-total / predicted, LARGEST_EXPONENT)) if predicted else None,
            chunks=plan.chunks,
            warm_up=plan.warm_up,
            rounds=plan.rounds,
            max_residual=plan.residual,
            state=StateSource.FULL,
            error_bound=bound,
            latency=ticket.latency(),
        )

    async def _input_ids(self, request: ScoreRequest) -> NDArray[np.int64]:
        """The sequence that the model is fed, as `forward.sequence` makes it, in several turns of the event loop."""
        parts = [sequence(self._eos_id, request.tokens[:FED_AT_ONCE], truncated=request.truncated)]
        for start in range(FED_AT_ONCE, len(request.tokens), FED_AT_ONCE):
            await asyncio.sleep(0)
            parts.append(np.array(request.tokens[start : start + FED_AT_ONCE], np.int64))
        return np.concatenate(parts)

    def _cut_off_at(self, known: range, joints: float | None) -> list[float | None]:
        """The bounds of answers from the last n tokens of a truncated sequence, for each n in `known`; `joints` is the
        most that the joints of the run may add to any."""
        found = [self._cut_off[min(tokens, len(self._cut_off)) - 1] for tokens in known]
        return [None if one is None or joints is None else min(one + joints, 1.0) for one in found]

    async def _next(self, pieces: AsyncGenerator[Piece, None], deadline: float | None) -> Piece | None:
        with until(deadline):
            return await anext(pieces, None)

    async def _demand(self, tolerance: float | None) -> Demand:
        """The joints that are within a tolerance."""
        if tolerance is None:
            return Demand(RESIDUAL)
        if tolerance == 0 or not self._bounded:
            return EXACT
        enough = self._certificate.smallest_window(tolerance)
        if self._least is None:
            nothing = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in self._state}
            self._least = await self._moved(ChunkPlan(joints=nothing))
        if self._least > tolerance:  # whatever the joints are: as good as none will do, or what the curve knows of
            return Demand(0.0, None, enough)

        async def judge(plan: ChunkPlan) -> bool:
            bound = await self._bound(plan)
            return bound is not None and bound <= tolerance

        return Demand(RESIDUAL, judge, enough)

    async def _bound(self, plan: ChunkPlan) -> float | None:
        """How far any answer of the run can be from the run in order, in total variation."""
        if not plan.residual:
            found = bounds.bound(self._certificate, 0, 0)  # no token is left out
            return None if found is None else found.variation
        if not self._bounded or plan.warm_up is None:
            return None
        curve, moved = self._certificate.error_bound_at(plan.warm_up + 1), await self._moved(plan)
        return moved if curve is None else min(moved, curve)

    @property
    def _bounded(self) -> bool:
        """Whether anything is proved."""
        certificate = self._certificate
        return certificate.rounding is not None and bool(certificate.error_bound or self.propagation)

    async def _moved(self, plan: ChunkPlan) -> float:
        """What the joints that were measured can come to; 1 where nothing is known of that."""
        rounding = self._certificate.rounding
        if self.propagation is None or rounding is None:
            return 1.0
        tokens = MAX_TOKENS if plan.apart is None else plan.apart
        loop = asyncio.get_running_loop()
        apart = await loop.run_in_executor(self._executor, self.propagation.apart, plan.joints, tokens)
        if apart is None:
            return 1.0
        return float(total_variation(self._certificate.head_diameter, np.array(apart + rounding.between_runs)))
