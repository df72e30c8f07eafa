"""Runs one sequence through the batcher, in pieces that fit in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.service.batching.batch import Row, WindowTrace, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import IN_ORDER, ChunkedRunner
from wane.service.engine.bounds import Bound, of_mixture
from wane.service.engine.mixed import Mixed
from wane.service.runners.outputs import Largest, Outputs
from wane.service.runners.runner import HIDDEN
from wane.service.state.pool import ZERO, StatePool

# Largest number of tokens in one run of a long sequence. The limit keeps the delay of other requests and the
# intermediate values small.
PIECE_TOKENS = IN_ORDER["advance"]


class RunResult:
    """The output of a run over a sequence. Its arrays are views of the batch's arrays, created on access.

    If `mixed` is set, the answer's distribution is the mixture with a cache. Otherwise it is the network's
    distribution.
    """

    __slots__ = ("mixed", "row")

    def __init__(self, row: Row, mixed: Mixed | None = None) -> None:
        """`row` must be from a run that outputs logits."""
        self.row = row
        self.mixed = mixed

    def mix(self, cache: CacheMixture | None, history: Sequence[int] | NDArray[np.int64], known: int) -> RunResult:
        """Returns this result mixed with the `cache`, or unchanged if `cache` is None. `known` is the number of the
        sequence's tokens, without the start token. `history` holds the sequence's last tokens: all of them, or at least
        as many as the cache can hold."""
        if cache is None:
            return self
        return RunResult(self.row, Mixed(cache, history, self.network_logits, self.row, known))

    @classmethod
    def of(cls, logits: NDArray[np.float32], hidden: NDArray[np.float32], radius: float | None = None) -> RunResult:
        """Returns a result from arrays outside of a batch: logits (V), hidden (H)."""
        return cls(Row(Outputs({"logits": logits[None], HIDDEN: hidden[None]}), 0, radius))

    @property
    def logits(self) -> NDArray[np.float32]:
        """The logits of the answer's distribution: float32 (V). For a mixture with a cache, these are the mixture's
        log-probabilities."""
        return self.network_logits if self.mixed is None else self.mixed.log_probabilities

    def bound(self, of_network: Bound | None) -> Bound | None:
        """Returns the bound of the answer's distribution, given the bound of the network's distribution."""
        mixed = self.mixed
        return of_network if mixed is None else of_mixture(of_network, mixed.weight, mixed.unknown)

    @property
    def network_logits(self) -> NDArray[np.float32]:
        """The network's logits: float32 (V)."""
        return _present(self.row.logits)

    def largest(self, count: int) -> Largest | None:
        """Returns at least the `count` most probable tokens; None if the graph does not output enough of them."""
        return self.row.largest(count) if self.mixed is None else self.mixed.largest(count)

    @property
    def hidden(self) -> NDArray[np.float32]:
        """The output layer's input: float32 (H)."""
        return _present(self.row.hidden)

    @property
    def radius(self) -> float | None:
        """See `Row`."""
        return self.row.radius

    @property
    def trace(self) -> WindowTrace | None:
        """The input of the gradient proof; None if the graph does not output it."""
        return self.row.trace


class Forward:
    """Runs sequences of one model with its batcher and its state pool. Sequences are int64 arrays. `read`, `write` and
    `slot` are slots of the pool."""

    def __init__(self, batcher: Batcher, pool: StatePool, parallel: ChunkedRunner) -> None:
        self._batcher = batcher
        self._pool = pool
        self.parallel = parallel

    async def window(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, write: int | None = None, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the zero state, in a single run for any number of tokens."""
        row = await self._batcher.submit(Work("window", tokens, write=write, binding=binding), ticket)
        return RunResult(row)

    async def full(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, write: int | None = None, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the zero state, in one run or, if there are more than PIECE_TOKENS, in pieces."""
        if len(tokens) <= PIECE_TOKENS:
            return await self.window(tokens, ticket, write=write, binding=binding)
        if write is not None:
            return await self.append(tokens, ticket, read=ZERO, write=write, binding=binding)
        with self._pool.lease() as slot:
            return await self.append(tokens, ticket, read=ZERO, write=slot, binding=binding)

    async def append(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, read: int, write: int, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the state in `read`, and writes the next state to `write`. The state in `read` stays
        unchanged.

        Runs many tokens in pieces, or as parallel chunks if chunks are faster. Both ways give bit-identical states.
        """
        if len(tokens) == 1:
            row = await self._batcher.submit(Work("step", tokens, read=read, write=write, binding=binding), ticket)
            return RunResult(row)
        await self.parallel.advance(tokens, ticket, read=read, write=write, binding=binding)
        return await self.again(write, ticket, binding=binding)

    def lease(self) -> AbstractContextManager[int]:
        """Like `StatePool.lease`."""
        return self._pool.lease()

    async def again(self, slot: int, ticket: Ticket, *, binding: bool = False) -> RunResult:
        """Returns the output for the state in `slot`, without running a token."""
        row = await self._batcher.submit(Work("head", read=slot, binding=binding), ticket)
        return RunResult(row)


def sequence(eos_id: int, tokens: Sequence[int], *, truncated: bool = False) -> NDArray[np.int64]:
    """Returns the model's input: the start token `<eos>` and the tokens, int64 (1 + n). If `truncated`, the tokens are
    the end of a longer sequence, and the input has no start token: int64 (n)."""
    return np.array(tokens if truncated else [eos_id, *tokens], np.int64)


def tail(input_ids: NDArray[np.int64], position: int, k: int) -> NDArray[np.int64]:
    """Returns the last `k` tokens of `input_ids`, which ends at `position`. Returns all of `input_ids`, with `<eos>`,
    if k >= position."""
    return input_ids if k >= position else input_ids[-k:]


def _present(array: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert array is not None, "a graph lacks an output: this is a bug"
    return array
