"""Answers the rows of a batch of steps. The rows that ask nothing are answered by arrays, all at once. The others are
answered one by one, by `AnswerBuilder`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import ANSWERS, Row
from wane.service.batching.ticket import Ticket
from wane.service.engine import bounds
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.bounds import Bound
from wane.service.engine.forward import RunResult
from wane.service.engine.live_accuracy import LiveAccuracy
from wane.service.engine.logits import Ranking, excluded_by_each
from wane.service.engine.pending import Admission, Pending
from wane.service.engine.steps.rows import IS_DONE, StepBatch, StepRow
from wane.service.runners.outputs import FEW, Largest, Outputs, TopColumns
from wane.service.runners.runner import HIDDEN, LOG_SUM_EXP, NORMS, TOP_IDS
from wane.service.sessions.resident import ResidentSessions
from wane.service.sessions.sessions import StepKind
from wane.service.types.answer import Answer, Prediction
from wane.service.types.common import Identity, Mode, StateSource
from wane.service.types.request import NO_FILTER, Latency, id_of

Float = TypeVar("Float", np.float32, np.float64)

NO_TOKENS = np.empty(0, np.int64)
KNOWN_BOUNDS = 4096  # number of cached bounds, one for each number of tokens that a state has read


class StepResults:
    """The answers to the steps of one batch. Most fields are lists of B rows. `compute_s`, `batch_items`, `identity`,
    `vocabulary` and `durable` are the same for all rows.

    ids, logprobs, probabilities: the most probable tokens, up to the largest `top_k` of the batch. cache_tokens: the
    number of tokens in each row's cache; None if the model has no cache. seen_tokens: see `Answer`, for rows with a
    filter. latencies: the latencies of the rows that the general procedure waits for, which began before they were
    queued.
    """

    ids: list[list[int]]
    logprobs: list[list[float]]
    probabilities: list[list[float]]
    proved: list[bool]
    positions: list[int]
    bounds: Sequence[Bound | None]
    cache_tokens: list[int] | None
    queue_s: list[float]
    compute_s: float
    total_s: list[float]
    batch_items: int
    identity: Identity
    vocabulary: Vocabulary
    durable: bool | None = None
    seen_tokens: Mapping[int, int | None] = MappingProxyType({})
    latencies: Mapping[int, Latency] = MappingProxyType({})

    def answer(self, row: int, step: StepRow) -> StepAnswer:
        """Returns the answer to the `step` of a row."""
        bound, ids = self.bounds[row], self.ids[row][: step.top_k]
        texts, partials = map(self.vocabulary.texts.__getitem__, ids), map(self.vocabulary.partials.__getitem__, ids)
        return StepAnswer(
            *self.identity,
            Mode.RECURRENT,
            None,
            tuple(map(Prediction, ids, texts, self.probabilities[row], self.logprobs[row], partials)),
            self.latencies.get(row)
            or Latency(1e3 * self.queue_s[row], 1e3 * self.compute_s, 1e3 * self.total_s[row]).with_batch(
                self.batch_items
            ),
            StateSource.RESIDENT,
            None if bound is None else bound.variation,
            None if bound is None else bound.state,
            self.proved[row],
            session=id_of(step.session),
            position=self.positions[row],
            replayed=False,
            durable=self.durable,
            cache_tokens=None if self.cache_tokens is None else self.cache_tokens[row],
            seen_tokens=self.seen_tokens.get(row),
        )


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
    """A row that is answered alone. sampled: whether a shadow repeats the answer. waits: whether its answer waits for a
    proof, or for a turn of the event loop, after the commit."""

    plan: AnswerPlan
    part: ModeResult
    input_ids: NDArray[np.int64]
    ticket: Ticket
    sampled: bool
    waits: bool


class Prepared(NamedTuple):
    """The answers to the steps of one batch, before the steps are committed. `singles` has the rows that are answered
    alone, or the error of the attempt, and `results` the answers by arrays; None if no row has one. positions: the
    sessions' positions after the steps, int64 (B)."""

    results: StepResults | None
    singles: dict[int, Single | Exception]
    positions: NDArray[np.int64]


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
        self._resident = resident
        self.admission = admission
        self.most_predictions = most_predictions
        self._live = live
        self._unlisted = builder.vocabulary.unlisted
        certificate = builder.certificate
        # The bound of an answer from a state that has read the whole sequence.
        self._bound_of_all = bounds.bound(certificate, 1, 1)
        self._bound_of = lru_cache(KNOWN_BOUNDS)(lambda known: bounds.bound(certificate, known, known + 1))

    def asking(self, batch: StepBatch) -> dict[int, Asking]:
        """Returns the rows that ask more than the next token. Must be called before the commit."""
        sampler, most = self.builder.sampler, self.most_predictions
        if sampler is None and batch.is_plain:
            return {}
        found = {}
        for index, row in enumerate(batch.rows):
            sampled = sampler is not None and sampler.chosen()
            is_alone = sampled or not row.is_of_arrays(most)
            if is_alone or row.has_filter:
                input_ids = self._input_ids(row, sampled=sampled, is_alone=is_alone)
                found[index] = Asking(input_ids, sampled, is_alone)
        return found

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
                    made[row] = error
        filtered = rankings.copy()
        results: StepResults | None = None
        if rankings or len(asking) < len(positions):
            try:
                results = self._results(batch, positions, dropped_tokens, rankings, times)
            except Exception as error:  # no step may wait for ever for its answer
                made |= {row: error for row in range(len(batch.rows)) if row in rankings or row not in asking}
            else:
                if batch.may_wait:
                    results.latencies = {
                        index: self._ticket(row, times).latency()
                        for index, row in enumerate(batch.rows)
                        if row.waiting and (index in rankings or index not in asking)
                    }
        answers: Outputs | None = None  # one object for all rows, because it caches what they share
        for row, (input_ids, sampled, _) in asking.items():
            if row in rankings or row in made:  # answered by arrays, or failed
                continue
            answers = batch.outputs.only(ANSWERS) if answers is None else answers
            step, position, dropped = batch.rows[row], positions.item(row), dropped_tokens.item(row)
            ticket, request = self._ticket(step, times), step.as_request()
            try:
                ranking = filtered.get(row)
                if ranking is None:
                    ranking = self._ranking(step, position, input_ids)
                elif self.builder.cache is not None:  # the graph outputs too few tokens for the filter
                    input_ids = self._in_order(step, ())
                plan, part = self._part(batch, answers, row, position, dropped, input_ids, ranking, ticket)
            except Exception as error:  # the other steps are answered
                made[row] = error
            else:
                waits = request.prove or request.logits or self.builder.work(plan, request.top_k) > 0
                made[row] = Single(plan, part, input_ids, ticket, sampled, waits)
        return Prepared(results, made, positions)

    def extend(self, prepared: Prepared, rows: Sequence[int]) -> None:
        """Keeps the requests of rows whose answers wait counted as active."""
        for row, single in prepared.singles.items():
            if row in rows and isinstance(single, Single) and single.waits:
                self.admission.extend()

    def deliver(
        self, batch: StepBatch, prepared: Prepared, rows: Sequence[int], durable: Sequence[bool | None] | None = None
    ) -> None:
        """Answers the committed `rows`. durable: see `SessionRecord`, for each row of the batch."""
        results, singles, positions = prepared
        live = self._live
        if live is not None:
            after = positions.tolist()
            live.judge([batch.rows[index].first_token(after[index]) for index in rows])
        if results is not None:
            by_array = [row for row in rows if row not in singles] if singles else rows
            if durable is not None and by_array:
                results.durable = durable[by_array[0]]
            try:
                self._count(results, batch, by_array)
            except Exception as error:  # the steps are answered
                report = {"message": "the answers of a batch of steps were not counted", "exception": error}
                asyncio.get_running_loop().call_exception_handler(report)
            if live is not None:
                after, ids = results.positions, results.ids
                given = [(index, row) for index in by_array if (row := batch.rows[index]).is_awaited]
                live.keep([(row.session, after[index], ids[index][: row.top_k]) for index, row in given])
            for index in by_array:
                row = batch.rows[index]
                if row.done():
                    continue
                try:
                    row.set_result(results.answer(index, row))
                except Exception as error:  # the step is committed, but has no answer
                    row.fail(error)
        for index in rows if singles else ():
            single = singles.get(index)
            if isinstance(single, Single):
                self._answer(batch.rows[index], single, None if durable is None else durable[index])
            elif single is not None:
                batch.rows[index].fail(single)

    def _input_ids(self, row: StepRow, *, sampled: bool, is_alone: bool) -> NDArray[np.int64]:
        """Returns the kept part of the model's input: see `SessionSteps`. If only the row's filter needs it, returns
        the sequence's kept tokens in any order. If nothing needs it, returns an empty array."""
        is_in_order = sampled or (is_alone and self.builder.cache is not None)
        if not is_in_order and (row.request is None or not row.request.filter.exclude_seen):
            return NO_TOKENS
        if is_in_order or row.stored is not None:
            return self._in_order(row, (row.token,))
        return np.concatenate([self._resident.seen(row.slot), np.array([row.token])])

    def _in_order(self, row: StepRow, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Returns the kept part of the model's input in order, up to and including the row's token: int64. `tokens` are
        those of the step that a buffered session has not appended yet."""
        if row.stored is None:
            tail, position = self._resident.tail(row.slot)
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

    def _part(
        self,
        batch: StepBatch,
        answers: Outputs,
        row: int,
        position: int,
        dropped_tokens: int,
        input_ids: NDArray[np.int64],
        ranking: Ranking,
        ticket: Ticket,
    ) -> tuple[AnswerPlan, ModeResult]:
        """Returns the plan and the result of a row that is answered alone. answers: the batch's outputs of ANSWERS."""
        request, outputs = batch.rows[row].as_request(), batch.outputs
        origin = StateSource.REBUILT if batch.rows[row].was_rebuilt else StateSource.RESIDENT
        plan = AnswerPlan(Mode.RECURRENT, position, None, origin, position - dropped_tokens, ranking, request.cache)
        norms = outputs[NORMS][row].tolist() if NORMS in outputs else None
        result = RunResult(Row(answers, row, norms=norms))
        return plan, self.builder.part(plan, result, ticket.latency(), input_ids, recurrent=True)

    def _ranking(self, row: StepRow, position: int, input_ids: NDArray[np.int64]) -> Ranking:
        """Returns the ranking for the filter of a row."""
        known = input_ids[max(len(input_ids) - position, 0) :]
        return self.builder.rankings.of(NO_FILTER if row.request is None else row.request.filter, known)

    def _answer(self, row: StepRow, single: Single, durable: bool | None) -> None:
        """Answers a committed row alone. A proof is searched only now, so that the step is committed even if the client
        cancels the request during a long search."""
        plan, part, input_ids, ticket, sampled, waits = single
        request, stored = row.as_request(), row.stored

        def answer(part: ModeResult) -> Answer:
            made = self.builder.answer(
                plan,
                lambda: input_ids,
                part,
                None,
                request,
                ticket,
                replayed=False,
                durable=durable,
                token_logprobs=row.token_logprobs,
                sampled=sampled,
            )
            if stored is not None and stored.kind is StepKind.FIRST:
                made.created = True
            if row.waiting is None:  # otherwise the general procedure counts the step
                self.builder.stats.made(made, None if row.done() else "step")
            if self._live is not None and row.is_awaited:
                self._live.answered(row.session, plan.position, made)
            return made

        async def finish() -> Answer:
            found = await self.builder.search(plan, part, ticket) if request.prove else part
            await self.builder.take_turn(plan, request, found)
            return answer(found)

        if waits and row.done():
            self.admission.leave()
            return
        if waits:
            pending = Pending.of(finish(), ticket)
            pending.add_done_callback(lambda _: self.admission.leave())
            row.follow(pending)
            return
        try:
            row.answer(answer(part))
        except Exception as error:  # the step is committed, but has no answer
            row.fail(error)

    def _results(
        self,
        batch: StepBatch,
        positions: NDArray[np.int64],
        dropped: NDArray[np.int64],
        rankings: dict[int, Ranking],
        times: Times,
    ) -> StepResults:
        """Returns the answers to the batch's steps by arrays: see `prepare`. rankings: the rankings of rows with a
        filter. Removes those for which the graph outputs too few tokens: these rows are answered alone."""
        results, outputs = StepResults(), batch.outputs
        if rankings:
            results.seen_tokens = {row: ranking.seen_tokens for row, ranking in rankings.items()}
        results.positions = positions.tolist()
        if self.builder.certificate.readout is not None and self.builder.certificate.has_rounding:
            known = np.where(dropped, positions - dropped, 0).tolist()
            results.bounds = bounds.of_steps(self.builder.certificate, known, outputs[NORMS])
        elif dropped.any():
            results.bounds = [
                self._bound_of(known) if lost else self._bound_of_all
                for known, lost in zip((positions - dropped).tolist(), dropped.tolist(), strict=True)
            ]
        else:
            results.bounds = [self._bound_of_all] * len(batch.rows)
        width = outputs.most if rankings else min(max(FEW, batch.top_k + len(self._unlisted)), outputs.most)
        if self.builder.cache is None:
            self._largest(results, batch, width, rankings)
        else:
            self._largest_of_mixtures(results, self.builder.cache, batch, width, rankings)
        results.compute_s = times.compute_s
        results.queue_s = (times.started_s - batch.queued_s).tolist()
        results.total_s = (time.perf_counter() - batch.queued_s).tolist()
        results.batch_items = times.items
        results.identity, results.vocabulary = self.builder.identity, self.builder.vocabulary
        return results

    def _largest(self, results: StepResults, batch: StepBatch, width: int, rankings: dict[int, Ranking]) -> None:
        """Sets the fields of `results` for the most probable tokens and for the proof of the first of these tokens."""
        outputs = batch.outputs
        top = outputs.top(width)
        if rankings:
            ids, values, fewest = self._without_excluded(top.ids, top.logits, rankings, batch)
            top = TopColumns(ids, values, top.log_sum_exp)
        elif self._unlisted:
            top = TopColumns(*self._without_unlisted(top.ids, top.logits), top.log_sum_exp)
        logprobs = top.logprobs
        results.ids, results.logprobs = top.ids.tolist(), logprobs.tolist()
        results.probabilities = np.exp(logprobs).tolist()
        results.cache_tokens = None
        if rankings:
            top = TopColumns(ids[:, :fewest], values[:, :fewest], top.log_sum_exp)
        results.proved = self._proved(results.bounds, top.ids, top.logits, outputs)
        for row, ranking in rankings.items():
            bound = results.bounds[row]
            if bound is not None and bound.runs is not None:
                first = Largest(results.ids[row][:2], top.logits[row, :2].tolist(), [], [])
                logits, hidden = outputs.row("logits", row), outputs.row(HIDDEN, row)
                results.proved[row] = self.builder.margin.proves_among(ranking, first, logits, hidden, bound.runs)

    def _largest_of_mixtures(
        self,
        results: StepResults,
        cache: CacheMixture,
        batch: StepBatch,
        width: int,
        rankings: dict[int, Ranking],
    ) -> None:
        """Like `_largest`, for mixtures with a cache. Also replaces the bounds of the network's answers in `results` by
        the bounds of the mixtures."""
        outputs = batch.outputs
        stored = [(one.record, one.tokens) for one in batch.commits]
        found = self._resident.shares_of(stored) if stored else self._resident.shares(batch.slots)
        logits, ids = outputs["logits"], outputs[TOP_IDS]
        sums = outputs[LOG_SUM_EXP].astype(np.float64).reshape(-1)
        top = cache.top(logits, sums, ids, found, width)
        probabilities, top_ids = top.probabilities, top.ids
        if rankings:
            top_ids, probabilities, _ = self._without_excluded(top_ids, probabilities, rankings, batch)
        elif self._unlisted:
            top_ids, probabilities = self._without_unlisted(top_ids, probabilities)
        results.ids, results.probabilities = top_ids.tolist(), probabilities.tolist()
        results.logprobs = np.log(probabilities).tolist()
        results.cache_tokens = found.tokens.tolist()
        unknown = [cache.unknown(*known) for known in zip(results.cache_tokens, results.positions, strict=True)]
        errors = [
            math.inf if one is None or one.runs is None or more else one.runs
            for one, more in zip(results.bounds, unknown, strict=True)
        ]
        results.bounds = [*map(bounds.of_mixture, results.bounds, found.network.tolist(), unknown)]
        if min(errors) == math.inf:
            results.proved = [False] * len(errors)
            return

        results.proved = self.builder.margin.proves_mixtures(
            probabilities, outputs.lengths, found.network, np.array(errors)
        ).tolist()

    def _without_excluded(
        self,
        ids: NDArray[np.int64],
        values: NDArray[Float],
        rankings: dict[int, Ranking],
        batch: StepBatch,
    ) -> tuple[NDArray[np.int64], NDArray[Float], int]:
        """Moves the tokens that may not be listed behind the others, in each of B rows of the K most probable tokens:
        (B, K). Returns as many first tokens of each row as the batch needs. Removes the rankings of rows in which fewer
        than `top_k` tokens remain. The third result is the number of first tokens that may be listed in all other rows,
        at least 2."""
        excluded = self.builder.rankings.default.excludes(ids)
        asking = [*rankings]
        excluded[asking] = excluded_by_each([*rankings.values()], ids[asking])
        kept = (ids.shape[1] - np.count_nonzero(excluded, axis=1)).tolist()
        too_few = {row for row in rankings if kept[row] < max(batch.rows[row].top_k, 2)}
        for row in too_few:
            del rankings[row]
        most = max(FEW, batch.top_k)
        fewest = max(2, min([count for row, count in enumerate(kept) if row not in too_few], default=2))
        order = np.argsort(excluded, axis=1, kind="stable")[:, :most]
        return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1), min(fewest, most)

    def _without_unlisted(
        self, ids: NDArray[np.int64], values: NDArray[Float]
    ) -> tuple[NDArray[np.int64], NDArray[Float]]:
        """Removes the U tokens that are never listed. `ids` and `values` have the K most probable tokens of each of B
        rows: (B, K). Returns the first K - U remaining tokens of each row, in the same order: (B, K - U)."""
        most = ids.shape[1] - len(self._unlisted)
        is_unlisted = ids == self._unlisted[0]
        for token in self._unlisted[1:]:  # faster than np.isin for the usual one or two tokens
            is_unlisted |= ids == token
        if not is_unlisted.any():
            return ids[:, :most], values[:, :most]
        if len(ids) == 1:
            kept = np.flatnonzero(~is_unlisted[0])[:most]
            return ids[:, kept], values[:, kept]
        changed = np.flatnonzero(is_unlisted.any(axis=1))
        order = np.argsort(is_unlisted[changed], axis=1, kind="stable")[:, :most]
        listed_ids, listed_values = ids[:, :most].copy(), values[:, :most].copy()
        listed_ids[changed], listed_values[changed] = ids[changed[:, None], order], values[changed[:, None], order]
        return listed_ids, listed_values

    def _proved(
        self,
        found: Sequence[Bound | None],
        ids: NDArray[np.int64],
        logits: NDArray[np.float64],
        outputs: Outputs,
    ) -> list[bool]:
        """Returns, for each row, whether the margin proof succeeds."""
        if not any(found):
            return [False] * len(found)
        if len(found) <= bounds.FEW_ROWS:
            return self._proved_one_by_one(found, ids, logits, outputs)
        errors_known = [None if one is None else one.runs for one in found]
        if errors_known.count(None) == len(found):
            return [False] * len(found)
        lengths = outputs.lengths
        known = np.array([error is not None for error in errors_known])
        errors = np.array([error or 0.0 for error in errors_known])
        settled = self.builder.margin.settled(ids, logits, lengths, errors)
        proved = (settled == 1) & known
        for row in np.flatnonzero((settled < 0) & known).tolist():
            proved[row] = self._has_no_rival(outputs, row, ids.item(row, 0), errors.item(row))
        flags: list[bool] = proved.tolist()
        return flags

    def _proved_one_by_one(
        self,
        found: Sequence[Bound | None],
        ids: NDArray[np.int64],
        logits: NDArray[np.float64],
        outputs: Outputs,
    ) -> list[bool]:
        """Like `_proved`, for few rows, for which Python is faster than some twenty numpy calls."""
        flags: list[bool] = []
        lengths = outputs.lengths
        rows = zip(found, ids[:, :2].tolist(), logits[:, :2].tolist(), lengths.tolist(), strict=True)
        for row, (bound, (first, second), (highest, next_one), length) in enumerate(rows):
            error = None if bound is None else bound.runs
            if error is None:
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

    def _count(self, results: StepResults, batch: StepBatch, rows: Sequence[int]) -> None:
        """Counts the answers of rows that the general procedure does not count."""
        if batch.may_wait:
            rows = [row for row in rows if batch.rows[row].waiting is None]
        columns = batch.rows, results.queue_s, results.total_s, results.bounds, results.proved
        if len(rows) < len(batch.rows):
            columns = tuple([column[row] for row in rows] for column in columns)  # type: ignore[assignment]
        steps, queue_s, total_s, found, proved = columns
        self.builder.stats.stepped(
            (queue_s, [results.compute_s] * len(rows), total_s),
            [one.variation for one in found if one is not None],
            sum(proved),
            [*map(IS_DONE, steps)].count(False),
        )
