"""Counts how often a session's next token was among the tokens that the answer before it listed (`WANE_LIVE_ACCURACY`).

Every token of a session is the label of the answer before it. The first K tokens of each answer to a step are kept
until the session's next step. That step's first token is then judged by its rank among them. A step's other tokens
follow no answer, and neither does a session's first token, so they are not counted. A step is unjudged if the answer
before it is not kept: another replica or version gave it, its client had gone, it was not the answer to a step, or the
session was rewound. A step whose events the model does not know, and skips, is missed: no answer lists them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Annotated, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from wane.service.observability.metrics import Metrics
from wane.service.types.answer import Answer
from wane.service.types.common import says

SPAN_S = 600
"""The length of the sliding window in seconds."""
SNAPSHOTS = 10
"""The number of equal parts of the sliding window."""
AT_ONCE = 256
"""The number of logged steps that are judged together."""
MOST_LOGGED = 8192
"""More than the log ever has: AT_ONCE and the largest batch."""
KEY_BYTES = 150
"""The memory of a session's entry in the index of the kept answers, without the session's id."""

SKIPPED = -1
"""The first token of a step whose events were all skipped."""
NO_TOKEN = -2

NO_IDS = np.zeros((1, 0), np.int64)

Logged = tuple[Sequence[str], Sequence[int], Sequence[int], Sequence[int], NDArray[np.int32], Sequence[int]]
"""The arguments of `LiveAccuracy.log`."""


class LiveCounts(TypedDict):
    """Counts of steps."""

    judged: Annotated[int, says("the steps whose first token was looked up in the list of the answer before it")]
    hits: Annotated[int, says("those whose token was in this list")]
    reciprocal_ranks: Annotated[float, says("the sum of 1 / rank over the hits")]
    recall: Annotated[float | None, says("`hits` / `judged`; null without a judged step")]
    mrr: Annotated[float | None, says("`reciprocal_ranks` / `judged`; null without a judged step")]
    unjudged: Annotated[int, says("the steps whose earlier answer is not kept")]


class LiveReport(TypedDict):
    """The live accuracy of one version of a model."""

    k: Annotated[int, says("the largest number of tokens of an answer that are compared")]
    since_start: Annotated[LiveCounts, says("the counts since the start")]
    recent: Annotated[LiveCounts, says("the counts of the last 10 to 11 minutes")]


def live_counts(judged: int, hits: int, reciprocal_ranks: float, unjudged: int) -> LiveCounts:
    """Returns counts as a document."""
    return {
        "judged": judged,
        "hits": hits,
        "reciprocal_ranks": reciprocal_ranks,
        "recall": hits / judged if judged else None,
        "mrr": reciprocal_ranks / judged if judged else None,
        "unjudged": unjudged,
    }


class LiveAccuracy:
    """Keeps the first tokens of the answers to one model's steps, and the counts of their ranks. Steps are logged, and
    judged together by array operations once there are AT_ONCE of them or somebody asks for the counts. All methods must
    be called on the event loop's thread."""

    def __init__(self, k: int, most_sessions: int, metrics: Metrics, model: str, version: str) -> None:
        """k: the number of tokens that are kept of each answer. most_sessions: the largest number of sessions whose
        answers are kept; those of the longest idle sessions are dropped."""
        self.k = k
        self._most_sessions = most_sessions
        self._log: list[Logged] = []
        self._logged = 0  # steps in the log
        # For each session the row of its latest answer in the arrays, longest idle session first.
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        # The memory of unused rows is not committed.
        self._positions = np.zeros(most_sessions + MOST_LOGGED, np.int64)
        self._lists = np.zeros((most_sessions + MOST_LOGGED, k), np.int32)
        # The number of judged steps by rank, from 1; at index 0 those whose token was not listed. The last entry is the
        # number of unjudged steps.
        self._ranks = np.zeros(k + 2, np.int64)
        self._snapshots = deque([self._ranks.copy()], SNAPSHOTS + 1)
        self._age_s = 0.0  # seconds since the latest snapshot
        self._counted = self._ranks.copy()  # what the metrics have
        self._metrics = [
            counter.labels(model, version)
            for counter in (
                metrics.live_judged,
                metrics.live_hits,
                metrics.live_reciprocal_ranks,
                metrics.live_unjudged,
            )
        ]

    @staticmethod
    def bytes_of(k: int) -> int:
        """Returns the memory of one session's latest answer."""
        return 8 + 4 * k + KEY_BYTES

    def log(
        self,
        sessions: Sequence[str],
        before: Sequence[int],
        tokens: Sequence[int],
        after: Sequence[int],
        ids: NDArray[np.integer[Any]],
        top_k: Sequence[int],
    ) -> None:
        """Logs n committed steps of different sessions. before: the session's position before each step; 0 if the step
        follows no answer. tokens: each step's first token. after: the session's position in the answer to the step; 0
        if nobody got an answer. ids: integers (n, any), the listed tokens of each answer, most probable first. top_k:
        the number of tokens of each answer.

        The answer before a step judges no later step, because `after` replaces it, unless the token is SKIPPED."""
        self._log.append((sessions, before, tokens, after, ids.astype(np.int32), top_k))
        self._logged += len(sessions)
        if self._logged >= AT_ONCE:
            self._judge()

    def committed(self, session: str, before: int, token: int) -> None:
        """Logs one step before its answer: see `log`."""
        self.log([session], [before], [token], [0], NO_IDS, [0])

    def answered(self, session: str, after: int, answer: Answer) -> None:
        """Logs the answer to a step that `committed` has logged."""
        ids = np.array([[one.token_id for one in answer.predictions[: self.k]]])
        self.log([session], [0], [NO_TOKEN], [after], ids, [self.k])

    def forget(self, session: str) -> None:
        """Drops what is kept of a session whose id now names another session."""
        self.committed(session, 0, NO_TOKEN)

    def _judge(self) -> None:
        """Judges the logged steps, and keeps each session's latest answer."""
        if not self._log:
            return
        names, before, tokens, after, ids, top_k = zip(*self._log, strict=True)
        self._log, self._logged = [], 0
        own = self._rows_of(chain.from_iterable(names))
        lists = np.full((len(own), self.k), NO_TOKEN, np.int32)
        first = 0
        for some in ids:
            lists[first : first + len(some), : some.shape[1]] = some[:, : self.k]
            first += len(some)
        lists[np.arange(self.k) >= np.concatenate(top_k)[:, None]] = NO_TOKEN
        # Each session's kept answer comes first, and then its steps in their order.
        kept = np.unique(own)
        rows = np.concatenate([kept, own])
        order = np.argsort(rows, kind="stable")
        nothing = np.zeros(len(kept), np.int64)
        positions = np.concatenate([self._positions[kept], *after])[order]
        listed = np.concatenate([self._lists[kept], lists])[order]
        expected = np.concatenate([nothing, *before])[order]
        labels = np.concatenate([nothing, *tokens])[order]
        # The row of the latest answer up to each row: a skipped step has none of its own.
        latest = np.maximum.accumulate(np.where(labels == SKIPPED, 0, np.arange(len(rows))))
        earlier, expected, labels = latest[:-1], expected[1:], labels[1:]
        is_judged = (expected > 0) & (positions[earlier] == expected)
        is_listed = listed[earlier] == labels[:, None]
        ranks = np.where(is_listed.any(1), is_listed.argmax(1) + 1, 0)
        self._ranks += np.bincount(ranks[is_judged], minlength=self.k + 2)
        self._ranks[-1] += np.count_nonzero((expected > 0) & ~is_judged)
        last = latest[np.flatnonzero(np.diff(rows[order], append=-1))]
        self._positions[kept], self._lists[kept] = positions[last], listed[last]
        excess = len(self._rows) - self._most_sessions
        for session in [*islice(self._rows, max(0, excess))]:
            row = self._rows.pop(session)
            self._positions[row] = 0
            self._free.append(row)

    def _rows_of(self, sessions: Iterable[str]) -> NDArray[np.intp]:
        """Returns the row of each session, and makes these sessions the latest used."""
        rows, free = self._rows, self._free
        found = []
        for session in sessions:
            row = rows.pop(session, None)
            if row is None:
                row = free.pop() if free else len(rows)
            rows[session] = row
            found.append(row)
        return np.array(found, np.intp)

    def passed(self, seconds: float) -> None:
        """Updates the sliding window and the metrics after some seconds."""
        self.count()
        self._age_s += seconds
        if self._age_s >= SPAN_S / SNAPSHOTS:
            self._age_s = 0.0
            self._snapshots.append(self._ranks.copy())

    def count(self) -> None:
        """Adds the latest counts to the metrics."""
        self._judge()
        found = _document(self._ranks, self._counted)
        self._counted = self._ranks.copy()
        added = found["judged"], found["hits"], found["reciprocal_ranks"], found["unjudged"]
        for counter, value in zip(self._metrics, added, strict=True):
            counter.inc(value)

    def document(self) -> LiveReport:
        """Returns the counts."""
        self._judge()
        return {
            "k": self.k,
            "since_start": _document(self._ranks, np.zeros_like(self._ranks)),
            "recent": _document(self._ranks, self._snapshots[0]),
        }


def _document(ranks: NDArray[np.int64], before: NDArray[np.int64]) -> LiveCounts:
    """Returns the difference of two lists of counts as a document. See `LiveAccuracy`."""
    missed, *found, unjudged = (ranks - before).tolist()
    reciprocal_ranks = sum(count / rank for rank, count in enumerate(found, 1))
    return live_counts(missed + sum(found), sum(found), reciprocal_ranks, unjudged)
