"""The engine's answers as JSON documents, field by field; `reply` sends one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from starlette.responses import Response

from service.documents.answers import (
    AgreementDocument,
    AnswerDocument,
    LatencyDocument,
    ModelDocument,
    PredictionDocument,
)
from service.documents.comparison import ComparedDocument, ComparedModelDocument, PercentilesDocument
from service.documents.generation import FinishDocument, GeneratedTokenDocument
from service.documents.models import (
    CertificateSummaryDocument,
    ModelCardDocument,
    ModelFactsDocument,
    ModelSummaryDocument,
)
from service.documents.operations import ModelStandingDocument, StoreDocument
from service.documents.scoring import ScoreDocument, ScoredTokensDocument, ScoreProgressDocument, ScoreSummaryDocument
from service.documents.sessions import SessionDocument
from service.engine.answers import Agreement, Answer, Latency, Prediction, SessionView
from service.engine.compared import ComparedMode, Comparison, Percentiles
from service.engine.engine import Engine
from service.engine.generated import Finish, GeneratedToken
from service.engine.mode import Origin
from service.engine.ownership import id_of
from service.engine.scores import Score, ScoredTokens, ScoreProgress, ScoreSummary
from service.engine.standing import Standing
from service.routes.reply import Reply, encode, encode_long

EPSILONS = ("1e-1", "1e-2", "1e-3", "1e-4")
"""The total variations that a model's card tells k(epsilon) for."""

MADE_AT_ONCE = 32
"""Answers of one request whose documents are made in one turn of the event loop."""


def reply(document: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A document as an answer."""
    return Reply(encode(document), status, headers)


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
        "state": Origin.FULL,
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
    return {**_model_facts(engine), "certificate": engine.manifest.certificate, "costs": engine.costs}


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


def store(given: Standing) -> StoreDocument:
    """How the store of the sessions is."""
    return {"kind": given.kind, "reachable": given.reachable, "not_durable": given.not_durable}


def _unix_time(iso: str) -> int:
    """Seconds since 1970; 0 for a date that is none."""
    try:
        return int(datetime.fromisoformat(iso).timestamp())
    except ValueError:
        return 0
