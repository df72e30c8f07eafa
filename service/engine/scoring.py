"""The log-probability of every token of a text, given those before it.

In order, or in chunks side by side (`service/engine/parallel.py`); which joints these may have follows from what was
asked for:

- a tolerance is a promise about `error_bound`. Where nothing is proved of the model there is no bound, so nothing but
  an exact run meets one;
- without a tolerance every joint is at most RESIDUAL, and `error_bound` says what is proved of that, if anything is.

The bound of a run with joints is the smaller of two, both with the rounding of float32 added as it was measured: the
certificate's curve, at the tokens that chunks were warmed up over and one more, which the first answer knows; and what
the joints that were measured can come to (`models/certificate/propagation.py`). It is the worst over all positions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from typing import Self

import numpy as np

from models.certificate.answer import total_variation
from models.certificate.propagation import PATIENCE, Propagation
from models.manifest import Certificate
from service.engine.batcher import Ticket
from service.engine.deadline import until
from service.engine.forward import sequence
from service.engine.parallel import EXACT, Course, Demand, Parallel, Piece
from service.engine.slab import ZERO, Slab
from service.engine.types import ScoredTokens, ScoreMethod, ScoreProgress, ScoreRequest, ScoreSummary

RESIDUAL = 1e-5
"""The greatest difference of a unit of the state at a joint, where no tolerance was asked for."""

LARGEST_EXPONENT = 700.0  # exp of more is no float64

Item = ScoreProgress | ScoredTokens | ScoreSummary


class Scorer:
    """Scores by one model."""

    def __init__(
        self,
        certificate: Certificate,
        parallel: Parallel,
        slab: Slab,
        eos_id: int,
        executor: Executor,
    ) -> None:
        """`executor`: for arithmetic that would hold up the event loop."""
        self.propagation: Propagation | None = None
        self._certificate = certificate
        self._parallel = parallel
        self._slab = slab
        self._eos_id = eos_id
        self._executor = executor

    async def score(self, request: ScoreRequest, ticket: Ticket) -> AsyncGenerator[Item, None]:
        """What becomes known, as it does: the log-probabilities in order, then the score of all. To be closed."""
        fed = sequence(self._eos_id, request.tokens)
        demand = None if request.method is ScoreMethod.SEQUENTIAL else self._demand(request.tolerance)
        settled, total, course = 0, 0.0, Course()
        with self._slab.lease() as slot:
            pieces = self._parallel.run("scan", fed[:-1], fed[1:], ticket, demand, read=ZERO, write=slot)
            try:
                while (piece := await self._next(pieces, request.deadline)) is not None:
                    course = piece.course
                    if piece.logprobs is not None:
                        yield ScoredTokens(settled, tuple(piece.logprobs.tolist()))
                        settled += len(piece.logprobs)
                        total += float(piece.logprobs.sum())
                    yield ScoreProgress(piece.done, len(request.tokens))
            finally:
                await pieces.aclose()
        async with until(request.deadline):
            bound = await self._bound(course)
        yield ScoreSummary(
            tokens=settled,
            perplexity=math.exp(min(-total / settled, LARGEST_EXPONENT)),
            chunks=course.chunks,
            warm_up=course.warm_up,
            rounds=course.rounds,
            max_residual=course.residual,
            error_bound=bound,
            latency=ticket.latency(),
        )

    async def _next(self, pieces: AsyncGenerator[Piece, None], deadline: float | None) -> Piece | None:
        async with until(deadline):
            return await anext(pieces, None)

    def _demand(self, tolerance: float | None) -> Demand:
        """The joints that are within a tolerance."""
        if tolerance is None:
            return Demand(RESIDUAL)
        bounded = self._certificate.rounding is not None and (self._certificate.error_bound or self.propagation)
        if tolerance == 0 or not bounded:
            return EXACT

        async def judge(course: Course) -> bool:
            bound = await self._bound(course)
            return bound is not None and bound <= tolerance

        return Demand(RESIDUAL, judge, self._certificate.smallest_window(tolerance))

    async def _bound(self, course: Course) -> float | None:
        """How far any answer of the run can be from the run in order, in total variation."""
        if not course.residual:
            return 0.0
        rounding = self._certificate.rounding
        if rounding is None or course.warm_up is None:
            return None
        bounds = []
        curve = self._certificate.error_bound_at(course.warm_up + 1)
        if curve is not None:
            bounds.append(curve)
        if self.propagation is not None:
            tokens = PATIENCE if course.apart is None else course.apart
            loop = asyncio.get_running_loop()
            apart = await loop.run_in_executor(self._executor, self.propagation.apart, course.joints, tokens)
            if apart is not None:
                moved = np.array(apart + rounding.measured)
                bounds.append(float(total_variation(self._certificate.head_diameter, moved)))
        return min(bounds, default=None)


class Scoring:
    """A score under way: an asynchronous iterator over what becomes known, a `ScoreSummary` last. To be closed
    (`contextlib.aclosing`) however it ends."""

    def __init__(self, items: AsyncGenerator[Item, None], end: Callable[[], None]) -> None:
        """`end` is called once, when the scoring is over or closed."""
        self._items = items
        self._end: Callable[[], None] | None = end
        self._first: Item | None = None

    async def begin(self) -> None:
        """Waits for the first item, so that a request which cannot be served fails before anything is said of it."""
        self._first = await self._next()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        first, self._first = self._first, None
        return await self._next() if first is None else first

    async def _next(self) -> Item:
        try:
            return await anext(self._items)
        except BaseException:
            self._over()
            raise

    async def aclose(self) -> None:
        """Ends the scoring, however far it came."""
        await self._items.aclose()
        self._over()

    def _over(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
