"""Answers requests without a session: chooses the mode, runs the tokens and builds the answer."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.ticket import Ticket
from wane.service.engine import routing
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.bounds import meets
from wane.service.engine.forward import PIECE_TOKENS, RunResult, sequence
from wane.service.engine.generate import NOTHING_TO_CONTINUE, Prompt, RecurrentSource, Source, WindowSource
from wane.service.engine.limits import Limits
from wane.service.errors import InvalidRequest
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import GenerateRequest, PredictRequest

WORK_OF_A_TOKEN = 4
"""Beginning the run of a long input takes about as long for each of its tokens as reading the logits of 4 tokens."""


class Predictor:
    """Answers predictions and generations without a session. Every prompt runs from the zero state, or from the state
    of its beginning that an earlier request of the same owner has left."""

    def __init__(self, limits: Limits, answer_builder: AnswerBuilder) -> None:
        self._manifest = answer_builder.manifest
        self._limits = limits
        self._forward = answer_builder.forward
        self._answer_builder = answer_builder
        self._cost_model = self._forward.cost_model

    def seconds(self, request: PredictRequest) -> float:
        """Returns the expected seconds of a prediction's runs."""
        if not self._runs(request):
            return 0.0
        if request.mode is Mode.WINDOW:
            return self._cost_model.window(request.window or self._limits.window)
        if request.mode is Mode.AUTO:
            ways = self._ways(request)
            if None not in ways:
                return sum(self._cost_model.window(k) for k in ways if k is not None)
        return self._cost_model.full(1 + len(request.tokens))

    def generation_seconds(self, request: GenerateRequest) -> float:
        """Returns the expected seconds of a generation's runs, for `max_tokens` tokens."""
        if request.mode is Mode.WINDOW:
            return request.max_tokens * self._cost_model.window(request.window or self._limits.window)
        return self._cost_model.full(1 + len(request.tokens)) + request.max_tokens * self._cost_model.run("step", 1)

    async def predict(self, request: PredictRequest, ticket: Ticket) -> Answer:
        """Predicts the token after the request's tokens."""
        named = len(request.filter.exclude) + len(request.filter.candidates or ())
        await self._answer_builder.turns.take(named + WORK_OF_A_TOKEN * len(request.tokens))
        ranking = self._answer_builder.rankings.of(request.filter, request.tokens)
        if not self._runs(request):
            empty_mode = Mode.RECURRENT if request.mode is Mode.AUTO else request.mode
            k = None if empty_mode is Mode.RECURRENT else request.window or self._limits.window
            return self._answer_builder.nothing(
                AnswerPlan(empty_mode, 0, k, StateSource.FULL, 0, ranking), request, ticket
            )
        if request.mode is Mode.AUTO:
            ways = self._ways(request)
        else:
            ways = (None if request.mode is Mode.RECURRENT else request.window or self._limits.window,)
        input_ids, tokens = self._sequence(request), len(request.tokens)
        # The position of a truncated sequence is unknown. It is set to one more than the number of its tokens, so that
        # no window counts as the whole sequence.
        position = tokens + request.truncated
        for k in ways:
            mode, proving = request.mode, request.prove
            if mode is Mode.AUTO:
                mode = Mode.RECURRENT if k is None else Mode.WINDOW
            if request.truncated and k is not None:
                k = min(k, tokens)
            plan = AnswerPlan(mode, position, k, StateSource.FULL, tokens, ranking, request.cache)
            recurrent: ModeResult | None = None
            window: ModeResult | None = None
            if mode is not Mode.WINDOW:
                recurrent = await self._recurrent(request, plan, input_ids, ticket)
            if plan.window is not None:
                window = await self._answer_builder.window(plan, input_ids, ticket, prove=request.prove)
            if request.tolerance is None:
                break
            if window is not None and mode is Mode.WINDOW and not (proving or meets(window.bound, request.tolerance)):
                window, proving = await self._answer_builder.search(plan, window, ticket), True
            answered = recurrent or window
            if answered is not None and meets(answered.bound, request.tolerance):
                break
        await self._answer_builder.take_turn(plan, request, recurrent or window)
        return self._answer_builder.answer(plan, input_ids, recurrent, window, request, ticket, searched=proving)

    async def _recurrent(
        self, request: PredictRequest, plan: AnswerPlan, input_ids: NDArray[np.int64], ticket: Ticket
    ) -> ModeResult:
        owner = self._owner(request, input_ids, traced=request.prove)
        result, cached = await self._forward.prompt(input_ids, owner, ticket)
        part = await self._answer_builder.made(plan, result, input_ids, ticket, prove=request.prove)
        return part._replace(cached=max(cached - (len(input_ids) - len(request.tokens)), 0))

    @staticmethod
    def _owner(
        request: PredictRequest | GenerateRequest, input_ids: NDArray[np.int64], *, traced: bool = False
    ) -> str | None:
        """Returns the owner whose kept states the request uses. None: none, because one run of all tokens outputs what
        no run from a state does: the radius of a truncated sequence, and the trace for a proof."""
        return None if (request.truncated or traced) and len(input_ids) <= PIECE_TOKENS else request.owner

    def _sequence(self, request: PredictRequest | GenerateRequest) -> NDArray[np.int64]:
        return sequence(self._manifest.start_tokens, request.tokens, truncated=request.truncated)

    def _runs(self, request: PredictRequest | GenerateRequest) -> bool:
        """Returns whether the model's input has a token: a token of the request, or a start token."""
        return bool(request.tokens or self._manifest.start_tokens)

    def _ways(self, request: PredictRequest) -> tuple[int | None, ...]:
        """Returns the windows that `auto` tries in turn until an answer meets the tolerance. None stands for all
        tokens."""
        position = len(request.tokens)
        return routing.ways(
            self._manifest.certificate,
            position,
            window=request.window,
            own=self._limits.window,
            largest=self._limits.max_window,
            tolerance=request.tolerance,
            has_radius_output=self._forward.has_radius_output,
            cost=lambda k: self._cost_model.full(1 + position) if k is None else self._cost_model.window(k),
        )

    async def begin(self, request: GenerateRequest, ticket: Ticket, held: ExitStack) -> tuple[Source, RunResult]:
        """Runs the prompt of a generation. Returns the source of the generation's distributions and the first result.
        Closing `held` releases the slot of the generation's state.

        `auto` means recurrent here. The prompt's run leaves a state, from which each further token costs only one step.
        """
        if not self._runs(request):
            raise InvalidRequest(NOTHING_TO_CONTINUE, "events")
        input_ids = self._sequence(request)
        start = Prompt(request.tokens, len(request.tokens) + request.truncated, len(request.tokens))
        if request.mode is Mode.WINDOW:
            k = request.window or self._limits.window
            return await WindowSource(self._forward, input_ids, start, k, ticket).begin()
        slot = held.enter_context(self._forward.pool.lease())
        owner = self._owner(request, input_ids)
        source = RecurrentSource(self._forward, input_ids, start, slot, ticket, owner=owner)
        held.callback(source.keep)
        return await source.begin()
