"""What a run put out for a batch, and what of it is wanted of every row: that is worked out once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from service.engine.distribution import Top
from service.engine.slab import HIDDEN
from service.runners.runner import LOG_SUM_EXP, TOP_IDS, TOP_LOGITS, Array


class Outputs:
    """The outputs of one run by name, each (B, ...)."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    @cached_property
    def tops(self) -> list[Top] | None:
        """The largest logits of every row; None where the graph puts out none."""
        arrays = self.arrays
        if TOP_IDS not in arrays:
            return None
        logits, sums = arrays[TOP_LOGITS].astype(np.float64), arrays[LOG_SUM_EXP].astype(np.float64)
        # The sum is rounded: of a token that is all but certain the difference may be above 0.
        logprobs = np.minimum(logits - sums.reshape(-1, 1), 0.0)
        columns = arrays[TOP_IDS], logits, logprobs, np.exp(logprobs)
        return [*map(Top._make, zip(*[column.tolist() for column in columns], strict=True))]

    @cached_property
    def lengths(self) -> list[float]:
        """The 2-norm of every row of `hidden`."""
        hidden = self.arrays[HIDDEN].astype(np.float64)
        lengths: list[float] = np.sqrt(np.einsum("bh,bh->b", hidden, hidden)).tolist()
        return lengths
