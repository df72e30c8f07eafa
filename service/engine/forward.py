"""Runs one sequence through the batcher, in pieces that fit in a batch. Mixes the result with the model's cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.service.batching.batch import Row, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.cost_model import CostModel
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import IN_ORDER, ChunkedRunner
from wane.service.engine.bounds import Bound, of_mixture
from wane.service.runners.outputs import FEW, Largest, Outputs
from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, TOP_IDS
from wane.service.state.pool import ZERO, StatePool
from wane.service.state.prefixes import BLOCK, Path

# Largest number of tokens in one run of a long sequence. The limit keeps the delay of other requests short, and the
# memory for intermediate values small.
PIECE_TOKENS = IN_ORDER["advance"]

Norms = Sequence[float] | None


class Mixed:
    """The mixture of two distributions of the token that follows one sequence: the network's and the cache's."""

    def __init__(
        self,
        cache: CacheMixture,
        history: Sequence[int] | NDArray[np.int64],
        logits: NDArray[np.float32],
        row: Row,
        known: int,
    ) -> None:
        """cache, history, known: see `RunResult.mix`. row: the row of the network's run. logits: the network's logits
        of that row, float32 (V)."""
        self._cache = cache
        self._logits = logits
        self._row = row
        self._shares = cache.of(np.asarray(history, np.int64))
        self.weight = self._shares.network.item(0)
        """The weight of the network's distribution."""
        self.tokens = self._shares.tokens.item(0)
        """Number of tokens in the cache."""
        self.unknown = cache.unknown(self.tokens, known)
        """The largest total variation that tokens missing from the cache can add."""

    @cached_property
    def added(self) -> NDArray[np.float64]:
        """The cache's part of each token's probability in the mixture: float64 (V)."""
        added: NDArray[np.float64] = self._cache.added(self._shares)[0]
        return added

    @cached_property
    def log_probabilities(self) -> NDArray[np.float32]:
        """The log-probabilities of the mixture at temperature 1: float32 (V)."""
        exact: NDArray[np.float64] = self._cache.log_probabilities(self._logits[None], self._shares)[0]
        return exact.astype(np.float32)

    def largest(self, count: int) -> Largest | None:
        """Returns at least the `count` most probable tokens of the mixture. Returns None if the graph outputs too few
        of the network's most probable tokens."""
        count = min(max(count, FEW), self._cache.vocabulary_size)
        ids, sums = self._row.output(TOP_IDS), self._row.output(LOG_SUM_EXP)
        if ids is None or sums is None or count > len(ids):
            return None
        sums = sums.astype(np.float64).reshape(1)
        top = self._cache.top(self._logits[None], sums, ids[None], self._shares, count)
        probabilities = top.probabilities[0]
        logprobs = np.log(probabilities).tolist()
        return Largest(top.ids[0].tolist(), logprobs, logprobs, probabilities.tolist())


class RunResult:
    """The output of a run over a sequence. Its arrays are views of the batch's arrays, created on access.

    If `mixed` is set, the answer's distribution is the mixture with a cache. Otherwise it is the network's
    distribution. `row` has what else the network's run outputs.
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
    def of(
        cls,
        logits: NDArray[np.float32],
        hidden: NDArray[np.float32],
        radius: float | None = None,
        norms: Sequence[float] | None = None,
    ) -> RunResult:
        """Returns a result from arrays outside of a batch: logits (V), hidden (H)."""
        return cls(Row(Outputs({"logits": logits[None], HIDDEN: hidden[None]}), 0, radius, norms=norms))

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
        """Returns at least the `count` most probable tokens; None if `row.most` is smaller."""
        return self.row.largest(count) if self.mixed is None else self.mixed.largest(count)

    @property
    def log_sum_exp(self) -> float | None:
        """The log-sum-exp of `logits`; None if the graph does not output it."""
        if self.mixed is not None:
            return 0.0  # the logits of a mixture are log-probabilities, whose log-sum-exp is 0
        log_sum_exp = self.row.output(LOG_SUM_EXP)
        return None if log_sum_exp is None else float(log_sum_exp.item())

    @property
    def hidden(self) -> NDArray[np.float32]:
        """The output layer's input: float32 (H)."""
        return _present(self.row.hidden)


