"""The engine's answers as JSON documents, field by field; `reply` makes the response.

`Reply` does half the work of Starlette's `Response`, which takes any content with any encoding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import cast

import orjson
from pydantic_core import to_jsonable_python
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wane.service.api.schemas.compare import ComparedDocument, ComparedModelDocument, PercentilesDocument
from wane.service.api.schemas.generate import FinishDocument, GeneratedTokenDocument
from wane.service.api.schemas.models import (
    CertificateSummaryDocument,
    ModelCardDocument,
    ModelFactsDocument,
    ModelSummaryDocument,
)
from wane.service.api.schemas.ops import ModelStandingDocument, StoreDocument
from wane.service.api.schemas.predict import (
    AgreementDocument,
    AnswerDocument,
    LatencyDocument,
    ModelDocument,
    PredictionDocument,
    StepColumnsDocument,
)
from wane.service.api.schemas.score import (
    ScoreDocument,
    ScoredTokensDocument,
    ScoreProgressDocument,
    ScoreSummaryDocument,
)
from wane.service.api.schemas.sessions import SessionDocument
from wane.service.engine.columns import StepAnswer, StepResults
from wane.service.engine.engine import Engine
from wane.service.sessions.stores.store import StoreHealth
from wane.service.types import (
    Agreement,
    Answer,
    ComparedMode,
    Comparison,
    Finish,
    GeneratedToken,
    Latency,
    Mode,
    Percentiles,
    Prediction,
    Score,
    ScoredTokens,
    ScoreProgress,
    ScoreSummary,
    SessionView,
    StateSource,
    id_of,
)

VALUES_AT_ONCE = 16_384
"""Values of a long list that are encoded in one turn of the event loop: the encoder does not let other threads run, so
that a thread would hold up the loop just as long."""

CONTENT_TYPE = (b"content-type", b"application/json")


class Reply(Response):
    """A document as an answer, as starlette's `Response` of it would be: but for a class that takes any content, with
    any encoding, it is half the work."""

    def __init__(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """`body` is JSON."""
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(self.body))]
        if headers:
            self.raw_headers += [(name.lower().encode("latin-1"), headers[name].encode("latin-1")) for name in headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


def json_bytes(value: object) -> bytes:
    """A document, or a value of one, as JSON. Every number in it is finite: JSON has no others."""
    return orjson.dumps(value, default=to_jsonable_python)


async def encode_long(document: Mapping[str, object]) -> bytes:
    """As `json_bytes`, the same bytes, of a document with long lists: other work runs between their pieces."""
    parts: list[bytes] = []
    for name, value in document.items():
        parts += (b"," if parts else b"{", json_bytes(name), b":")
        if not isinstance(value, list) or len(value) <= VALUES_AT_ONCE:
            parts.append(json_bytes(value))
            continue
        for start in range(0, len(value), VALUES_AT_ONCE):
            await asyncio.sleep(0)
            piece = json_bytes(value[start : start + VALUES_AT_ONCE])
            parts += (b"," if start else b"[", piece[1:-1])
        parts.append(b"]")
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)


EPSILONS = ("1e-1", "1e-2", "1e-3", "1e-4")
"""The total variations that a model's card tells k(epsilon) for."""

MADE_AT_ONCE = 32
"""Answers of one request whose documents are made in one turn of the event loop."""


