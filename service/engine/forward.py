"""Runs one sequence through the batcher, in pieces that a batch can hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.service.batching.batch import Largest, Outputs, Row, WindowTrace, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import IN_ORDER, ChunkedRunner
from wane.service.engine.bounds import Bound, of_mixture
from wane.service.engine.mixed import Mixed
from wane.service.state.pool import HIDDEN, ZERO, StatePool

# Longest piece of a sequence in one run, so that a long input does not delay other requests, and its intermediate
# values stay small.
PIECE_TOKENS = IN_ORDER["advance"]


class RunResult:
    """The output of a run over a sequence. Arrays are views into the batch's, made on access.

    With a `mixed`, the answer's distribution is that of the mixture with a cache; otherwise it is the network's.
    """

    __slots__ = ("_hidden", "mixed", "row")

    def __init__(self, row: Row, hidden: NDArray[np.float32] | None = None, mixed: Mixed | None = None) -> None:
        """`row` is from a run with logits; `hidden` is given if the row has none."""
        self.row = row
        self.mixed = mixed
        self._hidden = hidden

    def mix(self, cache: CacheMixture | None, history: Sequence[int] | NDArray[np.int64], known: int) -> RunResult:
        """Returns the result mixed with the `cache` after the last tokens of a sequence, without the start token. The
        sequence has `known` tokens, of which `history` holds at least the cache's. Unchanged without a cache."""
        if cache is None:
            return self
        return RunResult(self.row, self._hidden, Mixed(cache, history, self.network_logits, self.row, known))

    @classmethod
    def of(cls, logits: NDArray[np.float32], hidden: NDArray[np.float32], radius: float | None = None) -> RunResult:
        """Returns a result made of arrays that belong to no batch: logits (V), hidden (H)."""
        return cls(Row(Outputs({"logits": logits[None], HIDDEN: hidden[None]}), 0, radius, None))

    @property
    def logits(self) -> NDArray[np.float32]:
        """The logits of the answer's distribution, which are the log-probabilities of a mixture: float32 (V)."""
        return self.network_logits if self.mixed is None else self.mixed.log_probabilities

    def bound(self, of_network: Bound | None) -> Bound | None:
        """Returns the bound of the answer's distribution from that of the network's."""
        mixed = self.mixed
        return of_network if mixed is None else of_mixture(of_network, mixed.weight, mixed.unknown)

    @property
    def network_logits(self) -> NDArray[np.float32]:
        """float32 (V)."""
        return _present(self.row.logits)

    def largest(self, count: int) -> Largest | None:
        """Returns at least the `count` most probable tokens; None if the graph's outputs do not tell."""
        return self.row.largest(count) if self.mixed is None else self.mixed.largest(count)

    @property
    def hidden(self) -> NDArray[np.float32]:
        """The output layer's input: float32 (H)."""
        return _present(self.row.hidden) if self._hidden is None else self._hidden

    @property
    def radius(self) -> float | None:
        """See `Row`."""
        return self.row.radius

    @property
    def trace(self) -> WindowTrace | None:
        """The input of the proof by direction; None if the graph does not output it."""
        return self.row.trace

    @property
    def has_length(self) -> bool:
        """Whether the row has `hidden`, and so its length."""
        return self._hidden is None


class Forward:
    """One model's batcher and state pool, used together. Sequences are int64 arrays; slots are the pool's."""

    def __init__(self, batcher: Batcher, pool: StatePool, parallel: ChunkedRunner) -> None:
        self._batcher = batcher
        self._pool = pool
        self.parallel = parallel

    async def window(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, write: int | None = None, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the zero state, in a single run of any length."""
        row = await self._batcher.submit(Work("window", tokens, write=write, binding=binding), ticket)
        return RunResult(row)

    async def full(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, write: int | None = None, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the zero state: in one run, or in pieces if they are many."""
        if len(tokens) <= PIECE_TOKENS:
            return await self.window(tokens, ticket, write=write, binding=binding)
        if write is not None:
            return await self.append(tokens, ticket, read=ZERO, write=write, binding=binding)
        with self._pool.lease() as slot:
            return await self.append(tokens, ticket, read=ZERO, write=slot, binding=binding)

    async def append(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, read: int, write: int, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the state in `read`, which stays unchanged, and writes the next state to `write`.

        Runs many tokens in pieces, or as parallel chunks if that is quicker; the states are bit-identical."""
        if len(tokens) == 1:
            row = await self._batcher.submit(Work("step", tokens, read=read, write=write, binding=binding), ticket)
            return RunResult(row)
        await self.parallel.advance(tokens, ticket, read=read, write=write, binding=binding)
        return await self.again(write, ticket, binding=binding)

    def lease(self) -> AbstractContextManager[int]:
        """Like `StatePool.lease`."""
        return self._pool.lease()

    async def again(self, slot: int, ticket: Ticket, *, binding: bool = False) -> RunResult:
        """Returns the output of the state in `slot`, without running a token."""
        row = await self._batcher.submit(Work("head", read=slot, binding=binding), ticket)
        return RunResult(row, self._pool.gather_hidden([slot])[0])


def sequence(eos_id: int, tokens: Sequence[int], *, truncated: bool = False) -> NDArray[np.int64]:
    """Returns the model's input: the start token `<eos>`, then the tokens, int64 (1 + n). If `truncated`, the tokens
    are the end of a longer sequence and there is no start token: int64 (n)."""
    return np.array(tokens if truncated else [eos_id, *tokens], np.int64)


def tail(input_ids: NDArray[np.int64], position: int, k: int) -> NDArray[np.int64]:
    """Returns the last `k` tokens of `input_ids`, which ends at `position`; if `k` covers it, all with `<eos>`."""
    return input_ids if k >= position else input_ids[-k:]


def _present(array: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert array is not None, "a graph without its output: this is a bug"
    return array
