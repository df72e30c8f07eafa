"""The return leg of steps from resident states, which need no proof that takes long: a batch of them at a time."""

from __future__ import annotations

import time

from wane.models.manifest import Manifest
from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import Row
from wane.service.batching.ticket import Ticket
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.bounds import Bound, bound
from wane.service.engine.forward import run_result
from wane.service.engine.logits import listed, predictions
from wane.service.engine.stats import Stats
from wane.service.engine.top1_proof import MarginProof
from wane.service.sessions.stores.store import SessionRecord
from wane.service.types import Answer, Latency, Mode, Prediction, StateSource, StepRequest


class StepAnswers:
    """Makes answers of rows, as `AnswerBuilder` does of parts; beside it, under `Quick`."""

    def __init__(
        self,
        manifest: Manifest,
        vocabulary: Vocabulary,
        margin: MarginProof,
        answer_builder: AnswerBuilder,
        report: Stats,
    ) -> None:
        self.certificate = manifest.certificate
        self.vocabulary = vocabulary
        self.margin = margin
        self.answer_builder = answer_builder
        self.report = report
        self.exact = bound(manifest.certificate, 0, 0)

    def of_batch(self) -> StepBatch:
        """For the steps of one batch, whose rows are there now."""
        return StepBatch(self)


class StepBatch:
    """The answers to one batch of steps."""

    def __init__(self, of: StepAnswers) -> None:
        self._of = of
        self._ended_s = time.perf_counter()
        self._answers: list[Answer] = []

    def of_step(
        self, request: StepRequest, record: SessionRecord, dropped_tokens: int, row: Row, ticket: Ticket
    ) -> Answer:
        """The answer to a step that was committed, to the session in `record`, from a state that knows all but
        `dropped_tokens` tokens."""
        of = self._of
        position = record.position
        claimed = of.exact if not dropped_tokens else bound(of.certificate, position - dropped_tokens, position)
        latency = Latency(
            1e3 * ticket.queue_s, 1e3 * ticket.compute_s, 1e3 * (self._ended_s - ticket.started_s), ticket.batch_items
        )
        sampler = of.answer_builder.sampler
        if sampler is not None and sampler.chosen():
            course = AnswerPlan(Mode.RECURRENT, position, None, StateSource.RESIDENT, position - dropped_tokens)
            sampler.offer(course, record.tail.ids(), ModeResult(run_result(row), claimed, latency))
        answer = Answer(
            Mode.RECURRENT,
            self._predictions(row, request.top_k),
            latency,
            StateSource.RESIDENT,
            None if claimed is None else claimed.variation,
            None,
            None,
            None,
            None if claimed is None else claimed.state,
            self._proved(row, claimed),
            record.session,
            position,
            False,
        )
        self._answers.append(answer)
        return answer

    def _predictions(self, row: Row, count: int) -> tuple[Prediction, ...]:
        found = row.largest(count)
        if found is not None:
            return listed(found, count, self._of.vocabulary)
        logits = row.logits
        assert logits is not None, "a step without an answer: this is a bug"
        return predictions(logits, count, self._of.vocabulary)

    def _proved(self, row: Row, claimed: Bound | None) -> bool:
        """Whether the margin proves the first token."""
        if claimed is None or claimed.runs is None:
            return False
        return self._of.margin.proves_of_row(row, claimed.runs)

    def count(self) -> None:
        """Counts them in the report."""
        self._of.report.stepped(self._answers)
