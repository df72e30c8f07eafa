"""Selects the tokens that an answer lists: all, or the events that a request's filter allows.

A filter changes the list only. Probabilities are those of the whole distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import Largest
from wane.service.engine.forward import RunResult
from wane.service.engine.logits import largest, log_sum_exp_of
from wane.service.types import NO_FILTER, Filter


class Ranking:
    """The tokens that an answer may list, most probable first."""

    def __init__(
        self,
        size: int,
        excluded: frozenset[int] = frozenset(),
        candidates: frozenset[int] | None = None,
        seen_tokens: int | None = None,
    ) -> None:
        """`size` is the number of tokens in the vocabulary. `excluded` tokens are not listed. If `candidates` is not
        None, only they are listed. `seen_tokens`: see `Answer`."""
        self.seen_tokens = seen_tokens
        self._size = size
        self._excluded = excluded
        self._candidates = candidates

    @property
    def is_of_all(self) -> bool:
        """Whether every token may be listed."""
        return not self._excluded and self._candidates is None

    @cached_property
    def ids(self) -> NDArray[np.int64] | None:
        """The ids of the tokens that may be listed: int64, ascending. None: all."""
        if self.is_of_all:
            return None
        if self._candidates is not None:
            return np.array(sorted(self._candidates - self._excluded), np.int64)
        allowed = np.ones(self._size, np.bool_)
        allowed[list(self._excluded)] = False
        return np.flatnonzero(allowed)

    def largest(self, result: RunResult, count: int) -> Largest:
        """Returns at least the `count` most probable tokens that may be listed. Returns fewer if there are fewer."""
        if self._candidates is None:
            wanted = min(count + len(self._excluded), self._size)
            found = result.largest(min(wanted, result.most) if self._excluded else count)
            if found is not None and self._excluded:
                found = self._kept(found)
                if len(found.ids) < count and wanted > result.most:
                    found = None  # the graph outputs too few tokens
            if found is not None:
                return found
        logits, total = result.logits, result.log_sum_exp
        if self._candidates is not None or not self._excluded:
            return largest(logits, count, self.ids, total)
        total = log_sum_exp_of(logits) if total is None else total
        logits = logits.copy()
        logits[list(self._excluded)] = -np.inf  # faster than a copy of the other logits
        return largest(logits, min(count, self._size - len(self._excluded)), None, total)

    def _kept(self, found: Largest) -> Largest:
        """Returns the tokens of `found` that may be listed."""
        rows = [row for row in zip(*found, strict=True) if row[0] not in self._excluded]
        return Largest(*([row[column] for row in rows] for column in range(len(Largest._fields))))


class Rankings:
    """The rankings of one model's answers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size, unlisted = vocabulary.size, frozenset(vocabulary.unlisted)
        self._size = size
        self._eos_id = vocabulary.eos_id
        self._unlisted = unlisted
        self.of_all = Ranking(size)
        self.default = Ranking(size, unlisted) if unlisted else self.of_all
        """The ranking without a filter. In a model of events it lists neither `<unk>` nor `<eos>`."""

    def of(self, wanted: Filter, known: Sequence[int]) -> Ranking:
        """Returns the ranking for a filter. `known` are the known tokens of the sequence, without the start token."""
        if wanted == NO_FILTER:
            return self.default
        excluded = set(self._unlisted)
        if wanted.include_end:
            excluded.discard(self._eos_id)
        excluded.update(wanted.exclude)
        if wanted.exclude_seen:
            excluded.update(set(known) - {self._eos_id})  # the end of a session is not an event that was seen
        candidates = None if wanted.candidates is None else frozenset(wanted.candidates)
        return Ranking(self._size, frozenset(excluded), candidates, len(known) if wanted.exclude_seen else None)
