"""Compares the recurrent mode with windows on one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from wane.service.batching.cost_model import CostModel
from wane.service.batching.ticket import Ticket
from wane.service.engine.agreement import Source
from wane.service.engine.answer import AnswerBuilder, AnswerPlan, ModeResult
from wane.service.engine.backlog import Share
from wane.service.engine.forward import RunResult, sequence, tail
from wane.service.errors import InvalidRequest
from wane.service.state.pool import ZERO
from wane.service.types.answer import Agreement, Prediction
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import CompareRequest, Latency
from wane.service.types.text import ComparedMode, Comparison, Percentiles, Phases

PREDICTIONS = 5

NOTHING_TO_COMPARE = "there is nothing to compare: the model's vocabulary has none of the given events"


def seconds(cost_model: CostModel, request: CompareRequest) -> float:
    """Returns the expected seconds of all runs of a comparison."""
    each_s = cost_model.run("step", 1) + sum(cost_model.window(k) for k in request.windows)
    return cost_model.full(len(request.tokens)) + request.repeat * each_s


async def compare(request: CompareRequest, answer_builder: AnswerBuilder, ticket: Ticket, share: Share) -> Comparison:
    """Runs the modes in turn, `repeat` times each, so that other load on the machine affects all modes equally. Reports
    progress to `share`. Then runs the gradient proof on each answer of a window, as for a request with `prove: true`.
    The latencies do not include the time of the proofs.

    Raises InvalidRequest if the request has no token.
    """
    forward, pool = answer_builder.forward, answer_builder.forward.pool
    input_ids = sequence(answer_builder.manifest.start_tokens, request.tokens)
    if not request.tokens:
        raise InvalidRequest(NOTHING_TO_COMPARE, "events")
    position = len(request.tokens)
    with pool.lease() as leased, pool.lease() as after:
        before = ZERO
        if len(input_ids) > 1:
            before = leased
            await forward.full(input_ids[:-1], ticket, write=before)

        runs: list[Callable[[], Awaitable[RunResult]]] = [
            partial(forward.append, input_ids[-1:], ticket, read=before, write=after)
        ]
        runs += [partial(forward.window, tail(input_ids, position, k), ticket) for k in request.windows]
        latencies: list[list[Latency]] = [[] for _ in runs]
        results: list[RunResult] = []
        for repeat in range(request.repeat):
            for run, measured in zip(runs, latencies, strict=True):
                mark = ticket.mark()
                result = await run()
                measured.append(ticket.latency(since=mark))
                if repeat == 0:
                    results.append(result)
            share.progress((repeat + 1) / request.repeat)

    async def part(index: int, plan: AnswerPlan) -> ModeResult:
        made = answer_builder.part(plan, results[index], latencies[index][0], input_ids, recurrent=index == 0)
        return await answer_builder.search(plan, made, ticket)

    ranking = answer_builder.rankings.default

    async def line(index: int, window: int | None) -> ComparedMode:
        plan = AnswerPlan(Mode.BOTH, position, window, StateSource.RESIDENT, position, ranking, request.cache)
        own = await part(index, plan)
        recurrent = None if window is None else await part(0, plan)

        def read() -> tuple[tuple[Prediction, ...], Agreement | None]:
            predictions = answer_builder.predictions(own.result, PREDICTIONS, ranking)
            return predictions, None if recurrent is None else answer_builder.apart(plan, recurrent, own)

        predictions, pair = await answer_builder.turns.run(len(own.result.network_logits), read)
        if pair is not None:
            answer_builder.stats.compared(pair, Source.BOTH)
        return ComparedMode(
            mode=Mode.RECURRENT if window is None else Mode.WINDOW,
            window=window,
            state=StateSource.RESIDENT if window is None else StateSource.WINDOW,
            predictions=predictions,
            latency=Phases(
                queue=_percentiles([latency.queue_ms for latency in latencies[index]]),
                compute=_percentiles([latency.compute_ms for latency in latencies[index]]),
                total=_percentiles([latency.total_ms for latency in latencies[index]]),
            ),
            error_bound=None if own.bound is None else own.bound.variation,
            agreement=pair,
        )

    cache = answer_builder.cache if request.cache else None
    cache_tokens = None if cache is None else min(cache.length, position)
    return Comparison(
        *answer_builder.identity,
        tokens=position,
        repeat=request.repeat,
        recurrent=await line(0, None),
        windows=tuple([await line(index, window) for index, window in enumerate(request.windows, 1)]),
        cache_tokens=cache_tokens,
        unknown=request.unknown_names or None,
    )


def _percentiles(values_ms: Sequence[float]) -> Percentiles:
    p50, p99 = np.percentile(values_ms, (50, 99))
    return Percentiles(float(p50), float(p99))
