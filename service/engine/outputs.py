"""What a run put out for a batch, and what of it is wanted of every row: that is worked out once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from service.engine.slab import HIDDEN
from service.runners.runner import LOG_SUM_EXP, TOP_IDS, TOP_LOGITS, Array

FEW = 5
"""Of the largest logits, which a graph puts out a hundred of, as many are looked at unless more are asked for."""


class Largest(NamedTuple):
    """The largest of some logits, in falling order, the smaller id first among equals, and what they come to."""

    ids: list[int]
    logits: list[float]
    logprobs: list[float]
    probabilities: list[float]


class Outputs:
    """The outputs of one run by name, each (B, ...)."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self._largest: dict[int, list[Largest]] = {}

    def largest(self, row: int, count: int) -> Largest | None:
        """At least the `count` largest logits of a row; None where the graph puts out fewer."""
        few = self._largest.get(FEW)
        if few is not None and count <= len(few[row].ids):
            return few[row]
        ids = self.arrays.get(TOP_IDS)
        if ids is None or count > ids.shape[1]:
            return None
        width = FEW if count <= FEW else count
        if width not in self._largest:
            self._largest[width] = self._first(width)
        return self._largest[width][row]

    def _first(self, width: int) -> list[Largest]:
        """Of every row."""
        arrays = self.arrays
        logits = arrays[TOP_LOGITS][:, :width].astype(np.float64)
        # The sum is rounded: of a token that is all but certain the difference may be above 0.
        logprobs = np.minimum(logits - arrays[LOG_SUM_EXP].astype(np.float64).reshape(-1, 1), 0.0)
        columns = arrays[TOP_IDS][:, :width], logits, logprobs, np.exp(logprobs)
        return [*map(Largest._make, zip(*[column.tolist() for column in columns], strict=True))]

    @cached_property
    def lengths(self) -> list[float]:
        """The 2-norm of every row of `hidden`."""
        hidden = self.arrays[HIDDEN].astype(np.float64)
        lengths: list[float] = np.sqrt(np.einsum("bh,bh->b", hidden, hidden)).tolist()
        return lengths


class Top(NamedTuple):
    """The largest logits of one row, as a graph put them out."""

    outputs: Outputs
    row: int

    def first(self, count: int) -> Largest | None:
        """At least so many of them; None where there are fewer."""
        return self.outputs.largest(self.row, count)
