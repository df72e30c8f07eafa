"""Scores a text: computes the log-probability of every token, given the tokens before it.

The text runs in order, or as parallel chunks (`service/chunked/chunked.py`). At a joint, the two states may differ by
at most RESIDUAL in each unit. With a tolerance, `error_bound` must meet the tolerance: chunks whose bound exceeds it,
or which have no bound, run again until they are exact. `error_bound` is the proved bound, if there is one.

In a truncated sequence every answer has its own bound: the bound for the number of tokens before the answer, plus the
bound of the error that the joints add. The tolerance then limits only the error that the joints add. In a whole
sequence, one bound holds for all answers of a run with joints. It is the smaller of two bounds, each plus the rounding
of two float32 runs: the certificate's bound for one token more than the chunks' warm-up (even the first answer of a
chunk has read the warm-up and the chunk's first token), and a bound computed from the measured differences at the
joints (`models/certificate/propagation.py`). In a model with a `Readout`, the rounding and the effect of the joints are
bounded at each token's own LayerNorms. A whole sequence then has the largest of these bounds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.models.cache_statistics import cache_statistics
from wane.models.certificate.propagation import MAX_TOKENS, Propagation
from wane.models.certificate.total_variation import total_variation
from wane.models.manifest import Readout
from wane.service.batching.ticket import Ticket
from wane.service.chunked.chunked import IN_ORDER, ChunkPlan, Judge, Piece
from wane.service.engine import bounds
from wane.service.engine.answer import AnswerBuilder
from wane.service.engine.backlog import Share
from wane.service.engine.forward import RunResult, sequence
from wane.service.engine.logits import log_softmax, most_probable
from wane.service.state.pool import ZERO
from wane.service.state.prefixes import Found, Scores
from wane.service.types.answer import Prediction
from wane.service.types.common import StateSource
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import ScoreRequest
from wane.service.types.text import ScoredTokens, ScoreProgress, ScoreSummary

RESIDUAL = 1e-5
"""If the request has no tolerance, the two states at a joint may differ by at most this amount in each unit."""

FED_AT_ONCE = 16_384
"""The number of tokens that are copied into an array in one iteration of the event loop."""

HEADS_AT_ONCE = 32
"""The largest number of positions whose runs of `head` are submitted together."""

LARGEST_EXPONENT = 700.0  # exp of a larger value overflows float64

Item = ScoreProgress | ScoredTokens | ScoreSummary
T = TypeVar("T")

Scored = tuple[Piece, Sequence[tuple[Prediction, ...]] | None, NDArray[np.float32] | None]
"""A piece of a run; the lists at its tokens, if they are known; and the output layer's inputs that predicted them,
float32 (n, H), if the graph outputs them."""


class Places:
    """The places of a score's tokens in the request's list of events. A place is an index in that list. A skipped event
    has a place, but no token."""

    def __init__(self, tokens: int, skipped: Sequence[int]) -> None:
        """`tokens` is the number of tokens. `skipped` are the places of the skipped events, ascending."""
        total = tokens + len(skipped)
        self._of_tokens = np.append(np.delete(np.arange(total), skipped), total) if skipped else None

    def before(self, token: int) -> int:
        """Returns the place at which the results from the token with the index `token` on begin. It is the token's
        place, except for the first token, whose results begin with the skipped events before it."""
        return token if self._of_tokens is None or not token else int(self._of_tokens[token])

    def spread(self, first: int, last: int, values: Sequence[T] | None) -> tuple[T | None, ...] | None:
        """Returns one value for each place: that of its token, or None for a skipped event. `values` has one value for
        each token from index `first` up to, but not including, `last`. Returns None if `values` is None."""
        if self._of_tokens is None or values is None:
            return None if values is None else tuple(values)
        start = self.before(first)
        spread: list[T | None] = [None] * (int(self._of_tokens[last]) - start)
        for place, value in zip(self._of_tokens[first:last].tolist(), values, strict=True):
            spread[place - start] = value
        return tuple(spread)


class MixedScore:
    """The mixtures of the network's and the cache's distribution at each token of one text."""

    def __init__(self, cache: CacheMixture, input_ids: NDArray[np.int64], *, has_start: bool) -> None:
        """input_ids: see `cache_statistics`. has_start: whether the first token of `input_ids` is a start token."""
        self.cache = cache
        self._input_ids, self._first = input_ids, int(has_start)
        self._statistics = cache_statistics(input_ids, cache.length, truncated=not has_start)

    def mix(self, start: int, network: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the mixture's log-probabilities of n tokens that follow the first `start` predicted tokens. `network`
        holds the network's log-probabilities of these tokens (n)."""
        at = np.arange(start, start + len(network))
        return self.cache.score(self._statistics, self._input_ids, at, np.full(len(at), self._first), network)

    def bounds(self, start: int, of_network: Sequence[float | None]) -> list[float | None]:
        """Returns the error bounds of the mixtures' distributions for the tokens that follow the first `start`
        predicted tokens. The text must be the end of a longer text. of_network: the error bounds of the network's
        distributions for the same tokens."""
        at = np.arange(start, start + len(of_network))
        statistics = self._statistics.at(at)
        weights = self.cache.network_weights(self._statistics, self._input_ids, at, np.full(len(at), self._first))
        unknown = np.where(statistics.filled < 1, 1 - self.cache.least_network, 0.0)
        return [
            None if bound is None else min(weight * bound + more, 1.0)
            for bound, weight, more in zip(of_network, weights.tolist(), unknown.tolist(), strict=True)
        ]


