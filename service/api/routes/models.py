"""Serves the list of models, in OpenAI's format, the pages of a model's vocabulary, and the report of the server's
measurements."""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import convert
from starlette.requests import Request
from starlette.responses import Response

from wane.models.manifest import Certificate, Contraction, Quality, Readout, Rounding, Start, Unknown, VocabularyInfo
from wane.models.vocabulary import EOS, UNK, Vocabulary
from wane.service.api import encode
from wane.service.api.deps import deadline, model_engine
from wane.service.api.exchange import registry
from wane.service.api.openapi import Router, parameters_in
from wane.service.batching.cost_model import Costs
from wane.service.engine.engine import Engine
from wane.service.engine.stats import Report
from wane.service.errors import InvalidRequest, truncate_repr
from wane.service.types.common import Result, says

EPSILONS = ("1e-1", "1e-2", "1e-3", "1e-4")
"""The bounds for which a model's document gives `k_epsilon` (see `ModelFacts`)."""

DEFAULT_LIMIT = 1000
LARGEST_LIMIT = 10_000
DIGITS = "[0-9]{1,15}"

PARAMETERS: dict[str, Any] = {
    "prefix": ("only the names that begin with this text", {}),
    "after": (
        "only the names whose id is above this number; give the `next` of the previous page",
        {"type": "integer", "minimum": 0},
    ),
    "limit": (
        "the largest number of names in the answer",
        {"type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT},
    ),
}
"""The query parameters, each with its description and its JSON schema."""

router = Router(tags=["models"])


class ModelFacts(Result):
    """A model, with OpenAI's fields and the fields of its manifest."""

    id: Annotated[str, says("the model's name")]
    object: Annotated[Literal["model"], says("always model, as in OpenAI's API")]
    created: Annotated[int, says("when the bundle was made, in seconds since 1970")]
    owned_by: Annotated[str, says("always wane")]
    model_version: Annotated[str, says("the version of the model's bundle")]
    device: Annotated[str, says("the device that runs the model, such as cpu")]
    description: Annotated[str, says("what the model was trained for, in the words of its bundle")]
    family: Annotated[str, says("the kind of recurrent network")]
    parameters: Annotated[dict[str, Any], says("the network's sizes and options")]
    k: Annotated[int, says("the number of tokens of a window if the request has no `window`")]
    max_window: Annotated[int, says("the largest `window` of a request, in tokens")]
    k_epsilon: dict[str, int | None]
    """for each bound on the total variation between the predictions of window mode and recurrent mode, the smallest
    number k of tokens such that all windows of k or more tokens satisfy the bound; null: there is none"""
    vocabulary: Annotated[VocabularyInfo, says("the tokenizer that the model was trained with")]
    unknown: Annotated[Unknown, says("what the server does with an event that the vocabulary lacks")]
    start: Annotated[Start, says("what the model reads first: token: the start token <eos>; zero: the first token")]
    quality: Annotated[Quality | None, says("the perplexities that the bundle claims; null: it claims none")]
    attribution: Annotated[str | None, says("the source of the training data; null: the bundle names none")]


class ModelCard(ModelFacts):
    """One model with its whole certificate, and with the durations of its runs that were measured on this server."""

    certificate: Annotated[Certificate, says("the bounds of the error of windows, for all tokens")]
    costs: Costs


class CertificateSummary(Result):
    """The certificate without its lists of error bounds (`state_error` and `error_bound`)."""

    contractive: Annotated[bool, says("true: every layer with fading memory has a contraction factor below 1")]
    certified: Annotated[bool, says("true: the error bound of the largest window is at most 1e-3")]
    reason: Annotated[str | None, says("why the model is not certified")]
    layers: Annotated[tuple[Contraction, ...], says("the contraction of each layer with fading memory")]
    head_diameter: Annotated[float, says("the largest 2-norm distance of two rows of the output matrix, or a bound")]
    rounding: Annotated[Rounding | None, says("the rounding of the graphs, from measured errors of one step")]
    readout: Annotated[Readout | None, says("the rounding of the graphs by a theorem, for some residual networks")]


class ModelSummary(ModelFacts):
    """A model in the list of models."""

    certificate: Annotated[CertificateSummary, says("the model's certificate without its lists of error bounds")]


class ModelList(Result):
    """All served models."""

    object: Annotated[Literal["list"], says("always list, as in OpenAI's API")]
    data: Annotated[tuple[ModelSummary, ...], says("the models; the first is the default model")]


class VocabularyEntry(Result):
    """The name of an event, or the text of a token, and its id."""

    id: Annotated[int, says("the token's id")]
    name: Annotated[str, says("the event's name, or the token's text")]


class VocabularyPage(Result):
    """A page of a vocabulary."""

    events: Annotated[list[VocabularyEntry], says("the names of the page, by ascending id")]
    next: Annotated[int | None, says("the parameter `after` of the next page; null on the last page")]


@router.on_get("/v1/models", ModelList)
async def models(request: Request) -> Response:
    """Lists every model with its family, k (the length of its window), quality, and certificate without the lists of
    error bounds. The default model is the first.

    Waits until every model has loaded or failed.
    """
    await registry(request).wait_for_all(deadline(request))
    return encode.reply(ModelList("list", tuple(map(_summary, registry(request).list()))))


@router.on_get("/v1/models/{name}", ModelCard)
async def model(request: Request, name: str) -> Response:
    """Returns one model with its whole certificate. The certificate's list `error_bound` has the error bound of windows
    of k tokens for each k."""
    engine = await model_engine(request, name)
    card = ModelCard(**_facts(engine), certificate=engine.manifest.certificate, costs=engine.cost_model)
    return encode.reply(card)


def _summary(engine: Engine) -> ModelSummary:
    summary = convert(engine.manifest.certificate, CertificateSummary, from_attributes=True)
    return ModelSummary(**_facts(engine), certificate=summary)


def _facts(engine: Engine) -> dict[str, Any]:
    """Returns the fields of `ModelFacts`."""
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
        "family": manifest.architecture.family,
        "parameters": manifest.architecture.model_dump() | {"hidden": manifest.architecture.hidden},
        "k": manifest.window,
        "max_window": manifest.max_window,
        "k_epsilon": {epsilon: smallest(float(epsilon)) for epsilon in EPSILONS},
        "vocabulary": manifest.vocabulary,
        "unknown": manifest.unknown,
        "start": manifest.start,
        "quality": manifest.quality,
        "attribution": manifest.provenance.attribution,
    }


