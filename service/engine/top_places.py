"""The most probable tokens in the place of each token of a scored text.

The scan of a text outputs the output layer's input after every token (`hiddens`); the head runs over these in slices.
Bundles of version 1 do not have that output: for them each token is one step.

A token's own log-probability is the scan's, in its list too, so that the list and `logprobs` have the same float. The
scan and the head may differ by rounding. The others' are moved by as much as keeps the order of the head.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket, WorkItem
from wane.service.engine.forward import Forward, RunResult
from wane.service.engine.logits import log_softmax, most_probable
from wane.service.state.pool import ZERO
from wane.service.types import Prediction, ScoreRequest

SLICE = 32
"""Positions whose output layer runs together."""


class TopPlaces:
    """Lists the most probable tokens in the places of a text's tokens, for one model."""

    def __init__(
        self,
        batcher: Batcher,
        forward: Forward,
        vocabulary: Vocabulary,
        cache: CacheMixture | None,
        *,
        has_hiddens: bool,
        start_tokens: int,
    ) -> None:
        """`cache` is that of the model, if it has one. `has_hiddens`: scans output `hiddens`. `start_tokens`: the
        number of tokens that the model reads before a sequence."""
        self._start_tokens = start_tokens
        self._batcher = batcher
        self._forward = forward
        self._vocabulary = vocabulary
        self._cache = cache
        self.has_hiddens = has_hiddens

    async def find(
        self,
        request: ScoreRequest,
        input_ids: NDArray[np.int64],
        first: int,
        hiddens: NDArray[np.float32] | None,
        scored: NDArray[np.float64],
        ticket: Ticket,
    ) -> list[tuple[Prediction, ...]]:
        """Returns the lists for the n tokens of `input_ids` after the one at `first`. `scored`: their log-probabilities
        by the scan, float64 (n). `hiddens`: float32 (n, H), as the scan of these tokens output them."""
        assert request.top_k is not None, "a score without lists asks for them: this is a bug"
        cache = self._cache if request.cache else None
        starts = 0 if request.truncated else self._start_tokens  # the start token is not in a cache
        lists: list[tuple[Prediction, ...]] = []
        results = self._steps(input_ids, first, len(scored), ticket)
        if hiddens is not None and self.has_hiddens:
            results = self._heads(hiddens, ticket)
        async with aclosing(results):
            async for result in results:
                place = first + len(lists) + 1
                if cache is not None:
                    history = input_ids[max(starts, place - cache.length) : place]
                    result = result.mix(cache, history, place - starts + request.truncated)
                token, logprob = int(input_ids[place]), scored.item(len(lists))
                found = most_probable(log_softmax(result.logits), request.top_k, token, self._vocabulary)
                lists.append(with_own(found, token, logprob))
        return lists

    async def _heads(self, hiddens: NDArray[np.float32], ticket: Ticket) -> AsyncGenerator[RunResult, None]:
        """Yields the result at each of n positions, from the output layer's input: float32 (n, H)."""
        others = ticket.beside()
        for start in range(0, len(hiddens), SLICE):
            items: list[WorkItem] = []
            rows = hiddens[start : start + SLICE]
            try:
                for index, hidden in enumerate(rows):
                    work = Work("head", hidden=hidden)
                    items.append(self._batcher.submit(work, others if index else ticket))
                for hidden, item in zip(rows, items, strict=True):
                    yield RunResult(await item, hidden)
            except BaseException:
                for item in items:
                    item.cancel()
                raise

    async def _steps(
        self, input_ids: NDArray[np.int64], first: int, count: int, ticket: Ticket
    ) -> AsyncGenerator[RunResult, None]:
        """Yields the result after each of `count` tokens, in one step each."""
        with self._forward.lease() as slot:
            read = ZERO
            if first:
                await self._forward.append(input_ids[:first], ticket, read=ZERO, write=slot)
                read = slot
            for place in range(first, first + count):
                yield await self._forward.append(input_ids[place : place + 1], ticket, read=read, write=slot)
                read = slot


def with_own(found: Sequence[Prediction], token: int, logprob: float) -> tuple[Prediction, ...]:
    """Returns a list of predictions with this log-probability for `token`, which is one of them. Those before it stay
    more probable, and those after it stay at most as probable."""
    own = next(index for index, one in enumerate(found) if one.token_id == token)
    least, ties = math.nextafter(logprob, math.inf), found[own].logprob
    changed: list[Prediction] = []
    for index, one in enumerate(found):
        value = one.logprob
        if index == own:
            value = logprob
        elif index < own:
            value = max(value, logprob if value == ties else least)
        else:
            value = min(value, logprob)
        same = value == one.logprob
        changed.append(one if same else one._replace(logprob=value, probability=math.exp(min(value, 0.0))))
    return tuple(changed)
