"""Answers the rows of a batch of steps. The rows that ask nothing are answered by arrays, all at once. The others are
answered one by one, by `AnswerBuilder`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.service.batching.batch import ANSWERS, Row
from wane.service.batching.ticket import Ticket
from wane.service.engine import bounds
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.bounds import StepBounds
from wane.service.engine.forward import RunResult
from wane.service.engine.live_accuracy import LiveAccuracy
from wane.service.engine.logits import Ranking, excluded_by_each, largest_of_each
from wane.service.engine.pending import Admission, Pending
from wane.service.engine.stats import Made
from wane.service.engine.steps.rows import IS_DONE, StepBatch, StepRow
from wane.service.errors import as_result
from wane.service.runners.outputs import FEW, Largest, Outputs, TopColumns
from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, NORMS, TOP_IDS
from wane.service.sessions.resident import ResidentSessions
from wane.service.types.answer import Answer, Prediction
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import NO_FILTER, Latency, id_of

Float = TypeVar("Float", np.float32, np.float64)

NO_TOKENS = np.empty(0, np.int64)
NO_SCORES = np.empty((0, 0))
VARIATION, PROVED = attrgetter("error_bound"), attrgetter("top1_proved")
SEARCHED_AT_ONCE = 1 << 17
"""The largest number of logits of one batch that are searched for rows whose filters exclude nearly all listed tokens.
It takes about 2 ms of the event loop. If there are more, these rows are answered alone."""
KNOWN_BOUNDS = 4096  # number of cached bounds, one for each number of tokens that a state has read


class StepAnswer(Answer):
    """The answer to a step that was answered by arrays."""


class Times(NamedTuple):
    """When the run of a batch started, by `time.perf_counter`; how long it took, in seconds; and its number of rows."""

    started_s: float
    compute_s: float
    items: int


class Asking(NamedTuple):
    """What is known of a row that asks more than the next token, before its commit. input_ids: the kept part of the
    model's input up to and including the row's token, if the answer depends on it. sampled: whether a shadow repeats
    the answer. is_alone: whether the row is answered alone, not by arrays."""

    input_ids: NDArray[np.int64]
    sampled: bool
    is_alone: bool


class Single(NamedTuple):
    """A row that is answered alone. latency: that of the run. sampled: whether a shadow repeats the answer. waits:
    whether its answer waits for a proof, or for a turn of the event loop, after the commit."""

    plan: AnswerPlan
    result: RunResult
    latency: Latency
    input_ids: NDArray[np.int64]
    ticket: Ticket
    sampled: bool
    waits: bool


class Listed(NamedTuple):
    """The most probable tokens of B rows, up to the largest `top_k` of the batch, whether the first token is proved,
    and the bounds. cache_tokens: the number of tokens in each row's cache; None if the model has no cache."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    probabilities: list[list[float]]
    proved: list[bool]
    bounds: StepBounds
    cache_tokens: list[int] | None = None


class Kept(NamedTuple, Generic[Float]):
    """The most probable tokens of B rows that may be listed: (B, K). fewest: the number of first tokens that may be
    listed in all rows but those of which few remain, at least 2. searched: the rows whose tokens were searched among
    all, and their scores, float64 (R, K), which are not in `values`."""

    ids: NDArray[np.int64]
    values: NDArray[Float]
    fewest: int
    searched: Sequence[int] = ()
    scores: NDArray[np.float64] = NO_SCORES


class Prepared(NamedTuple):
    """The answers to the steps of one batch, before the steps are committed. `singles` has the rows that are answered
    alone, or the error of the attempt. answers: those by arrays, for all rows; empty if all are answered alone. ids:
    the ids of their tokens, or more. queue_s, total_s: their durations, float64 (B). positions: the sessions' positions
    after the steps, int64 (B)."""

    answers: list[StepAnswer]
    ids: list[list[int]]
    queue_s: NDArray[np.float64]
    compute_s: float
    total_s: NDArray[np.float64]
    positions: NDArray[np.int64]
    singles: dict[int, Single | Exception]