def _unix_time(iso: str) -> int:
    """Returns the seconds since 1970, or 0 for an invalid date."""
    try:
        return int(datetime.fromisoformat(iso).timestamp())
    except ValueError:
        return 0


@router.on_get("/v1/report", Report)
async def report(request: Request) -> Response:
    """Returns measurements of this server: the latency of each mode, the agreement of recurrent mode and windows over
    all comparisons, and statistics of sessions. Waits until every model has loaded or failed."""
    await registry(request).wait_for_all(deadline(request))
    return encode.reply(await registry(request).report())


@router.on_get(
    "/v1/models/{name}/vocabulary", VocabularyPage, openapi_extra={"parameters": parameters_in("query", PARAMETERS)}
)
async def vocabulary(request: Request, name: str) -> Response:
    """Lists the names and ids of a model's events, or the texts and ids of a text model's tokens, by ascending id.
    Omits `<eos>`, `<unk>` and reserved tokens."""
    query = request.query_params
    if unknown := query.keys() - PARAMETERS:
        field = min(unknown)
        raise InvalidRequest(f"{field}: there is no such parameter; there are {', '.join(PARAMETERS)}", field)
    after = _whole(request, "after", -1, 0)
    limit = _whole(request, "limit", DEFAULT_LIMIT, 1, LARGEST_LIMIT)
    engine = await model_engine(request, name)
    entries = await asyncio.to_thread(page, engine.vocabulary, query.get("prefix", ""), after, limit)
    return await encode.long_reply(entries)


def page(vocabulary: Vocabulary, prefix: str, after: int, limit: int) -> VocabularyPage:
    """Returns the first `limit` names that begin with `prefix` and whose id is more than `after`."""
    events: list[VocabularyEntry] = []
    for index in range(after + 1, vocabulary.size):
        name = vocabulary.token(index)
        if not name.startswith(prefix) or name in (EOS, UNK) or index in vocabulary.reserved:
            continue
        if len(events) == limit:
            return VocabularyPage(events, events[-1].id)
        events.append(VocabularyEntry(index, name))
    return VocabularyPage(events, None)


def _whole(request: Request, name: str, default: int, least: int, most: int | None = None) -> int:
    """Returns the value of the query parameter `name`. Raises InvalidRequest unless the value is a whole number in the
    allowed range."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(DIGITS, text) or int(text) < least or (most is not None and int(text) > most):
        within = f"{least} or more" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{name} is {truncate_repr(text)}, but must be a whole number, {within}", name)
    return int(text)
