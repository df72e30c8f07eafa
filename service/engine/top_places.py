"""Lists the most probable tokens at the position of each token of a scored text.

The run that scores a text outputs the output layer's input after every token (`hiddens`). The graph `head` then
computes the distributions, for SLICE positions at a time. The graphs of bundles with the manifest's schema 3 do not
output `hiddens`. With these graphs, every token runs as one step.

Each list contains the text's own token at that position. In the list, this token has the log-probability from the
scoring run, so that the list and `logprobs` contain the same float. That log-probability may differ by rounding from
the one that `head` gives. The log-probabilities of other tokens in the list are then changed as little as necessary to
keep the list in the same order.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from wane.service.batching.batch import Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.engine.answer import AnswerBuilder
from wane.service.engine.forward import RunResult
from wane.service.engine.logits import log_softmax, most_probable
from wane.service.state.pool import ZERO
from wane.service.types.answer import Prediction
from wane.service.types.request import ScoreRequest

SLICE = 32
"""Largest number of positions whose runs of `head` are submitted together."""


class TopPlaces:
    """Lists the most probable tokens at the positions of a text's tokens, for one model."""

    def __init__(self, batcher: Batcher, builder: AnswerBuilder, *, has_hiddens: bool) -> None:
        """`builder` has the parts of the model. `has_hiddens` says whether the graph `scan` outputs `hiddens`."""
        self._batcher = batcher
        self._builder = builder
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
        """Returns one list for each of the n tokens of `input_ids` that follow index `first`. `scored`: float64 (n),
        the log-probabilities of these tokens from the scoring run. `hiddens`: float32 (n, H), the output layer's inputs
        from which the scoring run predicted these tokens. If `hiddens` is None, the tokens run as steps."""
        top_k = request.top_k
        assert top_k is not None, "the score request has no top_k: this is a bug"
        builder = self._builder
        vocabulary, cache = builder.vocabulary, builder.cache if request.cache else None
        omitted = vocabulary.never_drawn(include_unknown=request.include_unknown)
        starts = 0 if request.truncated else len(builder.manifest.start_tokens)  # the cache has no start token
        lists: list[tuple[Prediction, ...]] = []

        def predictions(result: RunResult, place: int) -> tuple[Prediction, ...]:
            if cache is not None:
                history = input_ids[max(starts, place - cache.length) : place]
                result = result.mix(cache, history, place - starts + request.truncated)
            token, logprob = int(input_ids[place]), scored.item(place - first - 1)
            found = most_probable(log_softmax(result.logits), top_k, token, vocabulary, omitted)
            return with_own(found, token, logprob)

        results = self._steps(input_ids, first, len(scored), ticket)
        if hiddens is not None and self.has_hiddens:
            results = self._heads(hiddens, ticket)
        async with aclosing(results):
            async for result in results:
                place = first + len(lists) + 1
                lists.append(await builder.turns.run(vocabulary.size, partial(predictions, result, place)))
        return lists

    async def _heads(self, hiddens: NDArray[np.float32], ticket: Ticket) -> AsyncGenerator[RunResult, None]:
        """Yields the result at each of n positions. hiddens: the output layer's inputs, float32 (n, H)."""
        for start in range(0, len(hiddens), SLICE):
            works = [Work("head", hidden=hidden) for hidden in hiddens[start : start + SLICE]]
            for row in await self._batcher.submit_all(works, ticket):
                yield RunResult(row)

    async def _steps(
        self, input_ids: NDArray[np.int64], first: int, count: int, ticket: Ticket
    ) -> AsyncGenerator[RunResult, None]:
        """Yields the result after each of `count` tokens, starting with the token at index `first`. Runs each token as
        one step."""
        forward = self._builder.forward
        with forward.pool.lease() as slot:
            read = ZERO
            if first:
                await forward.append(input_ids[:first], ticket, read=ZERO, write=slot)
                read = slot
            for place in range(first, first + count):
                yield await forward.append(input_ids[place : place + 1], ticket, read=read, write=slot)
                read = slot


def with_own(found: Sequence[Prediction], token: int, logprob: float) -> tuple[Prediction, ...]:
    """Returns the predictions, with `logprob` as the log-probability of `token`, which must be one of the predictions.
    Changes other log-probabilities where necessary to keep the descending order."""
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
        changed.append(one if same else replace(one, logprob=value, probability=math.exp(min(value, 0.0))))
    return tuple(changed)
