"""Requests that bring everything along: choose the way, run, answer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Manifest
from wane.models.vocabulary import Vocabulary
from wane.service.batching.cost_model import CostModel
from wane.service.batching.ticket import Ticket
from wane.service.engine import routing
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.backlog import Share
from wane.service.engine.bounds import Bound, meets
from wane.service.engine.forward import Forward, sequence
from wane.service.engine.generate import Generation, RecurrentSource, Source, WindowSource
from wane.service.engine.limits import Limits
from wane.service.state.pool import StatePool
from wane.service.types import Answer, GenerateRequest, Mode, PredictRequest


@dataclass(frozen=True, slots=True)
class _Run:
    """A course, what it was fed, and the parts that it had."""

    course: AnswerPlan
    input_ids: NDArray[np.int64]
    recurrent: ModeResult | None
    window: ModeResult | None

    @property
    def bound(self) -> Bound | None:
        """The bound of its answer."""
        part = self.recurrent or self.window
        return None if part is None else part.bound


class Predictor:
    """Answers and generations from the zero state."""

    def __init__(
        self,
        manifest: Manifest,
        vocabulary: Vocabulary,
        limits: Limits,
        pool: StatePool,
        forward: Forward,
        answer_builder: AnswerBuilder,
        cost_model: CostModel,
        *,
        has_radius_output: bool,
    ) -> None:
        """`has_radius_output`: runs of windows compute a bound for their own tokens."""
        self._manifest = manifest
        self._vocabulary = vocabulary
        self._limits = limits
        self._pool = pool
        self._forward = forward
        self._answer_builder = answer_builder
        self._cost_model = cost_model
        self._has_radius_output = has_radius_output

    def seconds(self, request: PredictRequest) -> float:
        """What the runs of a prediction are expected to take."""
        if request.mode is Mode.WINDOW:
            return self._cost_model.window(request.window or self._limits.window)
        if request.mode is Mode.AUTO:
            ways = self._ways(request)
            if None not in ways:
                return sum(self._cost_model.window(k) for k in ways if k is not None)
        return self._cost_model.full(1 + len(request.tokens))

    def generation_seconds(self, request: GenerateRequest) -> float:
        """What the runs of a generation are expected to take, if nothing stops it early."""
        if request.mode is Mode.WINDOW:
            return request.max_tokens * self._cost_model.window(request.window or self._limits.window)
        return self._cost_model.full(1 + len(request.tokens)) + request.max_tokens * self._cost_model.run("step", 1)

    async def predict(self, request: PredictRequest, ticket: Ticket) -> Answer:
        """What follows the tokens."""
        input_ids = sequence(self._vocabulary.eos_id, request.tokens, truncated=request.truncated)
        if request.mode is not Mode.AUTO:
            k = None if request.mode is Mode.RECURRENT else request.window or self._limits.window
            return await self._answer(await self._run(request, request.mode, k, input_ids, ticket), request, ticket)
        for k in self._ways(request):
            run = await self._run(request, Mode.RECURRENT if k is None else Mode.WINDOW, k, input_ids, ticket)
            if request.tolerance is not None and meets(run.bound, request.tolerance):
                break
        return await self._answer(run, request, ticket)

    def _ways(self, request: PredictRequest) -> tuple[int | None, ...]:
        """The k that `auto` answers with, one after the other until one will do; None is all tokens."""
        position = len(request.tokens)
        return routing.ways(
            self._manifest.certificate,
            position,
            window=request.window,
            own=self._limits.window,
            largest=self._limits.max_window,
            tolerance=request.tolerance,
            has_radius_output=self._has_radius_output,
            cost=lambda k: self._cost_model.full(1 + position) if k is None else self._cost_model.window(k),
        )

    async def _run(
        self, request: PredictRequest, mode: Mode, k: int | None, input_ids: NDArray[np.int64], ticket: Ticket
    ) -> _Run:
        """One way of answering."""
        course = AnswerPlan.of_prompt(mode, len(request.tokens), k, truncated=request.truncated)
        recurrent: ModeResult | None = None
        if mode is not Mode.WINDOW:
            outcome = await self._forward.full(input_ids, ticket)
            recurrent = self._answer_builder.part(course, outcome, ticket.latency(), recurrent=True)
        return _Run(course, input_ids, recurrent, await self._answer_builder.window(course, input_ids, ticket))

    async def _answer(self, run: _Run, request: PredictRequest, ticket: Ticket) -> Answer:
        return await self._answer_builder.answer(
            run.course, run.input_ids, run.recurrent, run.window, request.top_k, ticket
        )

    async def generate(self, request: GenerateRequest, ticket: Ticket, share: Share, held: ExitStack) -> Generation:
        """Runs the prompt. What the generation needs while it lasts is taken over from `held`; its `share` of the
        backlog is told how far it is.

        `auto` is recurrent: once the prompt has been run its state is there, and nothing is cheaper than one step
        for a token.
        """
        input_ids = sequence(self._vocabulary.eos_id, request.tokens, truncated=request.truncated)
        source: Source
        if request.mode is Mode.WINDOW:
            position = len(request.tokens) + request.truncated
            source = WindowSource(self._forward, input_ids, position, request.window or self._limits.window, ticket)
        else:
            slot = held.enter_context(self._pool.lease())
            source = RecurrentSource(self._forward, input_ids, slot, ticket)
        prompted = await source.prompt()
        end = held.pop_all().close
        return Generation(request, self._manifest, self._vocabulary, ticket, source, prompted, share, end)
