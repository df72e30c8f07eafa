"""Runs over one sequence, in pieces that a batch can hold: what the engine's requests are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wane.service.batching.batch import Outputs, Row, Top, WindowTrace, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import IN_ORDER, ChunkedRunner
from wane.service.state.pool import HIDDEN, ZERO, StatePool

# Longest piece of a sequence that one run takes, so that a long input does not hold up everybody else, and its
# intermediate values stay small.
PIECE_TOKENS = IN_ORDER["advance"]


class RunResult:
    """What a run over a sequence ends in. Arrays are views of the batch's, made when they are asked for."""

    __slots__ = ("_hidden", "row")

    def __init__(self, row: Row, hidden: NDArray[np.float32] | None = None) -> None:
        """`row`: of a run with logits; `hidden`: where the row has none."""
        self.row = row
        self._hidden = hidden

    @classmethod
    def of(cls, logits: NDArray[np.float32], hidden: NDArray[np.float32], radius: float | None = None) -> RunResult:
        """Of arrays that are no batch's: logits (V), hidden (H)."""
        return cls(Row(Outputs({"logits": logits[None], HIDDEN: hidden[None]}), 0, radius, None))

    @property
    def logits(self) -> NDArray[np.float32]:
        """float32 (V)."""
        return _there(self.row.logits)

    @property
    def hidden(self) -> NDArray[np.float32]:
        """The output layer's input: float32 (H)."""
        return _there(self.row.hidden) if self._hidden is None else self._hidden

    @property
    def radius(self) -> float | None:
        """See `Row`."""
        return self.row.radius

    @property
    def trace(self) -> WindowTrace | None:
        """What the proof by direction needs; None where the graph does not put it out."""
        return self.row.trace

    @property
    def has_length(self) -> bool:
        """Whether the row has `hidden`, and so its length."""
        return self._hidden is None

    @property
    def top(self) -> Top | None:
        """The largest logits; None where the graph does not put them out."""
        return self.row.top


class Forward:
    """One model's batcher and state pool, used together. Sequences are int64 arrays; slots are the pool's."""

    def __init__(self, batcher: Batcher, pool: StatePool, parallel: ChunkedRunner) -> None:
        self._batcher = batcher
        self._pool = pool
        self.parallel = parallel

    async def window(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, write: int | None = None, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the zero state, in one run however long they are."""
        row = await self._batcher.submit(Work("window", tokens, write=write, binding=binding), ticket)
        return RunResult(row)

    async def full(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, write: int | None = None, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the zero state: in one run, or in pieces where they are many."""
        if len(tokens) <= PIECE_TOKENS:
            return await self.window(tokens, ticket, write=write, binding=binding)
        if write is not None:
            return await self.append(tokens, ticket, read=ZERO, write=write, binding=binding)
        with self._pool.lease() as slot:
            return await self.append(tokens, ticket, read=ZERO, write=slot, binding=binding)

    async def append(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, read: int, write: int, binding: bool = False
    ) -> RunResult:
        """Runs `tokens` from the state in `read`, which stays as it is, and leaves the next state in `write`: in pieces
        where they are many, and where that is quicker in chunks side by side, to the same states bit for bit."""
        if len(tokens) == 1:
            row = await self._batcher.submit(Work("step", tokens, read=read, write=write, binding=binding), ticket)
            return RunResult(row)
        await self.parallel.advance(tokens, ticket, read=read, write=write, binding=binding)
        return await self.again(write, ticket, binding=binding)

    async def again(self, slot: int, ticket: Ticket, *, binding: bool = False) -> RunResult:
        """The answer of the state in `slot` once more, with no token consumed."""
        row = await self._batcher.submit(Work("head", read=slot, binding=binding), ticket)
        return RunResult(row, self._pool.gather_hidden([slot])[0])


def sequence(eos_id: int, tokens: Sequence[int], *, truncated: bool = False) -> NDArray[np.int64]:
    """A sequence as the model is fed it: with `<eos>`, the start token, first, int64 (1 + n); or, where `truncated`
    says that the tokens only end a longer sequence, without it, int64 (n)."""
    return np.array(tokens if truncated else [eos_id, *tokens], np.int64)


def tail(input_ids: NDArray[np.int64], position: int, k: int) -> NDArray[np.int64]:
    """The last `k` of the tokens in `input_ids`, which ends at `position`; where these are all, its `<eos>` too."""
    return input_ids if k >= position else input_ids[-k:]


def _there(array: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert array is not None, "a graph without its output: this is a bug"
    return array
