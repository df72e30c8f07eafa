"""The return leg: what was run for a question becomes an Answer, with its latencies, bounds and agreement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.manifest import Manifest
from models.vocabulary import Vocabulary
from service.engine import agreement, routing
from service.engine.batcher import Ticket
from service.engine.distribution import predictions
from service.engine.forward import Forward, Outcome, last
from service.engine.report import Report
from service.engine.types import Agreement, Answer, Latency, Mode, ModeAnswer, Origin


@dataclass(frozen=True, slots=True)
class Course:
    """How a question at `position` is answered.

    `mode` is recurrent, window or both; `window` is the k of the latter two. `origin` and `known` are about the
    recurrent part: where its state comes from, and how many of the latest tokens it knows.
    """

    mode: Mode
    position: int
    window: int | None
    origin: Origin
    known: int

    @property
    def state(self) -> Origin:
        """Where the state behind the answer comes from."""
        return Origin.WINDOW if self.mode is Mode.WINDOW else self.origin

    def error_bound(self, manifest: Manifest) -> float | None:
        """The bound of the answer."""
        return self.bound_of(manifest, self.mode is not Mode.WINDOW)

    def bound_of(self, manifest: Manifest, recurrent: bool) -> float | None:
        """The bound of the recurrent part, or of the window's."""
        known = self.known if recurrent else self.window
        assert known is not None, "a window's part without a k: this is a bug"
        return routing.error_bound(manifest, known, self.position)


@dataclass(frozen=True, slots=True)
class Part:
    """One mode's run and the time it took."""

    outcome: Outcome
    latency: Latency


class Answering:
    """Runs the window's part of a course, and makes answers of parts."""

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary, forward: Forward, report: Report) -> None:
        self._manifest = manifest
        self._vocabulary = vocabulary
        self._forward = forward
        self._report = report

    async def window(
        self, course: Course, fed: NDArray[np.int64], ticket: Ticket, *, binding: bool = False
    ) -> Part | None:
        """The window's part of a course, if it has one. `fed` ends at the course's position and holds k tokens.

        To be run after the recurrent part, not beside it: then neither waits for the other, and each latency is
        what its mode alone would have taken.
        """
        if course.window is None:
            return None
        mark = ticket.mark()
        seen = last(fed, course.position, course.window)
        outcome = await self._forward.window(seen, ticket, binding=binding)
        return Part(outcome, ticket.latency(since=mark))

    def answer(self, course: Course, recurrent: Part | None, window: Part | None, top_k: int, ticket: Ticket) -> Answer:
        """The answer of the parts that a course has, counted in the report. Of two, the recurrent one answers."""
        answering = recurrent or window
        assert answering is not None, "a course without a run: this is a bug"
        found = predictions(answering.outcome.logits, top_k, self._vocabulary)
        pair: Agreement | None = None
        modes: dict[Mode, ModeAnswer] | None = None
        if recurrent is not None and window is not None:
            pair = self._agreement(course, recurrent.outcome, window.outcome)
            of_window = predictions(window.outcome.logits, top_k, self._vocabulary)
            modes = {
                Mode.RECURRENT: ModeAnswer(found, recurrent.latency),
                Mode.WINDOW: ModeAnswer(of_window, window.latency),
            }
            for mode, part in modes.items():
                self._report.took(mode, part.latency)
        latency = ticket.latency()
        self._report.took(course.mode, latency)
        return Answer(
            mode=course.mode,
            predictions=found,
            latency=latency,
            state=course.state,
            error_bound=course.error_bound(self._manifest),
            window=course.window,
            modes=modes,
            agreement=pair,
        )

    def _agreement(self, course: Course, recurrent: Outcome, window: Outcome) -> Agreement:
        """How far the parts are apart: at most as far as both are from the uninterrupted model, together."""
        bounds = (course.bound_of(self._manifest, True), course.bound_of(self._manifest, False))
        together = None if None in bounds else min(sum(bound or 0.0 for bound in bounds), 1.0)
        pair = agreement.compare(recurrent.logits, window.logits, recurrent.hidden, window.hidden, together)
        self._report.compared(pair)
        return pair
