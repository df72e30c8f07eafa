"""Builds an `Answer` from the runs of a request. Adds the answer's latencies, error bounds, proof and agreement."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.models.manifest import Certificate, Manifest
from wane.models.vocabulary import Vocabulary
from wane.service.batching.ticket import Ticket
from wane.service.batching.turns import HEAVY_TOKENS, Turns
from wane.service.engine import agreement, bounds
from wane.service.engine.agreement import Source
from wane.service.engine.bounds import Bound
from wane.service.engine.forward import Forward, Mixed, RunResult, tail
from wane.service.engine.logits import Ranking, Rankings, listed
from wane.service.engine.stats import Stats
from wane.service.engine.top1_proof import DirectionProof, MarginProof
from wane.service.types.answer import Agreement, Answer, ModeAnswer, Prediction
from wane.service.types.common import Identity, Mode, StateSource
from wane.service.types.request import Latency, PredictRequest, StepRequest, id_of

Predicting = PredictRequest | StepRequest
"""A request whose answer is an `Answer`."""

SMALL_ENOUGH = 1e-3
"""If the margin proof succeeds and the bound on the total variation is at most this value, the gradient proof is not
run."""


class AnswerPlan(NamedTuple):
    """The plan for the answer to a request at `position`.

    `mode` is recurrent, window or both. In mode both, the answer has two parts: a recurrent part and a window part.
    Otherwise it has one part. `window` is k, the window's number of tokens; None in mode recurrent. `origin` is the
    source of the recurrent part's state. `context_length` is the number of latest tokens that this state has read.
    `ranking` selects the tokens that the answer may list. `cache` says whether the answer is mixed with the model's
    cache, if the model has one.
    """

    mode: Mode
    position: int
    window: int | None
    origin: StateSource
    context_length: int
    ranking: Ranking
    cache: bool = True

    @property
    def state(self) -> StateSource:
        """The source of the answer's state."""
        return StateSource.WINDOW if self.mode is Mode.WINDOW else self.origin

    def bound(self, certificate: Certificate) -> Bound | None:
        """Returns the answer's bound as far as it is known before the run (`bounds.expected`). The run may output a
        radius that gives a smaller bound."""
        return bounds.expected(certificate, self._known(self.mode is not Mode.WINDOW), self.position)

    def bound_of(
        self,
        certificate: Certificate,
        recurrent: bool,
        radius: float | None = None,
        norms: Sequence[float] | None = None,
    ) -> Bound | None:
        """Returns the bound of the recurrent part or, if not `recurrent`, of the window part. `radius`, `norms`: see
        `bounds.bound`."""
        return bounds.bound(certificate, self._known(recurrent), self.position, radius, norms)

    def _known(self, recurrent: bool) -> int:
        """Returns the number of latest tokens that the recurrent or the window part has read."""
        known = self.context_length if recurrent else self.window
        assert known is not None, "the plan of a window part has no k: this is a bug"
        return known


class ModeResult(NamedTuple):
    """The result of one mode's run, with the answer's bound and latency. `proved` says whether `AnswerBuilder.search`
    proved that the never-interrupted model has the same most probable token. `cached`: see `Answer.cached_tokens`."""

    result: RunResult
    bound: Bound | None
    latency: Latency
    proved: bool = False
    cached: int = 0


class Sampler(Protocol):
    """Selects the live answers that the shadow repeats in the other mode."""

    def chosen(self) -> bool:
        """Returns whether the next answer is sampled. Call it once for each answer."""
        ...

    def offer(self, plan: AnswerPlan, input_ids: NDArray[np.int64], live: ModeResult) -> None:
        """Receives a sampled answer of one mode. `input_ids` are all available tokens up to the plan's position."""
        ...


FEW_PREDICTIONS, TOKENS_OF_A_PREDICTION = 20, 20
"""Listing a prediction takes about as long as reading the logits of 20 tokens."""


