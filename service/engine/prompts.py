"""Requests that bring everything along: choose the way, run, answer."""

from __future__ import annotations

from contextlib import ExitStack

from models.manifest import Manifest
from models.vocabulary import Vocabulary
from service.engine import routing
from service.engine.answering import Answering, Course, Part
from service.engine.batcher import Ticket
from service.engine.forward import Forward, sequence
from service.engine.generation import Generation, RecurrentSource, Source, WindowSource
from service.engine.limits import Limits
from service.engine.slab import Slab
from service.engine.types import Answer, GenerateRequest, Mode, Origin, PredictRequest


class Prompts:
    """Answers and generations from the zero state."""

    def __init__(
        self,
        manifest: Manifest,
        vocabulary: Vocabulary,
        limits: Limits,
        slab: Slab,
        forward: Forward,
        answering: Answering,
    ) -> None:
        self._manifest = manifest
        self._vocabulary = vocabulary
        self._limits = limits
        self._slab = slab
        self._forward = forward
        self._answering = answering

    async def predict(self, request: PredictRequest, ticket: Ticket) -> Answer:
        """What follows the tokens."""
        fed = sequence(self._vocabulary.eos_id, request.tokens)
        position = len(request.tokens)
        mode = request.mode
        k: int | None = request.window or self._limits.window
        if mode is Mode.AUTO:
            k = routing.choose(
                self._manifest,
                position,
                window=request.window,
                own=self._limits.window,
                largest=self._limits.max_window,
                tolerance=request.tolerance,
            )
            mode = Mode.RECURRENT if k is None else Mode.WINDOW
        course = Course(mode, position, None if mode is Mode.RECURRENT else k, Origin.FULL, known=position)
        recurrent: Part | None = None
        if mode is not Mode.WINDOW:
            recurrent = Part(await self._forward.full(fed, ticket), ticket.latency())
        window = await self._answering.window(course, fed, ticket)
        return self._answering.answer(course, recurrent, window, request.top_k, ticket)

    async def generate(self, request: GenerateRequest, ticket: Ticket, held: ExitStack) -> Generation:
        """Runs the prompt. What the generation needs while it lasts is taken over from `held`.

        `auto` is recurrent: once the prompt has been run its state is there, and nothing is cheaper than one step
        for a token.
        """
        fed = sequence(self._vocabulary.eos_id, request.tokens)
        source: Source
        if request.mode is Mode.WINDOW:
            source = WindowSource(self._forward, fed, request.window or self._limits.window, ticket)
        else:
            slot = held.enter_context(self._slab.lease())
            source = RecurrentSource(self._forward, fed, slot, ticket)
        prompted = await source.prompt()
        end = held.pop_all().close
        return Generation(request, self._manifest, self._vocabulary, ticket, source, prompted, end)
