"""Scores the tokens that may follow a session, and predicts what follows them, without changing the session.

The tokens of each continuation but the last run with the graph `scan`, and the last one with the graph `step`. All
continuations start from the session's state, and run in the same batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.service.batching.ticket import Ticket
from wane.service.engine.answer import AnswerBuilder, AnswerPlan
from wane.service.engine.bounds import Bound, bound, of_mixture
from wane.service.engine.forward import Norms, RunResult
from wane.service.engine.generate import RecurrentSource
from wane.service.engine.logits import log_softmax
from wane.service.types.answer import Continuation
from wane.service.types.common import Mode
from wane.service.types.request import ContinuationsRequest, PredictRequest

MOST_SLOTS = 64  # the largest number of states that the continuations of one request use at the same time

TOKENS_OF_AN_ANSWER, TOKENS_OF_A_SCORE = 1024, 256
"""Building an answer takes as long as reading the logits of 1024 tokens, and bounding one token's error as of 256."""

MIXED_AT_ONCE = 256
"""The number of tokens that are mixed with the cache together. Equal tokens take memory for every pair of places."""

Scored = tuple[tuple[float, ...], tuple[float | None, ...]]
"""The log-probability of each token, and the error bound of the distribution that predicted it."""
NOTHING: Scored = (), ()


class Continuer:
    """Runs the continuations of one request."""

    def __init__(
        self,
        request: ContinuationsRequest,
        source: RecurrentSource,
        first: RunResult,
        builder: AnswerBuilder,
        ticket: Ticket,
    ) -> None:
        """`source` and `first` are the session's state and the result after the session's last token: see
        `SessionSteps.begin`."""
        self._request = request
        self._start, self._read = source.start, source.read
        self._history = np.array(source.start.history, np.int64)
        self._first, self._first_logprobs = first, log_softmax(first.network_logits)
        self._builder = builder
        self._ticket = ticket
        self._cache = builder.cache if request.cache else None
        self._ranking = builder.rankings.of(request.filter, ())
        self._free = asyncio.Semaphore(min(MOST_SLOTS, builder.forward.pool.capacity // 4))

    async def run(self) -> tuple[Continuation, ...]:
        """Returns the result of each continuation. If one fails, withdraws the others."""
        each = zip(self._request.continuations, self._request.unknown_names, strict=True)
        tasks = [asyncio.create_task(self._one(tokens, unknown)) for tokens, unknown in each]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, tokens: tuple[int, ...], unknown: tuple[str, ...]) -> Continuation:
        request, start, builder, ids = self._request, self._start, self._builder, np.array(tokens, np.int64)
        ticket, count, forward = self._ticket.beside(), len(ids), builder.forward
        ticket.started_s = self._ticket.started_s
        position, known = start.position + count, start.known + count
        plan = AnswerPlan(Mode.RECURRENT, position, None, start.state, known, self._ranking, request.cache)
        result, scored = self._first, NOTHING
        if count:
            async with self._free:
                with forward.pool.lease() as slot:
                    scanned, norms = await forward.scan(ids, ticket, read=self._read, write=slot)
                    read = self._read if count == 1 else slot
                    result = await forward.append(ids[-1:], ticket, read=read, write=slot)
            work = count * (TOKENS_OF_A_SCORE + builder.work(plan))
            scored = await builder.turns.run(work, partial(self._scored, ids, scanned, norms))
        await builder.turns.take(TOKENS_OF_AN_ANSWER)
        part = await builder.made(plan, result, np.concatenate([self._history, ids]), ticket)
        asked = PredictRequest(
            session=start.session,
            top_k=request.top_k,
            cache=request.cache,
            logits=request.logits,
            filter=request.filter,
            unknown_names=unknown,
        )
        await builder.take_turn(plan, asked, part)
        answer = builder.answer(plan, ids, part, None, asked, ticket, sampled=False)
        found = Continuation(**asdict(answer), tokens=tokens, logprobs=scored[0], error_bounds=scored[1])
        return found.with_details(answer.logits, scored[0])

    def _scored(self, ids: NDArray[np.int64], scanned: NDArray[np.float64], norms: list[Norms]) -> Scored:
        """Scores the tokens of a continuation. scanned, norms: see `Forward.scan`. May be called on any thread."""
        start, logprobs = self._start, np.concatenate([self._first_logprobs[ids[:1]], scanned])
        found = [
            bound(self._builder.certificate, start.known + index, start.position + index, None, one)
            for index, one in enumerate([self._first.row.norms, *norms])
        ]
        if self._cache is not None:
            logprobs, found = mixed(self._cache, self._history, start.position, ids, logprobs, found)
        return tuple(logprobs.tolist()), tuple(None if one is None else one.variation for one in found)


def mixed(
    cache: CacheMixture,
    history: NDArray[np.int64],
    position: int,
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    found: Sequence[Bound | None],
) -> tuple[NDArray[np.float64], list[Bound | None]]:
    """Mixes the distributions that predict n tokens with the cache. ids: int64 (n), the tokens, which follow `history`,
    the last tokens of a sequence of `position` tokens. logprobs: float64 (n), the network's log-probabilities of the
    tokens. found: the bounds of the network's distributions. Returns the mixtures' log-probabilities and bounds."""
    whole, mixtures, mixed_bounds = (
        np.concatenate([history[-cache.length :], ids]),
        [logprobs[:0]],
        list[Bound | None](),
    )
    for first in range(0, len(ids), MIXED_AT_ONCE):
        part = slice(first, first + MIXED_AT_ONCE)
        every = np.arange(len(ids[part]))
        ends = len(whole) - len(ids) + first + every
        rings = np.stack([cache.ring(whole[max(end - cache.length, 0) : end], end) for end in ends.tolist()])
        shares = cache.shares(rings, (ends - 1) % cache.length)
        added = shares.at(every * (cache.vocabulary_size + 1) + ids[part])
        with np.errstate(divide="ignore"):
            mixtures.append(np.minimum(np.logaddexp(np.log(shares.network) + logprobs[part], np.log(added)), 0.0))
        for index, (tokens, weight) in enumerate(zip(shares.tokens.tolist(), shares.network.tolist(), strict=True)):
            unknown = cache.unknown(tokens, position + first + index)
            mixed_bounds.append(of_mixture(found[first + index], weight, unknown))
    return np.concatenate(mixtures), mixed_bounds