class AnswerBuilder:
    """Builds the answers of one model."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        vocabulary: Vocabulary,
        margin: MarginProof,
        forward: Forward,
        stats: Stats,
        prover: Executor,
        cache: CacheMixture | None = None,
        direction: DirectionProof | None = None,
    ) -> None:
        """`prover` runs the gradient proofs of `direction` on a thread of its own, because they would block the event
        loop. `cache` is the model's cache, if it has one."""
        self.manifest = manifest
        self.certificate = manifest.certificate
        self.identity = identity
        self.vocabulary = vocabulary
        self.margin = margin
        self.forward = forward
        self.stats = stats
        self.prover = prover
        self.rankings = Rankings(vocabulary)
        self.turns = Turns()
        self.cache = cache
        self.direction = direction
        self.sampler: Sampler | None = None

    def work(self, plan: AnswerPlan, top_k: int = 0) -> int:
        """Returns how many tokens are read for a part or an answer: none if the graph lists the few tokens that are
        needed."""
        listed = TOKENS_OF_A_PREDICTION * top_k
        if plan.cache and self.cache is not None:
            return self.vocabulary.size + self.cache.most_added + listed
        if plan.ranking is not self.rankings.default:
            return self.vocabulary.size + listed
        return listed if top_k > FEW_PREDICTIONS else 0

    async def take_turn(
        self, plan: AnswerPlan, request: Predicting | None = None, answered: ModeResult | None = None
    ) -> None:
        """Waits for a turn of the event loop in which to make a part or an answer that needs all logits, or lists many
        tokens: all answers of a batch are ready in the same turn. `request` and the part `answered` are given for an
        answer. If the request asks for many logits, a thread computes them."""
        if work := self.work(plan, 0 if request is None else request.top_k):
            await self.turns.take(work)
        if request is not None and request.logits and answered is not None and self.vocabulary.size >= HEAVY_TOKENS:
            await asyncio.to_thread(getattr, answered.result, "logits")  # mixes all logits with the cache, once

    def part(
        self,
        plan: AnswerPlan,
        result: RunResult,
        latency: Latency,
        input_ids: NDArray[np.int64],
        *,
        recurrent: bool,
    ) -> ModeResult:
        """Returns the recurrent or the window part of a plan, built from the `result` of that part's run. `input_ids`:
        all available tokens up to the plan's position. These tokens begin with the start token if they are the whole
        sequence.
        """
        of_network = plan.bound_of(self.certificate, recurrent, result.row.radius, result.row.norms)
        if plan.cache and self.cache is not None:
            # whether `input_ids` begins with the start token
            starts = len(input_ids) > plan.position or not plan.context_length
            history = input_ids[1:] if starts else input_ids
            result = result.mix(self.cache, history, plan.position)
        return ModeResult(result, result.bound(of_network), latency)

    async def made(
        self,
        plan: AnswerPlan,
        result: RunResult,
        input_ids: NDArray[np.int64],
        ticket: Ticket,
        *,
        recurrent: bool = True,
        since: Ticket | None = None,
        prove: bool = False,
    ) -> ModeResult:
        """Like `part`, but waits for a turn of the event loop first. If `prove`, calls `search`. `since`: see
        `Ticket.latency`."""
        await self.take_turn(plan)
        part = self.part(plan, result, ticket.latency(since=since), input_ids, recurrent=recurrent)
        return await self.search(plan, part, ticket) if prove else part

    async def window(
        self,
        plan: AnswerPlan,
        input_ids: NDArray[np.int64],
        ticket: Ticket,
        *,
        prove: bool,
        binding: bool = False,
    ) -> ModeResult:
        """Runs the window part of a plan. `input_ids`: see `part`. If `prove`, calls `search`.

        The caller runs the window part after the recurrent part, not concurrently, so that the latency of one part does
        not include the run of the other part.
        """
        assert plan.window is not None, "the plan of a window part has no k: this is a bug"
        mark = ticket.mark() if plan.mode is Mode.BOTH else None
        result = await self.forward.window(tail(input_ids, plan.position, plan.window), ticket, binding=binding)
        return await self.made(plan, result, input_ids, ticket, recurrent=False, since=mark, prove=prove)

    async def search(self, plan: AnswerPlan, part: ModeResult, ticket: Ticket) -> ModeResult:
        """Runs the gradient proof on a part. Returns the part with the smaller of the old and the new bound on the
        total variation, and with `proved` set if the proof succeeds. Returns the part unchanged if the gradient proof
        is impossible or unnecessary. It is impossible if the part has no bound, or if its result has no `WindowTrace`.
        It is unnecessary if the part's state has read all tokens, or if the margin proof succeeds and the bound is at
        most SMALL_ENOUGH.

        Waits for the thread that runs the proofs. The wait ends if the caller is cancelled or its deadline passes.
        """
        result, bound, direction = part.result, part.bound, self.direction
        if bound is None or bound.runs is None or not bound.state or direction is None:
            return part
        leads, mixed = self._leads(plan, result, bound), result.mixed
        if leads and bound.variation <= SMALL_ENOUGH:
            return part
        trace = result.row.trace
        if trace is None:
            return part
        first: int | None = None
        if not leads and (mixed is None or not mixed.unknown):
            first = next(iter(plan.ranking.largest(result, 1).ids), None)
        weight, added = (1.0, None) if mixed is None else (mixed.weight, mixed.added)
        ticket.answering = True
        proved, variation = await asyncio.get_running_loop().run_in_executor(
            self.prover, direction.search, trace, first, weight, added, plan.ranking.ids
        )
        searched = result.bound(bound._replace(variation=variation))
        assert searched is not None, "the mixture has no bound although its network has one: this is a bug"
        return part._replace(bound=bound._replace(variation=min(bound.variation, searched.variation)), proved=proved)

    def answer(
        self,
        plan: AnswerPlan,
        input_ids: NDArray[np.int64],
        recurrent: ModeResult | None,
        window: ModeResult | None,
        request: Predicting,
        ticket: Ticket,
        *,
        searched: bool = False,
        sampled: bool | None = None,
    ) -> Answer:
        """Builds the answer from a plan's parts, and counts it in the statistics. If there are two parts, the
        predictions come from the recurrent part. The caller has called `take_turn`.

        `input_ids`: see `part`. `searched` says whether `search` ran on the parts although the request does not set
        `prove`. If it ran, the answer's latency includes the time of the search. `sampled` says whether the shadow
        repeats the answer. If it is None, the sampler decides.
        """
        answered = recurrent or window
        assert answered is not None, "neither mode ran: this is a bug"
        prove, top_k, session = request.prove or searched, request.top_k, request.session
        predictions = self.predictions(answered.result, top_k, plan.ranking)
        pair: Agreement | None = None
        modes: dict[str, ModeAnswer] | None = None
        if recurrent is not None and window is not None:
            pair = self.apart(plan, recurrent, window)
            self.stats.compared(pair, Source.BOTH)
            modes = {
                Mode.RECURRENT: ModeAnswer(predictions, recurrent.latency),
                Mode.WINDOW: ModeAnswer(self.predictions(window.result, top_k, plan.ranking), window.latency),
            }
            for mode, part in modes.items():
                self.stats.took(Mode(mode), part.latency)
        elif (
            self.sampler is not None and plan.context_length and (self.sampler.chosen() if sampled is None else sampled)
        ):
            self.sampler.offer(plan, input_ids, answered)
        bound = answered.bound
        proved = answered.proved or self._leads(plan, answered.result, bound)
        if window is not None and plan.window is not None and window.bound is not None and window.bound.state:
            of_window = proved if pair is None else pair.top1_proved
            self.stats.reached(plan.window, prove, window.bound.variation, of_window)
        answer = Answer(
            *self.identity,
            mode=plan.mode,
            predictions=predictions,
            latency=ticket.latency() if prove or modes is not None else answered.latency,
            state=plan.state,
            error_bound=None if bound is None else bound.variation,
            state_error_bound=None if bound is None else bound.state,
            top1_proved=proved,
            window=plan.window,
            modes=modes,
            agreement=pair,
            session=None if session is None else id_of(session),
            position=None if session is None else plan.position,
            cache_tokens=None if answered.result.mixed is None else answered.result.mixed.tokens,
            unknown=request.unknown_names + request.filter.unknown or None,
            seen_tokens=plan.ranking.seen_tokens,
            cached_tokens=answered.cached,
        )
        if request.logits:
            # The logits are copied, because they may be a view that keeps the whole batch's logits in memory.
            answer.with_details(answered.result.logits.copy(), None)
        return answer

    def nothing(self, plan: AnswerPlan, request: Predicting, ticket: Ticket) -> Answer:
        """Returns the answer of a model with a zero start before the sequence's first token: an answer without
        predictions. Runs no graph."""
        session = request.session
        modes: dict[str, ModeAnswer] | None = None
        if plan.mode is Mode.BOTH:
            modes = {mode: ModeAnswer((), ticket.latency()) for mode in (Mode.RECURRENT, Mode.WINDOW)}
        return Answer(
            *self.identity,
            mode=plan.mode,
            window=plan.window,
            predictions=(),
            latency=ticket.latency(),
            state=plan.state,
            error_bound=None,
            state_error_bound=None,
            top1_proved=False,
            modes=modes,
            session=None if session is None else id_of(session),
            position=None if session is None else 0,
            cache_tokens=0 if request.cache and self.cache is not None else None,
            unknown=request.unknown_names + request.filter.unknown or None,
            seen_tokens=plan.ranking.seen_tokens,
        )

    def predictions(self, result: RunResult, top_k: int, ranking: Ranking) -> tuple[Prediction, ...]:
        """Returns the `top_k` most probable tokens of a result, among the tokens that `ranking` may list."""
        return listed(ranking.largest(result, top_k), top_k, self.vocabulary)

    def apart(self, plan: AnswerPlan, recurrent: ModeResult, window: ModeResult) -> Agreement:
        """Compares the recurrent part and the window part of an answer. May be called on any thread."""
        bound = _bound(plan, recurrent, window)
        of_recurrent, of_window = recurrent.result, window.result
        proved = (window.proved and bound is window.bound) or self._leads(plan, of_window, bound)
        return agreement.compare(
            of_recurrent.logits,
            of_window.logits,
            of_recurrent.hidden,
            of_window.hidden,
            bound,
            proved,
            plan.ranking.ids,
        )

    def _leads(self, plan: AnswerPlan, result: RunResult, bound: Bound | None) -> bool:
        """Returns whether the margin proof alone proves the first token of the list: the most probable token that the
        plan's ranking may list."""
        if bound is None or bound.runs is None:
            return False
        if result.mixed is not None:
            return self._leads_in_mixture(plan.ranking, result, result.mixed, bound.runs)
        return self.margin.proves(plan.ranking, plan.ranking.largest(result, 2), result.row, bound.runs)

    def _leads_in_mixture(self, ranking: Ranking, result: RunResult, mixed: Mixed, error: float) -> bool:
        if mixed.unknown:
            return False
        largest = ranking.largest(result, 2)
        if len(largest.ids) < 2:
            return bool(largest.ids) and math.isfinite(error)
        if not result.row.most:
            return self.margin.has_no_rival(
                result.network_logits, result.hidden, error, largest.ids[0], mixed.weight, mixed.added, ranking.ids
            )
        probabilities, weights, errors = np.array([largest.probabilities]), np.array([mixed.weight]), np.array([error])
        return bool(self.margin.proves_mixtures(probabilities, np.array([result.row.length]), weights, errors)[0])


def _bound(plan: AnswerPlan, recurrent: ModeResult, window: ModeResult) -> Bound | None:
    """Returns the bound on the distance between the answers of the two parts. This is the bound of the part that has
    read fewer tokens. That bound holds for the distance to any run that ends in the tokens of that part, and the other
    part is such a run."""
    assert plan.window is not None, "the plan of two parts has no k: this is a bug"
    return window.bound if plan.window <= plan.context_length else recurrent.bound
