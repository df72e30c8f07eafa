"""The log-probability of every token of a text, given those before it."""

from __future__ import annotations

import math

from service.engine.batcher import Ticket
from service.engine.forward import Forward, sequence
from service.engine.types import Score, ScoreMethod, ScoreRequest
from service.errors import InvalidRequest

LARGEST_EXPONENT = 700.0  # exp of more is no float64


async def score(forward: Forward, eos_id: int, request: ScoreRequest, ticket: Ticket) -> Score:
    """Scores in order, with the state carried from piece to piece: exact, in bounded memory."""
    if request.method is not ScoreMethod.SEQUENTIAL:
        raise InvalidRequest(
            f"method is {request.method.value}, which is not available yet; the allowed value is "
            f"{ScoreMethod.SEQUENTIAL.value}",
            "method",
        )
    fed = sequence(eos_id, request.tokens)
    logprobs = await forward.scan(fed[:-1], fed[1:], ticket)
    return Score(
        logprobs=tuple(logprobs.tolist()),
        perplexity=math.exp(min(-float(logprobs.mean()), LARGEST_EXPONENT)),
        chunks=1,
        rounds=1,
        max_residual=0.0,
        error_bound=0.0,
        latency=ticket.latency(),
    )
