"""The outputs of one run of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, TOP_IDS, TOP_LOGITS, Array

FEW = 6
"""The number of largest logits per row that are read by default: for five predictions and one token that is not listed,
such as `<unk>`. A graph outputs more of them (`TOP` in `models/bundle_checks.py`)."""

FINITE = ("logits", HIDDEN, "logprobs")
"""Outputs that must be finite in every answer."""


class Largest(NamedTuple):
    """The largest logits of one row in descending order, with their token ids and probabilities. Equal logits are
    ordered by ascending id."""

    ids: list[int]
    logits: list[float]
    logprobs: list[float]
    probabilities: list[float]


class TopColumns(NamedTuple):
    """The largest logits of every row, in descending order: ids int64 (B, K), logits float64 (B, K), and log_sum_exp
    float64 (B, 1), the logarithm of the sum of exp over all logits of a row."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]
    log_sum_exp: NDArray[np.float64]

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """The natural logarithm of each token's probability: float64 (B, K)."""
        # The log-sum-exp is rounded, so the difference of the logit and the log-sum-exp may be above 0 for a token with
        # a probability near 1.
        return np.minimum(self.logits - self.log_sum_exp, 0.0)


class Outputs(Mapping[str, Array]):
    """The output arrays of one run by name, on the host. Each has the shape (B, ...)."""

    def __init__(self, arrays: Mapping[str, Array], names: Collection[str] | None = None) -> None:
        """names: the names of the outputs, if `arrays` holds only those that were read. By default all of `arrays`."""
        self._arrays = arrays
        self._names: Collection[str] = arrays if names is None else names
        self._largest: dict[int, list[Largest]] = {}
        # `finite` and `lengths`, once they have been read: for a batch of one row, `cached_property` takes longer.
        self._finite: NDArray[np.bool_] | None = None
        self._lengths: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Outputs:
        """Returns the result of `Runner.run` as `Outputs`."""
        return arrays if isinstance(arrays, Outputs) else Outputs(arrays)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def row(self, name: str, row: int) -> Array:
        value: Array = self._arrays[name][row]
        return value

    def part(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Outputs:
        """Returns the outputs of the selected rows. rows: indices, or bool (B)."""
        return Outputs({name: values[rows] for name, values in self._arrays.items()})

    def only(self, names: Collection[str]) -> Outputs:
        """Returns the outputs with these names. The memory of the other outputs can then be freed, unless later runs
        reuse it."""
        return Outputs({name: values for name, values in self._arrays.items() if name in names})

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Whether all values of a row are finite in every output of FINITE: bool (B)."""
        if self._finite is None:
            # a comprehension would be another call
            arrays = [*map(self._arrays.__getitem__, filter(self._arrays.__contains__, FINITE))]
            count = len(arrays[0])
            if all(map(isfinite, map(np.vdot, arrays, arrays))):  # the usual case, in one call per output
                self._finite = np.full(count, True)
            else:  # a value is not finite, or the sum of the squares is too large
                self._finite = np.all([np.isfinite(values).reshape(count, -1).all(axis=1) for values in arrays], axis=0)
        return self._finite

    @property
    def lengths(self) -> NDArray[np.float64]:
        """The 2-norm of every row of `hidden`: float64 (B)."""
        if self._lengths is None:
            hidden = self._arrays[HIDDEN].astype(np.float64)
            self._lengths = np.sqrt(np.einsum("bh,bh->b", hidden, hidden))
        return self._lengths

    @property
    def most(self) -> int:
        """The number of largest logits per row that the graph outputs."""
        return self._arrays[TOP_IDS].shape[1] if TOP_IDS in self._arrays else 0

    def top(self, count: int) -> TopColumns:
        """Returns the `count` largest logits of every row, or `most` of them if the graph outputs fewer."""
        arrays = self._arrays
        sums = arrays[LOG_SUM_EXP].astype(np.float64).reshape(-1, 1)
        return TopColumns(arrays[TOP_IDS][:, :count], arrays[TOP_LOGITS][:, :count].astype(np.float64), sums)

    def largest(self, row: int, count: int) -> Largest | None:
        """Returns at least the `count` largest logits of a row. Returns None if the graph outputs fewer."""
        few = self._largest.get(FEW)
        if few is not None and count <= len(few[row].ids):
            return few[row]
        if count > self.most:
            return None
        width = FEW if count <= FEW else count
        if width not in self._largest:
            top = self.top(width)
            logprobs = top.logprobs
            columns = top.ids, top.logits, logprobs, np.exp(logprobs)
            self._largest[width] = [*map(Largest._make, zip(*[column.tolist() for column in columns], strict=True))]
        return self._largest[width][row]