class StepAnswers:
    """Answers one model's steps of one token. All methods must be called on the event loop's thread."""

    def __init__(
        self,
        builder: AnswerBuilder,
        resident: ResidentSessions,
        admission: Admission,
        most_predictions: int,
        live: LiveAccuracy | None = None,
    ) -> None:
        """`most_predictions` is the largest top_k for which the step graph outputs enough tokens; if 0, no row is
        answered by arrays. `live` counts the accuracy of the answers; None without the setting `live_accuracy`."""
        self.builder = builder
        self.resident = resident
        self.admission = admission
        self.most_predictions = most_predictions
        self._live = live
        self._unlisted = builder.vocabulary.unlisted
        certificate = builder.certificate
        # The bound of an answer from a state that has read the last `known` tokens; 0: the whole sequence.
        self._bound_of = lru_cache(KNOWN_BOUNDS)(lambda known: bounds.bound(certificate, known or 1, known + 1))
        self._bounds_of_all = StepBounds.of([self._bound_of(0)])

    def asking(self, batch: StepBatch) -> dict[int, Asking]:
        """Returns the rows that ask more than the next token. Must be called before the commit."""
        sampler, most = self.builder.sampler, self.most_predictions
        if sampler is None and batch.is_plain:
            return {}
        rows = {}
        for index, row in enumerate(batch.rows):
            sampled = sampler is not None and sampler.chosen()
            is_alone = sampled or not row.is_of_arrays(most)
            if is_alone or row.has_filter:
                input_ids = self._input_ids(row, sampled=sampled, is_alone=is_alone)
                rows[index] = Asking(input_ids, sampled, is_alone)
        return rows

    def prepare(
        self,
        batch: StepBatch,
        positions: NDArray[np.int64],
        dropped_tokens: NDArray[np.int64],
        asking: dict[int, Asking],
        times: Times,
    ) -> Prepared:
        """Computes the answers to the batch's steps. positions: the sessions' positions after the steps, int64 (B).
        dropped_tokens: the number of first tokens that each state has not read, int64 (B). asking: the result of
        `asking`."""
        rankings = dict[int, Ranking]()
        made: dict[int, Single | Exception] = {}
        for row, asked in asking.items():
            if not asked.is_alone:
                try:
                    rankings[row] = self._ranking(batch.rows[row], positions.item(row), asked.input_ids)
                except Exception as error:  # the other steps are answered
                    made[row] = as_result(error)
        filtered = rankings.copy()
        answers, ids = list[StepAnswer](), list[list[int]]()
        queue_s = total_s = times.started_s - batch.queued_s
        if rankings or len(asking) < len(positions):
            try:
                answers, ids, total_s = self._by_arrays(batch, positions, dropped_tokens, rankings, queue_s, times)
                if batch.may_wait:
                    for index, step in enumerate(batch.rows):
                        if step.waiting and (index in rankings or index not in asking):
                            answers[index].latency = self._ticket(step, times).latency()
            except Exception as error:  # no step may wait for ever for its answer
                made |= {row: error for row in range(len(batch.rows)) if row in rankings or row not in asking}
        outputs: Outputs | None = None  # one object for all rows, because it caches what they share
        for row, (input_ids, sampled, _) in asking.items():
            if row in rankings or row in made:  # answered by arrays, or failed
                continue
            outputs = batch.outputs.only(ANSWERS) if outputs is None else outputs
            step, position, dropped = batch.rows[row], positions.item(row), dropped_tokens.item(row)
            ticket, request = self._ticket(step, times), step.as_request()
            try:
                ranking = filtered.get(row)
                if ranking is None:
                    ranking = self._ranking(step, position, input_ids)
                elif self.builder.cache is not None:  # the graph outputs too few tokens for the filter
                    input_ids = self._in_order(step, ())
                origin = StateSource.REBUILT if step.was_rebuilt else StateSource.RESIDENT
                plan = AnswerPlan(Mode.RECURRENT, position, None, origin, position - dropped, ranking, request.cache)
                norms = batch.outputs[NORMS][row].tolist() if NORMS in batch.outputs else None
                result = RunResult(Row(outputs, row, norms=norms))
            except Exception as error:  # the other steps are answered
                made[row] = as_result(error)
            else:
                waits = request.prove or request.logits or self.builder.work(plan, request.top_k) > 0
                made[row] = Single(plan, result, ticket.latency(), input_ids, ticket, sampled, waits)
        return Prepared(answers, ids, queue_s, times.compute_s, total_s, positions, made)

    def deliver(
        self, batch: StepBatch, prepared: Prepared, rows: Sequence[int], durable: Sequence[bool | None] | None = None
    ) -> None:
        """Answers the committed `rows`, whose requests must still count as active. durable: see `SessionRecord`, for
        each row of the batch."""
        answers, singles, live, steps = prepared.answers, prepared.singles, self._live, batch.rows
        if live is not None:
            after = prepared.positions.tolist()
            live.judge([steps[index].first_token(after[index]) for index in rows])
        if answers:
            together = [row for row in rows if row not in singles] if singles else rows
            try:
                self._count(prepared, batch, together)
            except Exception as error:  # the steps are answered
                report = {"message": "the answers of a batch of steps were not counted", "exception": error}
                asyncio.get_running_loop().call_exception_handler(report)
            if live is not None:
                awaited = [(index, row) for index in together if (row := steps[index]).is_awaited]
                live.keep([(row.session, after[index], prepared.ids[index][: row.top_k]) for index, row in awaited])
            for index in together:
                answer = answers[index]
                if durable is not None:
                    answer.durable = durable[index]
                steps[index].answer(answer)
        for index in rows if singles else ():
            single = singles.get(index)
            if isinstance(single, Single):
                self._answer(steps[index], single, None if durable is None else durable[index])
            elif single is not None:
                steps[index].fail(single)

    def _input_ids(self, row: StepRow, *, sampled: bool, is_alone: bool) -> NDArray[np.int64]:
        """Returns the kept part of the model's input: see `SessionSteps`. If only the row's filter needs it, returns
        the sequence's kept tokens in any order. If nothing needs it, returns an empty array."""
        is_in_order = sampled or (is_alone and self.builder.cache is not None)
        if not is_in_order and (row.request is None or not row.request.filter.exclude_seen):
            return NO_TOKENS
        if is_in_order or row.stored is not None:
            return self._in_order(row, (row.token,))
        return np.concatenate([self.resident.seen(row.slot), np.array([row.token])])

    def _in_order(self, row: StepRow, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Returns the kept part of the model's input in order, up to and including the row's token: int64. `tokens` are
        those of the step that a buffered session has not appended yet."""
        if row.stored is None:
            tail, position = self.resident.tail(row.slot)
        else:
            tail, position, tokens = row.stored.record.tail, row.stored.record.position, row.stored.tokens
        kept = tail.ids()
        if position <= len(kept) and not self.builder.manifest.start_tokens:
            kept = kept[1:]  # without <eos>, which the model does not read
        return np.concatenate([kept, np.array(tokens, np.int64)])

    def _ticket(self, row: StepRow, times: Times) -> Ticket:
        """Returns the ticket of a row that is answered alone, with its latencies."""
        ticket = row.waiting
        if ticket is None:
            ticket = Ticket(row.deadline)
            ticket.admitted, ticket.traced = True, row.traced
            ticket.started_s, ticket.entered = row.queued_s, True
        ticket.queue_s += times.started_s - row.queued_s
        ticket.compute_s += times.compute_s
        ticket.batch_items = max(ticket.batch_items, times.items)
        return ticket

    def _ranking(self, row: StepRow, position: int, input_ids: NDArray[np.int64]) -> Ranking:
        """Returns the ranking for the filter of a row."""
        known = input_ids[max(len(input_ids) - position, 0) :]
        return self.builder.rankings.of(NO_FILTER if row.request is None else row.request.filter, known)

    def _answer(self, row: StepRow, single: Single, durable: bool | None) -> None:
        """Answers a committed row alone. A proof is searched only now, so that the step is committed even if the client
        cancels the request during a long search."""
        plan, result, latency, input_ids, ticket, sampled, waits = single
        request, stored, builder = row.as_request(), row.stored, self.builder

        def answer(part: ModeResult) -> Answer:
            made = builder.answer(plan, input_ids, part, None, request, ticket, sampled=sampled)
            made.replayed, made.durable = False, durable
            made.with_details(made.logits, row.token_logprobs)
            if stored is not None and stored.creator is not None:
                made.created = True
            if row.waiting is None:  # otherwise the general procedure counts the step
                builder.stats.made(made, None if row.done() else "step")
            if self._live is not None and row.is_awaited:
                self._live.answered(row.session, plan.position, made)
            return made

        async def finish() -> Answer:
            await builder.take_turn(plan, request)
            part = builder.part(plan, result, latency, input_ids, recurrent=True)
            if request.prove:
                part = await builder.search(plan, part, ticket)
            if request.prove or request.logits:
                await builder.take_turn(plan, request, part)
            return answer(part)

        if waits and not row.is_awaited:
            row.cancel()  # ends the general procedure, which may wait for the row
            return
        if waits:
            self.admission.extend()
            ticket.answering = True
            pending = Pending.of(finish(), ticket)
            pending.add_done_callback(lambda _: self.admission.leave())
            row.follow(pending)
            return
        try:
            row.answer(answer(builder.part(plan, result, latency, input_ids, recurrent=True)))
        except Exception as error:  # the step is committed, but has no answer
            row.fail(error)

    def _by_arrays(
        self,
        batch: StepBatch,
        positions: NDArray[np.int64],
        dropped: NDArray[np.int64],
        rankings: dict[int, Ranking],
        queue_s: NDArray[np.float64],
        times: Times,
    ) -> tuple[list[StepAnswer], list[list[int]], NDArray[np.float64]]:
        """Returns the answers to the batch's steps by arrays, and the ids and the durations: see `Prepared`.
        rankings: the rankings of rows with a filter. Removes those for which too few tokens are found: these rows are
        answered alone."""
        outputs, builder, after = batch.outputs, self.builder, positions.tolist()
        of_network = self._bounds(positions, dropped, outputs)
        width = outputs.most if rankings else min(max(FEW, batch.top_k + len(self._unlisted)), outputs.most)
        if builder.cache is None:
            listed = self._largest(of_network, batch, width, rankings)
        else:
            listed = self._largest_of_mixtures(of_network, builder.cache, batch, width, rankings, after)
        total_s = time.perf_counter() - batch.queued_s
        name, version, device = builder.identity
        text, partial = builder.vocabulary.texts.__getitem__, builder.vocabulary.partials.__getitem__
        compute_ms, items = 1e3 * times.compute_s, times.items
        columns = batch.rows, *listed[:4], *listed.bounds[:2], after, (1e3 * queue_s).tolist(), (1e3 * total_s).tolist()
        answers = [
            StepAnswer(
                name,
                version,
                device,
                Mode.RECURRENT,
                None,
                tuple(
                    map(Prediction, shown := ids[: row.top_k], map(text, shown), shares, logprobs, map(partial, shown))
                ),
                Latency(queue_ms, compute_ms, total_ms).with_batch(items),
                StateSource.RESIDENT,
                variation,
                state,
                proved,
                session=id_of(row.session),
                position=position,
                replayed=False,
            )
            for row, ids, logprobs, shares, proved, state, variation, position, queue_ms, total_ms in zip(
                *columns, strict=True
            )
        ]
        for row, ranking in rankings.items():
            answers[row].seen_tokens = ranking.seen_tokens
        for answer, tokens in zip(answers, listed.cache_tokens or (), strict=False):
            answer.cache_tokens = tokens
        return answers, listed.ids, total_s

    def _bounds(self, positions: NDArray[np.int64], dropped: NDArray[np.int64], outputs: Outputs) -> StepBounds:
        """Returns the bounds of the network's answers."""
        certificate = self.builder.certificate
        known = [0] * len(dropped)
        if has_dropped := np.count_nonzero(dropped) > 0:
            known = np.where(dropped, positions - dropped, 0).tolist()
        if certificate.readout is not None and certificate.has_rounding:
            return bounds.of_steps(certificate, known, outputs[NORMS])
        if has_dropped:
            return StepBounds.of([*map(self._bound_of, known)])
        states, variations, runs = self._bounds_of_all
        return StepBounds(states * len(known), variations * len(known), runs * len(known))

    def _largest(self, of_network: StepBounds, batch: StepBatch, width: int, rankings: dict[int, Ranking]) -> Listed:
        """Returns the most probable tokens, and whether the first of them is proved."""
        outputs = batch.outputs
        top = outputs.top(width)
        kept = self._listable(
            top.ids,
            top.logits,
            rankings,
            batch,
            lambda rows: np.stack([outputs.row("logits", row) for row in rows]),
        )
        ids, logits = kept.ids, kept.values
        if kept.searched:
            logits[kept.searched] = kept.scores
        logprobs = TopColumns(ids, logits, top.log_sum_exp).logprobs
        listed = ids.tolist(), logprobs.tolist(), np.exp(logprobs).tolist()
        proved = self._proved(of_network.runs, ids[:, : kept.fewest], logits[:, : kept.fewest], outputs)
        for row, ranking in rankings.items():
            if (error := of_network.runs[row]) < math.inf:
                first = Largest(listed[0][row][:2], logits[row, :2].tolist(), [], [])
                proved[row] = self.builder.margin.proves(ranking, first, Row(outputs, row), error)
        return Listed(*listed, proved, of_network)

    def _largest_of_mixtures(
        self,
        of_network: StepBounds,
        cache: CacheMixture,
        batch: StepBatch,
        width: int,
        rankings: dict[int, Ranking],
        positions: Sequence[int],
    ) -> Listed:
        """Like `_largest`, for mixtures with a cache. `of_network`: the bounds of the network's answers."""
        outputs = batch.outputs
        commits = batch.commits
        shares = self.resident.shares_of(commits) if commits else self.resident.shares(batch.slots)
        sums = outputs[LOG_SUM_EXP].astype(np.float64).reshape(-1)
        logits = outputs["logits"]
        ids, probabilities = cache.top(logits, sums, outputs[TOP_IDS], shares, width)
        kept = self._listable(
            ids,
            probabilities,
            rankings,
            batch,
            lambda rows: cache.log_probabilities(logits[rows], shares.part(rows, cache.vocabulary_size)).astype(
                np.float32
            ),
        )
        ids, probabilities = kept.ids, kept.values
        if kept.searched:
            probabilities[kept.searched] = np.exp(kept.scores)
        logprobs = np.log(probabilities)
        if kept.searched:
            logprobs[kept.searched] = kept.scores
        states, variations, runs = of_network
        tokens, weights = shares.tokens.tolist(), shares.network.tolist()
        unknown = [cache.unknown(*known) for known in zip(tokens, positions, strict=True)]
        mixed = [
            None if variation is None else bounds.variation_of_mixture(variation, weight, more)
            for variation, weight, more in zip(variations, weights, unknown, strict=True)
        ]
        errors = [math.inf if more else error for error, more in zip(runs, unknown, strict=True)]
        proved = [False] * len(errors)
        if min(errors) < math.inf:
            proved = self.builder.margin.proves_mixtures(
                probabilities, outputs.lengths, shares.network, np.array(errors)
            ).tolist()
        listed = ids.tolist(), logprobs.tolist(), probabilities.tolist()
        return Listed(*listed, proved, StepBounds(states, mixed, runs), tokens)

    def _listable(
        self,
        ids: NDArray[np.int64],
        values: NDArray[Float],
        rankings: dict[int, Ranking],
        batch: StepBatch,
        scores_of: Callable[[list[int]], NDArray[np.float32]],
    ) -> Kept[Float]:
        """Returns which of the K most probable tokens of each of B rows, (B, K), may be listed. If fewer than `top_k`
        tokens of a row remain, searches the scores of all tokens, which `scores_of` returns for some rows: (R, V).
        Removes the rankings of rows for which that would take long, or in which too few tokens remain even then."""
        if not rankings:
            most, is_unlisted = ids.shape[1] - len(self._unlisted), None
            for token in self._unlisted:  # faster than np.isin for the usual one or two tokens
                is_token = ids == token
                is_unlisted = is_token if is_unlisted is None else is_unlisted | is_token
            if is_unlisted is None or not np.count_nonzero(is_unlisted):
                return Kept(ids[:, :most], values[:, :most], most)
            every = np.arange(len(ids))[:, None]
            order = np.argsort(is_unlisted, axis=1, kind="stable")[:, :most]
            return Kept(ids[every, order], values[every, order], most)
        # The tokens that may not be listed are moved behind the others.
        every = np.arange(len(ids))[:, None]
        excluded = self.builder.rankings.default.excludes(ids)
        asking = [*rankings]
        excluded[asking] = excluded_by_each([*rankings.values()], ids[asking])
        kept: list[int] = (ids.shape[1] - np.count_nonzero(excluded, axis=1)).tolist()
        order = np.argsort(excluded, axis=1, kind="stable")[:, : max(FEW, batch.top_k)]
        ids, values, most = ids[every, order], values[every, order], order.shape[1]
        too_few: list[int] = [row for row in rankings if kept[row] < max(batch.rows[row].top_k, 2)]
        searched: list[int] = []
        scores = NO_SCORES
        if too_few and len(too_few) * self.builder.vocabulary.size <= SEARCHED_AT_ONCE:
            best_ids, scores = largest_of_each([rankings[row] for row in too_few], scores_of(too_few), most)
            is_whole: NDArray[np.bool_] = np.isfinite(scores[:, -1])
            searched, scores = [*compress(too_few, is_whole.tolist())], scores[is_whole]
            ids[searched] = best_ids[is_whole]
        for row in {*too_few}.difference(searched):
            del rankings[row]
        # Of the other rows, those without a filter have at least 2 tokens: see `most_predictions`.
        fewest = min([most, *[kept[row] for row in range(len(kept)) if row not in too_few]])
        return Kept(ids, values, max(fewest, 2), searched, scores)

    def _proved(
        self, runs: Sequence[float], ids: NDArray[np.int64], logits: NDArray[np.float64], outputs: Outputs
    ) -> list[bool]:
        """Returns, for each row, whether the margin proof succeeds. runs: see `StepBounds`."""
        if min(runs) == math.inf:
            return [False] * len(runs)
        if len(runs) <= bounds.FEW_ROWS:
            return self._proved_one_by_one(runs, ids, logits, outputs)
        errors = np.array(runs)
        known = errors < math.inf
        errors[~known] = 0.0
        settled = self.builder.margin.settled(ids, logits, outputs.lengths, errors)
        proved = (settled == 1) & known
        for row in np.flatnonzero((settled < 0) & known).tolist():
            proved[row] = self._has_no_rival(outputs, row, ids.item(row, 0), errors.item(row))
        flags: list[bool] = proved.tolist()
        return flags

    def _proved_one_by_one(
        self, runs: Sequence[float], ids: NDArray[np.int64], logits: NDArray[np.float64], outputs: Outputs
    ) -> list[bool]:
        """Like `_proved`, for few rows, for which Python is faster than some twenty numpy calls."""
        flags: list[bool] = []
        lengths = outputs.lengths
        rows = zip(runs, ids[:, :2].tolist(), logits[:, :2].tolist(), lengths.tolist(), strict=True)
        for row, (error, (first, second), (highest, next_one), length) in enumerate(rows):
            if error == math.inf:
                flags.append(False)
                continue
            settled = self.builder.margin.settles(first, second, highest - next_one, length, error)
            if settled is None:
                at, errors = slice(row, row + 1), np.array([error])
                (sign,) = self.builder.margin.settled(ids[at], logits[at], lengths[at], errors).tolist()
                settled = sign == 1 or (sign < 0 and self._has_no_rival(outputs, row, first, error))
            flags.append(settled)
        return flags

    def _has_no_rival(self, outputs: Outputs, row: int, first: int, error: float) -> bool:
        logits, hidden = outputs.row("logits", row), outputs.row(HIDDEN, row)
        return self.builder.margin.has_no_rival(logits, hidden, error, first, among=self.builder.rankings.default.ids)

    def _count(self, prepared: Prepared, batch: StepBatch, rows: Sequence[int]) -> None:
        """Counts the answers of rows that the general procedure does not count."""
        answers, _, queue_s, compute_s, total_s, *_ = prepared
        steps: Sequence[StepRow] = batch.rows
        if batch.may_wait:
            rows = [row for row in rows if steps[row].waiting is None]
        if len(rows) < len(steps):
            answers, steps = [answers[row] for row in rows], [steps[row] for row in rows]
            queue_s, total_s = queue_s[[*rows]], total_s[[*rows]]
        variations, proved = [*map(VARIATION, answers)], sum(map(PROVED, answers))
        phases, awaited = (queue_s, [compute_s] * len(rows), total_s), [*map(IS_DONE, steps)].count(False)
        self.builder.stats.add(Made(Mode.RECURRENT, phases, variations, proved, "step", awaited))