def reply(document: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A document as an answer."""
    return Reply(json_bytes(document), status, headers)


async def long_reply(document: Mapping[str, object]) -> Response:
    """A document with long lists as an answer, encoded in several turns of the event loop."""
    return Reply(await encode_long(document))


def model(engine: Engine) -> ModelDocument:
    return {"model": engine.name, "model_version": engine.version, "device": engine.device}


def prediction(given: Prediction) -> PredictionDocument:
    document: PredictionDocument = {
        "token_id": given.token_id,
        "token": given.token,
        "probability": given.probability,
        "logprob": given.logprob,
    }
    if given.token_bytes is not None:
        document["bytes"] = list(given.token_bytes)
    return document


def latency(given: Latency) -> LatencyDocument:
    return {"queue_ms": given.queue_ms, "compute_ms": given.compute_ms, "total_ms": given.total_ms}


def agreement(given: Agreement) -> AgreementDocument:
    return {
        "top1_match": given.top1_match,
        "top1_proved": given.top1_proved,
        "total_variation": given.total_variation,
        "kl": given.kl,
        "max_logit_difference": given.max_logit_difference,
        "state_distance": given.state_distance,
        "state_error_bound": given.state_error_bound,
        "error_bound": given.error_bound,
    }


def answer(engine: Engine, given: Answer) -> AnswerDocument:
    if isinstance(given, StepAnswer):
        return _step(engine, given.results, given.row)
    document: AnswerDocument = {
        "model": engine.name,
        "model_version": engine.version,
        "device": engine.device,
        "mode": given.mode,
        "window": given.window,
        "predictions": [prediction(one) for one in given.predictions],
        "latency": latency(given.latency),
        "state": given.state,
        "error_bound": given.error_bound,
        "state_error_bound": given.state_error_bound,
        "top1_proved": given.top1_proved,
    }
    if given.modes is not None:
        document["modes"] = {
            mode.value: {
                "predictions": [prediction(one) for one in part.predictions],
                "latency": latency(part.latency),
            }
            for mode, part in given.modes.items()
        }
    if given.agreement is not None:
        document["agreement"] = agreement(given.agreement)
    if given.session is not None:
        document["session"] = id_of(given.session)
    if given.position is not None:
        document["position"] = given.position
    if given.replayed is not None:
        document["replayed"] = given.replayed
    if given.durable is not None:
        document["durable"] = given.durable
    return document


def _step(engine: Engine, results: StepResults, row: int) -> AnswerDocument:
    """As `answer`, from the columns."""
    vocabulary, most = results.vocabulary, results.top_k[row]
    texts, ids, bound = vocabulary.texts, results.ids[row][:most], results.bounds[row]
    found: list[PredictionDocument] = [
        {"token_id": token, "token": texts[token], "probability": probability, "logprob": logprob}
        for token, probability, logprob in zip(ids, results.probabilities[row], results.logprobs[row], strict=False)
    ]
    if not vocabulary.partial_ids.isdisjoint(ids):
        for document in found:
            if (partial := vocabulary.partials[document["token_id"]]) is not None:
                document["bytes"] = list(partial)
    return {
        "model": engine.name,
        "model_version": engine.version,
        "device": engine.device,
        "mode": Mode.RECURRENT,
        "window": None,
        "predictions": found,
        "latency": {
            "queue_ms": results.queue_ms[row],
            "compute_ms": results.compute_ms,
            "total_ms": results.total_ms[row],
        },
        "state": StateSource.RESIDENT,
        "error_bound": None if bound is None else bound.variation,
        "state_error_bound": None if bound is None else bound.state,
        "top1_proved": results.proved[row],
        "session": id_of(results.sessions[row]),
        "position": results.positions[row],
        "replayed": False,
    }


StepResult = tuple[Engine, Answer] | Exception
"""An answer and who gave it, or the failure in its place."""

COLUMNS = (
    "mode",
    "window",
    "state",
    "position",
    "replayed",
    "durable",
    "error_bound",
    "state_error_bound",
    "top1_proved",
)
"""Columns of many steps that hold what an answer has under the same name."""

LATENCY = ("queue_ms", "compute_ms", "total_ms")


def step_columns(
    sessions: Sequence[str], results: Sequence[StepResult], failure: Callable[[Exception], dict[str, object]]
) -> StepColumnsDocument:
    """Many answers as one list for each field; `failure` makes a problem document."""
    given = [None if isinstance(result, Exception) else result[1] for result in results]
    columns: dict[str, object] = {
        name: [None if one is None else getattr(one, name) for one in given] for name in COLUMNS
    }
    latencies = [one.latency for one in given if one is not None]
    columns |= {
        "session": sessions,
        "model": [None if isinstance(result, Exception) else result[0].name for result in results],
        "token_id": [None if one is None else [first.token_id for first in one.predictions] for one in given],
        "logprob": [None if one is None else [first.logprob for first in one.predictions] for one in given],
        "error": [failure(result) if isinstance(result, Exception) else None for result in results],
        "latency": {name: max((getattr(one, name) for one in latencies), default=0.0) for name in LATENCY},
    }
    return cast(StepColumnsDocument, columns)


def comparison(engine: Engine, tokens: int, given: Comparison) -> ComparedModelDocument:
    return {
        **model(engine),
        "tokens": tokens,
        "repeat": given.repeat,
        "recurrent": _compared(given.recurrent),
        "windows": [_compared(one) for one in given.windows],
    }


def _compared(given: ComparedMode) -> ComparedDocument:
    return {
        "mode": given.mode,
        "window": given.window,
        "state": given.state,
        "predictions": [prediction(one) for one in given.predictions],
        "latency": {
            "queue": _percentiles(given.queue),
            "compute": _percentiles(given.compute),
            "total": _percentiles(given.total),
        },
        "error_bound": given.error_bound,
        "agreement": None if given.agreement is None else agreement(given.agreement),
    }


def _percentiles(given: Percentiles) -> PercentilesDocument:
    return {"p50_ms": given.p50_ms, "p99_ms": given.p99_ms}


def score(engine: Engine, tokens: tuple[int, ...], given: Score) -> ScoreDocument:
    document: ScoreDocument = {
        **score_summary(engine, given.summary),
        "tokens": list(tokens),
        "logprobs": list(given.logprobs),
        "error_bounds": list(given.error_bounds or ()),
    }
    if given.error_bounds is None:
        del document["error_bounds"]
    return document


def score_progress(given: ScoreProgress) -> ScoreProgressDocument:
    return {"done": given.done, "total": given.total}


def scored(tokens: tuple[int, ...], given: ScoredTokens) -> ScoredTokensDocument:
    end = given.position + len(given.logprobs)
    document: ScoredTokensDocument = {
        "position": given.position,
        "tokens": list(tokens[given.position : end]),
        "logprobs": list(given.logprobs),
    }
    if given.error_bounds is not None:
        document["error_bounds"] = list(given.error_bounds)
    return document


def score_summary(engine: Engine, given: ScoreSummary) -> ScoreSummaryDocument:
    return {
        **model(engine),
        "perplexity": given.perplexity,
        "chunks": given.chunks,
        "warm_up": given.warm_up,
        "rounds": given.rounds,
        "max_residual": given.max_residual,
        "state": StateSource.FULL,
        "error_bound": given.error_bound,
        "latency": latency(given.latency),
    }


def generated(given: GeneratedToken) -> GeneratedTokenDocument:
    document: GeneratedTokenDocument = {
        "token_id": given.token_id,
        "token": given.token,
        "text": given.text,
        "logprob": given.logprob,
    }
    if given.token_bytes is not None:
        document["bytes"] = list(given.token_bytes)
    return document


def finish(engine: Engine, given: Finish) -> FinishDocument:
    return {
        **model(engine),
        "text": given.text,
        "tokens": list(given.tokens),
        "finish_reason": given.reason.value,
        "mode": given.mode,
        "window": given.window,
        "state": given.state,
        "error_bound": given.error_bound,
        "latency": latency(given.latency),
    }


def session(engine: Engine, given: SessionView) -> SessionDocument:
    document: SessionDocument = {
        "model": given.model,
        "model_version": given.model_version,
        "device": engine.device,
        "session": id_of(given.session),
        "mode": given.mode,
        "position": given.position,
        "state": given.state,
        "error_bound": given.error_bound,
        "idle_s": given.idle_s,
    }
    if given.durable is not None:
        document["durable"] = given.durable
    return document


def model_card(engine: Engine) -> ModelCardDocument:
    """A model, with its certificate's curve."""
    return {**_model_facts(engine), "certificate": engine.manifest.certificate, "costs": engine.cost_model}


def model_summary(engine: Engine) -> ModelSummaryDocument:
    """A model in the list of all."""
    certificate = engine.manifest.certificate
    standing: CertificateSummaryDocument = {
        "contractive": certificate.contractive,
        "certified": certificate.certified,
        "reason": certificate.reason,
        "layers": certificate.layers,
        "head_diameter": certificate.head_diameter,
        "rounding": certificate.rounding,
    }
    return {**_model_facts(engine), "certificate": standing}


def _model_facts(engine: Engine) -> ModelFactsDocument:
    manifest = engine.manifest
    smallest = manifest.certificate.smallest_window
    return {
        "id": manifest.name,
        "object": "model",
        "created": _unix_time(manifest.provenance.created),
        "owned_by": "wane",
        "model_version": manifest.version,
        "device": engine.device,
        "description": manifest.description,
        "family": manifest.architecture.cell,
        "parameters": manifest.architecture.model_dump(),
        "k": manifest.window,
        "max_window": manifest.max_window,
        "k_epsilon": {epsilon: smallest(float(epsilon)) for epsilon in EPSILONS},
        "vocabulary": manifest.vocabulary,
        "quality": manifest.quality,
        "attribution": manifest.provenance.attribution,
    }


def standing(engine: Engine) -> ModelStandingDocument:
    """Which model is served, and whether it is certified."""
    certificate = engine.manifest.certificate
    return {**model(engine), "certified": certificate.certified, "reason": certificate.reason}


def store(given: StoreHealth) -> StoreDocument:
    """How the store of the sessions is."""
    return {"kind": given.kind, "reachable": given.reachable, "not_durable": given.not_durable}


def _unix_time(iso: str) -> int:
    """Seconds since 1970; 0 for an invalid date."""
    try:
        return int(datetime.fromisoformat(iso).timestamp())
    except ValueError:
        return 0