class Scoring:
    """What a score has computed so far: the network's log-probabilities, and the lists. `cached`: the number of the
    model's input tokens that did not run."""

    def __init__(self, request: ScoreRequest) -> None:
        self.logprobs: list[NDArray[np.float64]] = []
        self.lists: list[tuple[Prediction, ...]] = []
        self.cached = 0
        self.asked = (request.top_k, request.cache, request.include_unknown)

    def accepts(self, scores: Scores) -> bool:
        """Returns whether the scores of an earlier request have the lists that this request asks for."""
        return self.asked[0] is None or scores.asked == self.asked

    def until(self, tokens: int) -> Scores:
        """Returns the scores to keep beside the state after the first `tokens` input tokens."""
        logprobs = np.concatenate(self.logprobs)[: tokens - 1]
        return Scores(logprobs) if self.asked[0] is None else Scores(logprobs, (*self.lists[: tokens - 1],), self.asked)


class Scorer:
    """Scores texts with one model."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._forward = builder.forward
        self.propagation: Propagation | None = None
        self._certificate = certificate = builder.certificate
        self._readout = certificate.readout if certificate.has_rounding else None
        self.parallel = self._forward.parallel
        self._pool = self._forward.pool
        self._start_tokens = builder.manifest.start_tokens
        self._cache = builder.cache

    def seconds(self, request: ScoreRequest) -> float:
        """Returns the expected seconds of all runs of a score."""
        tokens, in_chunks = len(request.tokens), None
        if request.method is ScoreMethod.PARALLEL:
            in_chunks = self.parallel.seconds(tokens, "scan", RESIDUAL if request.tolerance is None else 0.0)
        in_order = tokens / IN_ORDER["scan"] * self._forward.cost_model.run("scan", IN_ORDER["scan"])
        return in_order if in_chunks is None else in_chunks

    async def score(self, request: ScoreRequest, ticket: Ticket, share: Share) -> AsyncGenerator[Item, None]:
        """Yields the log-probabilities in the order of the tokens, and the progress. The last item is the summary. The
        caller must close the generator. Reports progress to `share`."""
        await asyncio.sleep(0)  # lets other tasks run, because the check of a long text has just blocked the event loop
        # The model reads no start token if it has a zero start or the tokens are truncated. It then does not predict
        # the first token.
        has_start = bool(self._start_tokens) and not request.truncated
        count = len(request.tokens)
        unpredicted = (None,) if count and not has_start else ()
        input_ids = await self._input_ids(request)
        mixed: MixedScore | None = None
        if self._cache is not None and request.cache and len(input_ids) > 1:
            mixed = await self._aside(partial(MixedScore, self._cache, input_ids, has_start=has_start))
        limit = RESIDUAL if request.method is ScoreMethod.PARALLEL and request.top_k is None else None
        judge = None
        if limit and request.tolerance is not None:
            limit, judge = (RESIDUAL, partial(self._meets, request.tolerance)) if self._bounded else (0.0, None)
        places = Places(count, request.skipped)
        settled, predicted, total, plan = 0, 0, 0.0, ChunkPlan()
        worst: list[float | None] = []
        scoring = Scoring(request)
        async with aclosing(self._pieces(request, input_ids, ticket, limit, judge, scoring)) as pieces:
            async for piece, kept, hiddens in pieces:
                plan, done = piece.plan, piece.done + len(unpredicted)
                share.progress(piece.done / max(count, 1))
                if piece.logprobs is not None:
                    logprobs = piece.logprobs if mixed is None else mixed.mix(predicted, piece.logprobs)
                    before, end = () if settled else unpredicted, len(unpredicted) + predicted + len(logprobs)
                    cut_off: list[float | None] | None = None
                    if request.truncated:
                        cut_off = await self._cut_off_at(range(settled + len(before), end), plan)
                        cut_off = cut_off if mixed is None else mixed.bounds(predicted, cut_off)
                        worst.append(bounds.largest(cut_off) if cut_off else None)
                        cut_off = [*before, *cut_off]
                    listed: list[tuple[Prediction, ...] | None] | None = None
                    if request.top_k is not None:
                        lists = kept
                        if lists is None:
                            lists = await self._lists(request, input_ids, predicted, hiddens, logprobs, ticket)
                        listed = [*before, *lists]
                        scoring.lists += lists
                    scoring.logprobs.append(piece.logprobs)
                    yield ScoredTokens(
                        places.before(settled),
                        places.spread(settled, end, request.tokens[settled:end]) or (),
                        places.spread(settled, end, (*before, *logprobs.tolist())) or (),
                        places.spread(settled, end, cut_off),
                        places.spread(settled, end, listed),
                    )
                    settled, predicted, total = end, predicted + len(logprobs), total + float(logprobs.sum())
                yield ScoreProgress(done, count)
        share.progress(1)
        yield ScoreSummary(
            *self._builder.identity,
            perplexity=math.exp(min(-total / predicted, LARGEST_EXPONENT)) if predicted else None,
            chunks=plan.chunks,
            warm_up=plan.warm_up,
            rounds=plan.rounds,
            max_residual=plan.residual,
            state=StateSource.FULL,
            error_bound=bounds.largest(worst) if request.truncated else await self._bound(plan),
            latency=ticket.latency(),
            cache_tokens=None if mixed is None else min(mixed.cache.length, count),
            unknown=request.unknown_names or None,
            cached_tokens=max(scoring.cached - (len(input_ids) - count), 0),
        )

    async def _pieces(
        self,
        request: ScoreRequest,
        input_ids: NDArray[np.int64],
        ticket: Ticket,
        limit: float | None,
        judge: Judge | None,
        scoring: Scoring,
    ) -> AsyncGenerator[Scored, None]:
        """Yields the pieces of a score. The first come from the kept state and the kept scores of the longest beginning
        that have them; the rest runs. Keeps states and scores. The caller must store a piece in `scoring` before it
        takes the next one."""
        inputs, targets = input_ids[:-1], input_ids[1:]
        if not len(inputs):  # the request has no token, or its only token has no prediction
            yield Piece(0, ChunkPlan(), np.empty(0)), None, None
            return
        with self._pool.lease() as slot, ExitStack() as held:
            path = self._forward.path(inputs, request.owner)
            prefixes, prefix = self._pool.prefixes, Found(ZERO, 0, 0)
            # The bound of a truncated text needs the norms at each token.
            if path is not None and not request.truncated:
                prefix = prefixes.find(path, scoring.accepts)
            read, start = prefix.slot, prefix.length
            held.enter_context(self._pool.hold(read))
            if prefix.scores is not None:
                scoring.cached = start
                logprobs, lists, _ = prefix.scores
                for first in range(0, start - 1, at_once := max(FED_AT_ONCE // (request.top_k or 1), 1)):
                    await asyncio.sleep(0)
                    part = slice(first, min(first + at_once, start - 1))
                    yield Piece(part.stop, ChunkPlan(), logprobs[part]), lists and lists[part], None
                result = await self._forward.again(read, ticket)
                logprob = log_softmax(result.network_logits)[targets[start - 1 : start]].astype(np.float64)
                yield Piece(start, ChunkPlan(), logprob), None, None if request.top_k is None else result.hidden[None]
            ends = [(len(inputs), slot)]
            if prefix.branch and limit is None:
                between = held.enter_context(self._pool.spare())
                ends = ends if between is None else [(prefix.branch, between), *ends]
            for end, write in ends:
                if start == end:
                    continue
                residual, part = 0.0, slice(start, end)
                pieces = self.parallel.run(
                    "scan", inputs[part], targets[part], ticket, limit, judge, read=read, write=write
                )
                async with aclosing(pieces):
                    async for piece in pieces:
                        residual = piece.plan.residual
                        hiddens = None if request.top_k is None else piece.hiddens  # read only if needed
                        yield replace(piece, done=start + piece.done), None, hiddens
                if path is not None and not residual:
                    prefixes.keep(path, end, write, None if request.truncated else scoring.until(end))
                read, start = write, end

    async def _aside(self, call: Callable[[], T]) -> T:
        """Runs a computation that would block the event loop on the thread of the proofs."""
        return await asyncio.get_running_loop().run_in_executor(self._builder.prover, call)

    async def _input_ids(self, request: ScoreRequest) -> NDArray[np.int64]:
        """Like `forward.sequence`, but spread over several iterations of the event loop."""
        parts = [sequence(self._start_tokens, request.tokens[:FED_AT_ONCE], truncated=request.truncated)]
        for start in range(FED_AT_ONCE, len(request.tokens), FED_AT_ONCE):
            await asyncio.sleep(0)
            parts.append(np.array(request.tokens[start : start + FED_AT_ONCE], np.int64))
        return np.concatenate(parts)

    @cached_property
    def _cut_off(self) -> tuple[float | None, ...]:
        """The bounds of answers from the last n tokens of a longer sequence, for n = 1, 2, ... The last bound also
        holds for every larger n."""
        ends = range(1, max(len(self._certificate.error_bound), 1) + 1)
        curve = [bounds.bound(self._certificate, known, known + 1) for known in ends]
        return tuple(None if bound is None else bound.variation for bound in curve)

    async def _cut_off_at(self, known: range, plan: ChunkPlan) -> list[float | None]:
        """Returns the bounds of answers from the last n tokens of a truncated sequence, for each n in `known`. `plan`
        describes the run up to the last of these answers, and its joints."""
        readout, curve = self._readout, self._certificate.state_error
        if readout is not None and curve and plan.norms:
            effect = self._effect(plan, readout)
            if effect is not None:
                read = np.minimum(np.array(known, np.intp), len(curve))
                states = np.array(curve)[read - 1] * (1 + readout.gate) ** read
                states += readout.between_all(plan.norms[-1], effect)
                variations: list[float | None] = total_variation(self._certificate.head_diameter, states).tolist()
                return variations
        joints = await self._bound(plan)
        cut_off = [self._cut_off[min(tokens, len(self._cut_off)) - 1] for tokens in known]
        return [None if bound is None or joints is None else min(bound + joints, 1.0) for bound in cut_off]

    async def _meets(self, tolerance: float, plan: ChunkPlan) -> bool:
        """Returns whether the bound of a run meets the tolerance."""
        bound = await self._bound(plan)
        return bound is not None and bound <= tolerance

    async def _bound(self, plan: ChunkPlan) -> float | None:
        """Returns the bound of the total variation between answers of this run and of the run in order."""
        if not plan.residual:
            rounding = bounds.bound(self._certificate, 0, 0)  # no token is missing
            return None if rounding is None else rounding.variation
        if not self._bounded or plan.warm_up is None:
            return None
        known = plan.warm_up + 1
        curve, moved = bounds.bound(self._certificate, known, known + 1), await self._moved(plan)
        return moved if curve is None else min(moved, curve.variation)

    @property
    def _bounded(self) -> bool:
        """Whether the certificate gives any bound."""
        certificate = self._certificate
        return certificate.has_rounding and bool(certificate.error_bound or self.propagation)

    async def _moved(self, plan: ChunkPlan) -> float:
        """Returns the bound of the total variation that the measured differences at the joints can cause; 1 if it is
        unknown."""
        if self._readout is not None and plan.norms:
            effect = self._effect(plan, self._readout)
            if effect is None:
                return 1.0
            apart = max(float(self._readout.between_all(norms, effect).max()) for norms in plan.norms)
        else:
            rounding = self._certificate.between_runs()
            if self.propagation is None or rounding is None:
                return 1.0
            caused = await self._aside(partial(self.propagation.apart, plan.joints, plan.apart or MAX_TOKENS))
            if caused is None:
                return 1.0
            apart = caused + rounding
        return float(total_variation(self._certificate.head_diameter, np.array(apart)))

    def _effect(self, plan: ChunkPlan, readout: Readout) -> float | None:
        """Returns the bound of the 2-norm distance that the joints cause at the sum after the mixing matrix. None if it
        is unknown."""
        if not plan.residual:
            return 0.0
        if self.propagation is None:
            return None
        return self.propagation.mixed(plan.joints, plan.apart or MAX_TOKENS, readout.gate)

    async def _lists(
        self,
        request: ScoreRequest,
        input_ids: NDArray[np.int64],
        first: int,
        hiddens: NDArray[np.float32] | None,
        scored: NDArray[np.float64],
        ticket: Ticket,
    ) -> list[tuple[Prediction, ...]]:
        """Returns the most probable tokens at the position of each of the n tokens of `input_ids` that follow index
        `first`. `scored`: float64 (n), the log-probabilities of these tokens from the scoring run. `hiddens`: float32
        (n, H), the output layer's inputs from which the scoring run predicted these tokens, if the graph outputs them.

        Each list contains the text's own token at that position. In the list, this token has the log-probability from
        the scoring run, so that the list and `logprobs` contain the same float. That log-probability may differ by
        rounding from the one that `head` gives. The log-probabilities of other tokens in the list are then changed as
        little as necessary to keep the list in the same order.
        """
        top_k = request.top_k
        assert top_k is not None, "the score request has no top_k: this is a bug"
        vocabulary, cache = self._builder.vocabulary, self._cache if request.cache else None
        omitted = vocabulary.never_drawn(include_unknown=request.include_unknown)
        starts = 0 if request.truncated else len(self._start_tokens)  # the cache has no start token
        lists: list[tuple[Prediction, ...]] = []

        def predictions(result: RunResult, place: int) -> tuple[Prediction, ...]:
            if cache is not None:
                history = input_ids[max(starts, place - cache.length) : place]
                result = result.mix(cache, history, place - starts + request.truncated)
            token, logprob = int(input_ids[place]), scored.item(place - first - 1)
            listed = most_probable(log_softmax(result.logits), top_k, token, vocabulary, omitted)
            return with_own(listed, token, logprob)

        async with aclosing(self._results(input_ids, first, len(scored), hiddens, ticket)) as results:
            async for result in results:
                place = first + len(lists) + 1
                lists.append(await self._builder.turns.run(vocabulary.size, partial(predictions, result, place)))
        return lists

    async def _results(
        self,
        input_ids: NDArray[np.int64],
        first: int,
        count: int,
        hiddens: NDArray[np.float32] | None,
        ticket: Ticket,
    ) -> AsyncGenerator[RunResult, None]:
        """Yields the result after each of `count` tokens, starting with the token at index `first`. Computes it from
        `hiddens`: see `_lists`. The graphs of bundles with the manifest's schema 3 do not output `hiddens`. With these
        graphs, every token runs as one step."""
        if hiddens is not None:
            for start in range(0, count, HEADS_AT_ONCE):
                for result in await self._forward.heads(hiddens[start : start + HEADS_AT_ONCE], ticket):
                    yield result
            return
        with self._pool.lease() as slot:
            read = ZERO
            if first:
                await self._forward.append(input_ids[:first], ticket, read=ZERO, write=slot)
                read = slot
            for place in range(first, first + count):
                yield await self._forward.append(input_ids[place : place + 1], ticket, read=read, write=slot)
                read = slot


def with_own(listed: Sequence[Prediction], token: int, logprob: float) -> tuple[Prediction, ...]:
    """Returns the predictions, with `logprob` as the log-probability of `token`, which must be one of the predictions.
    Changes other log-probabilities where necessary to keep the descending order."""
    own = next(index for index, prediction in enumerate(listed) if prediction.token_id == token)
    least, ties = math.nextafter(logprob, math.inf), listed[own].logprob
    changed: list[Prediction] = []
    for index, prediction in enumerate(listed):
        value = prediction.logprob
        if index == own:
            value = logprob
        elif index < own:
            value = max(value, logprob if value == ties else least)
        else:
            value = min(value, logprob)
        if value != prediction.logprob:
            prediction = structs.replace(prediction, logprob=value, probability=math.exp(min(value, 0.0)))
        changed.append(prediction)
    return tuple(changed)