class Forward:
    """Runs sequences of one model with its batcher and its state pool. Sequences are int64 arrays. `read`, `write` and
    `slot` are slots of the pool. `binding`: see `Work`."""

    def __init__(
        self,
        batcher: Batcher,
        pool: StatePool,
        parallel: ChunkedRunner,
        cost_model: CostModel,
        *,
        keeps: bool,
        has_radius_output: bool,
    ) -> None:
        """`keeps` says whether the states of prompts are kept for later prompts. `has_radius_output` says whether the
        `window` graph outputs the `radius` of its run: see `bounds.bound`."""
        self._keeps = keeps
        self._batcher = batcher
        self.pool = pool
        self.parallel = parallel
        self.cost_model = cost_model
        self.has_radius_output = has_radius_output

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
        with self.pool.lease() as slot:
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

    async def scan(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, read: int, write: int
    ) -> tuple[NDArray[np.float64], list[Norms]]:
        """Runs n tokens but the last from the state in `read`, and writes the next state to `write` if n > 1. Returns
        the network's log-probabilities of all tokens but the first, float64 (n - 1), and the LayerNorms after all
        tokens but the last (see `Row`)."""
        logprobs, norms = [np.empty(0)], list[Norms]()
        pieces = self.parallel.run("scan", tokens[:-1], tokens[1:], ticket, None, read=read, write=write)
        async with aclosing(pieces):
            async for piece in pieces:
                assert piece.logprobs is not None, "a run in order has no log-probabilities: this is a bug"
                logprobs.append(piece.logprobs)
                norms.extend(piece.plan.norms[-1].tolist() if piece.plan.norms else [None] * len(piece.logprobs))
        return np.concatenate(logprobs), norms

    async def prompt(
        self, tokens: NDArray[np.int64], owner: str | None, ticket: Ticket, *, write: int | None = None
    ) -> tuple[RunResult, int]:
        """Like `full`, but runs only the tokens after the longest beginning whose state is kept for `owner`, and keeps
        the state after the last token. Returns also the number of tokens that did not run. If `owner` is None, no state
        is used or kept.

        The result has the same bits as that of `full`, if all graphs have the same bits (`Certificate.bit_identical`).
        Otherwise it differs by the rounding of two runs, which the bound of every answer includes.
        """
        path = self.path(tokens, owner)
        if path is None:
            return await self.full(tokens, ticket, write=write), 0
        pool = self.pool
        read, cached, branch, _ = pool.prefixes.find(path)
        with ExitStack() as held:
            held.enter_context(pool.hold(read))
            done = cached
            between = held.enter_context(pool.spare()) if branch else None
            if between is not None:
                await self.parallel.advance(tokens[done:branch], ticket, read=read, write=between)
                pool.prefixes.keep(path, branch, between)
                read, done = between, branch
            if done == len(tokens):
                if write is not None:
                    pool.copy(read, write)
                return await self.again(read, ticket), cached
            kept = held.enter_context(pool.spare())
            to = write if kept is None else kept
            if done:
                to = held.enter_context(pool.lease()) if to is None else to
                result = await self.append(tokens[done:], ticket, read=read, write=to)
            else:
                result = await self.full(tokens, ticket, write=to)
            if kept is not None:
                pool.prefixes.keep(path, len(tokens), kept)
                if write is not None:
                    pool.copy(kept, write)
        return result, cached

    def path(self, tokens: NDArray[np.int64], owner: str | None) -> Path | None:
        """Returns the path of a sequence whose states are kept for `owner`. None: no state is."""
        return Path(owner, tokens) if self._keeps and owner is not None and len(tokens) >= BLOCK else None

    def keep(self, tokens: NDArray[np.int64], owner: str | None, slot: int) -> None:
        """Keeps the state in `slot`, which has read `tokens` and will not change. See `prompt`."""
        path = self.path(tokens, owner)
        if path is not None:
            self.pool.prefixes.keep(path, path.length, slot)

    async def heads(self, hiddens: NDArray[np.float32], ticket: Ticket) -> list[RunResult]:
        """Returns the output for each of n inputs of the output layer, float32 (n, H)."""
        works = [Work("head", hidden=hidden) for hidden in hiddens]
        return [RunResult(row) for row in await self._batcher.submit_all(works, ticket)]

    async def again(self, slot: int, ticket: Ticket, *, binding: bool = False) -> RunResult:
        """Returns the output for the state in `slot`, without running a token."""
        row = await self._batcher.submit(Work("head", read=slot, binding=binding), ticket)
        return RunResult(row)


def sequence(start_tokens: Sequence[int], tokens: Sequence[int], *, truncated: bool = False) -> NDArray[np.int64]:
    """Returns the model's input, int64: the s start tokens (`Manifest.start_tokens`), then the n tokens. If
    `truncated`, the tokens are the end of a longer sequence, and the input has no start tokens. If n = 0, the input is
    always the start tokens."""
    return np.array(tokens if truncated and tokens else [*start_tokens, *tokens], np.int64)


def tail(input_ids: NDArray[np.int64], position: int, k: int) -> NDArray[np.int64]:
    """Returns the last `k` tokens of `input_ids`, the model's input up to `position`. If k >= position, returns all of
    `input_ids`, including a start token."""
    return input_ids if k >= position else input_ids[-k:]


def _present(array: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert array is not None, "a graph lacks an output: this is a bug"
    return array
