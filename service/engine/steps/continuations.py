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

Scores = tuple[tuple[float, ...], tuple[float | None, ...]]
"""The log-probability of each token, and the error bound of the distribution that predicted it."""
NOTHING: Scores = (), ()


async def continuations_of(
    request: ContinuationsRequest, source: RecurrentSource, first: RunResult, builder: AnswerBuilder, ticket: Ticket
) -> tuple[Continuation, ...]:
    """Returns the result of each continuation. If one fails, withdraws the others. `source` and `first` are the
    session's state and the result after the session's last token: see `SessionSteps.begin`."""
    start, forward = source.start, builder.forward
    history = np.array(start.history, np.int64)
    first_logprobs = log_softmax(first.network_logits)
    cache = builder.cache if request.cache else None
    ranking = builder.rankings.of(request.filter, ())
    free = asyncio.Semaphore(min(MOST_SLOTS, forward.pool.capacity // 4))

    async def answer_to(tokens: Sequence[int], unknown: tuple[str, ...]) -> Continuation:
        own, ids, count = ticket.beside(), np.array(tokens, np.int64), len(tokens)
        own.started_s = ticket.started_s
        plan = AnswerPlan(
            Mode.RECURRENT, start.position + count, None, start.state, start.known + count, ranking, request.cache
        )
        result, scores = first, NOTHING
        if count:
            async with free:
                with forward.pool.lease() as slot:
                    scanned, norms = await forward.scan(ids, own, read=source.read, write=slot)
                    read = source.read if count == 1 else slot
                    result = await forward.append(ids[-1:], own, read=read, write=slot)
            work = count * (TOKENS_OF_A_SCORE + builder.work(plan))
            scores = await builder.turns.run(work, partial(scores_of, ids, scanned, norms))
        await builder.turns.take(TOKENS_OF_AN_ANSWER)
        part = await builder.made(plan, result, np.concatenate([history, ids]), own)
        asked = PredictRequest(
            session=start.session,
            top_k=request.top_k,
            cache=request.cache,
            logits=request.logits,
            filter=request.filter,
            unknown_names=unknown,
        )
        await builder.take_turn(plan, asked, part)
        answer = builder.answer(plan, ids, part, None, asked, own, sampled=False)
        logprobs, error_bounds = scores
        continuation = Continuation(
            **asdict(answer), tokens=tuple(tokens), logprobs=logprobs, error_bounds=error_bounds
        )
        return continuation.with_details(answer.logits, logprobs)

    def scores_of(ids: NDArray[np.int64], scanned: NDArray[np.float64], norms: list[Norms]) -> Scores:
        """Scores the tokens of a continuation. scanned, norms: see `Forward.scan`. May be called on any thread."""
        logprobs = np.concatenate([first_logprobs[ids[:1]], scanned])
        bounds = [
            bound(builder.certificate, start.known + index, start.position + index, None, of_token)
            for index, of_token in enumerate([first.row.norms, *norms])
        ]
        if cache is not None:
            logprobs, bounds = mixed(cache, history, start.position, ids, logprobs, bounds)
        return tuple(logprobs.tolist()), tuple(None if each is None else each.variation for each in bounds)

    tasks = [
        asyncio.create_task(answer_to(tokens, unknown))
        for tokens, unknown in zip(request.continuations, request.unknown_names, strict=True)
    ]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mixed(
    cache: CacheMixture,
    history: NDArray[np.int64],
    position: int,
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    bounds: Sequence[Bound | None],
) -> tuple[NDArray[np.float64], list[Bound | None]]:
    """Mixes the distributions that predict n tokens with the cache. ids: int64 (n), the tokens, which follow `history`,
    the last tokens of a sequence of `position` tokens. logprobs: float64 (n), the network's log-probabilities of the
    tokens. bounds: those of the network's distributions. Returns the mixtures' log-probabilities and bounds."""
    whole = np.concatenate([history[-cache.length :], ids])
    mixtures, mixed_bounds = [logprobs[:0]], list[Bound | None]()
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
            mixed_bounds.append(of_mixture(bounds[first + index], weight, unknown))
    return np.concatenate(mixtures), mixed_bounds
