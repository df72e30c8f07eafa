"""Counts how often a session's next token was among the tokens that the answer before it listed (`WANE_LIVE_ACCURACY`).

Every token of a session is the label of the answer before it. The first K tokens of each answer to a step are kept
until the session's next step. That step's first token is then judged by its rank among them. A step's other tokens
follow no answer, and neither does a session's first token, so they are not counted. A step is unjudged if the answer
before it is not kept: another replica or version gave it, its client had gone, it was not the answer to a step, or the
session was rewound. A step whose events the model does not know, and skips, is missed: no answer lists them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Self

from wane.service.observability.metrics import Metrics
from wane.service.types.answer import Answer
from wane.service.types.common import Result, says

SPAN_S = 600
"""The length of the sliding window in seconds."""
SNAPSHOTS = 10
"""The number of equal parts of the sliding window."""
LIST_BYTES, TOKEN_BYTES = 285, 4
"""The memory of one kept answer, at most, and of each of its tokens, besides the session's id, which others keep."""


Step = tuple[str, int, int]
"""A session, its position before a step, and the step's first token, or SKIPPED if all its events were skipped."""

SKIPPED = -1


class LiveCounts(Result):
    """Counts of steps."""

    judged: Annotated[int, says("the steps whose first token was looked up in the list of the answer before it")]
    hits: Annotated[int, says("those whose token was in this list")]
    reciprocal_ranks: Annotated[float, says("the sum of 1 / rank over the hits")]
    recall: Annotated[float | None, says("`hits` / `judged`; null without a judged step")]
    mrr: Annotated[float | None, says("`reciprocal_ranks` / `judged`; null without a judged step")]
    unjudged: Annotated[int, says("the steps whose earlier answer is not kept")]

    @classmethod
    def of(cls, judged: int, hits: int, reciprocal_ranks: float, unjudged: int) -> Self:
        recall, mrr = (hits / judged, reciprocal_ranks / judged) if judged else (None, None)
        return cls(judged, hits, reciprocal_ranks, recall, mrr, unjudged)


class LiveReport(Result):
    """The live accuracy of one version of a model."""

    k: Annotated[int, says("the largest number of tokens of an answer that are compared")]
    since_start: Annotated[LiveCounts, says("the counts since the start")]
    recent: Annotated[LiveCounts, says("the counts of the last 10 to 11 minutes")]


class LiveAccuracy:
    """Keeps the first tokens of the answers to one model's steps, and the counts of their ranks. All methods must be
    called on the event loop's thread."""

    def __init__(self, k: int, most_sessions: int, metrics: Metrics, model: str, version: str) -> None:
        """k: the number of tokens that are kept of each answer. most_sessions: the largest number of sessions whose
        answers are kept; those of the longest idle sessions are dropped."""
        self.k = k
        self._most_sessions = most_sessions
        # For each session, the position of its latest answer and the answer's first tokens, longest idle session first.
        self._kept: dict[str, tuple[int, array[int]]] = {}
        # The number of judged steps by rank, from 1; at index 0 those whose token was not listed. The last entry is the
        # number of unjudged steps.
        self._ranks = [0] * (k + 2)
        self._snapshots = deque([list(self._ranks)], SNAPSHOTS + 1)
        self._age_s = 0.0  # seconds since the latest snapshot
        self._counted = list(self._ranks)  # what the metrics have
        self._metrics = [counter.labels(model, version) for counter in metrics.live_accuracy]

    def judge(self, steps: Iterable[Step]) -> None:
        """Counts committed steps and skipped ones. A committed step drops the answer before it, so that it judges no
        later step."""
        drop, ranks = self._kept.pop, self._ranks
        for session, position, token in steps:
            kept = self._kept.get(session) if token == SKIPPED else drop(session, None)
            if kept is not None and kept[0] == position:
                listed = kept[1]
                ranks[listed.index(token) + 1 if token in listed else 0] += 1
            elif position:
                ranks[-1] += 1

    def keep(self, answers: Iterable[tuple[str, int, Sequence[int]]]) -> None:
        """Keeps the first K listed tokens of answers to steps: the session, its position after the step, and the
        tokens, most probable first."""
        kept, k = self._kept, self.k
        for session, position, tokens in answers:
            kept.pop(session, None)
            kept[session] = position, array("I", tokens[:k])
        while len(kept) > self._most_sessions:
            del kept[next(iter(kept))]

    def answered(self, session: str, position: int, answer: Answer) -> None:
        """Like `keep`, for one answer."""
        self.keep([(session, position, [prediction.token_id for prediction in answer.predictions[: self.k]])])

    def forget(self, session: str) -> None:
        """Drops what is kept of a session whose id now names another session."""
        self._kept.pop(session, None)

    def passed(self, seconds: float) -> None:
        """Updates the sliding window and the metrics after some seconds."""
        self.count()
        self._age_s += seconds
        if self._age_s >= SPAN_S / SNAPSHOTS:
            self._age_s = 0.0
            self._snapshots.append(list(self._ranks))

    def count(self) -> None:
        """Adds the latest counts to the metrics."""
        counts = _difference(self._ranks, self._counted)
        self._counted = list(self._ranks)
        added = counts.judged, counts.hits, counts.reciprocal_ranks, counts.unjudged
        for counter, value in zip(self._metrics, added, strict=True):
            counter.inc(value)

    def report(self) -> LiveReport:
        since_start = _difference(self._ranks, [0] * len(self._ranks))
        return LiveReport(self.k, since_start, recent=_difference(self._ranks, self._snapshots[0]))


def _difference(ranks: Sequence[int], before: Sequence[int]) -> LiveCounts:
    """Returns the difference of two lists of counts. See `LiveAccuracy`."""
    missed, *hits, unjudged = (count - earlier for count, earlier in zip(ranks, before, strict=True))
    reciprocal_ranks = sum(count / rank for rank, count in enumerate(hits, 1))
    return LiveCounts.of(missed + sum(hits), sum(hits), reciprocal_ranks, unjudged)
