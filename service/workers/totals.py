"""Joins the answers of all workers to a request for the whole server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from starlette.types import Send

from wane.service.workers.merge_reports import merge


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to a request: its status, its headers and its body."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the request succeeded."""
        return self.status < 400

    async def send(self, send: Send) -> None:
        """Sends the answer with ASGI's function `send`."""
        headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})

    def header(self, name: bytes) -> bytes:
        """Returns the value of a header with this lower-case name, or no bytes."""
        return next((value for other, value in self.headers if other == name), b"")


Join = Callable[[Sequence[Answered]], Answered]
"""Joins the answers of all workers. The first one is the answer of the worker that accepted the request."""

SMALLEST = frozenset({"wane_ready", "wane_store_up", "process_start_time_seconds"})
LARGEST = frozenset({"wane_model_info", "python_info", "process_max_fds"})
"""The samples that are not added: the server has the smallest, or the largest, of the workers' values."""


def join_of(method: str, path: str) -> Join | None:
    """Returns the function that joins all workers' answers to a request, or None if one worker answers it."""
    return next((join for methods, fits, join in TOTALS if method in methods and fits(path)), None)


def least_ready(answers: Sequence[Answered]) -> Answered:
    """Returns the answer of a worker that is not ready, if there is one."""
    return next((answer for answer in answers if not answer.is_success), answers[0])


def reports(answers: Sequence[Answered]) -> Answered:
    """Returns the report of all workers, with the costs that the first one has measured."""
    parts = [msgspec.json.decode(answer.body) for answer in answers if answer.is_success]
    merged = merge(parts)
    del merged["replicas"]
    costs = {model["model"]: model["costs"] for part in reversed(parts) for model in part["models"]}
    for model in merged["models"]:
        del model["replicas"]
        model["costs"] = costs[model["model"]]
    return replace(answers[0], body=msgspec.json.encode(parts[0] | merged))


def inference_statistics(answers: Sequence[Answered]) -> Answered:
    """Returns the sums of the workers' statistics of inferences."""
    whole, *others = [msgspec.json.decode(answer.body) for answer in answers if answer.is_success]
    by_model = {(model["name"], model["version"]): model for model in whole["model_stats"]}
    for model in [model for other in others for model in other["model_stats"]]:
        own = by_model.get((model["name"], model["version"]))
        if own is not None:
            last = max(own["last_inference"], model["last_inference"])
            own |= _sums(own, model) | {"last_inference": last}
    return replace(answers[0], body=msgspec.json.encode(whole))


def _sums(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns a document with the sums of two documents' numbers."""
    summed = dict(own)
    for name, value in own.items():
        if isinstance(value, dict):
            summed[name] = _sums(value, other[name])
        elif isinstance(value, int):
            summed[name] = value + other[name]
    return summed


def metrics(answers: Sequence[Answered]) -> Answered:
    """Returns the sums of the workers' counters, histograms and gauges. Without all of them, the sums of counters would
    fall: then the answer is the failure."""
    failure = least_ready(answers)
    if not failure.is_success:
        return failure
    is_open = b"openmetrics" in answers[0].header(b"content-type")
    parse = parse_openmetrics if is_open else parse_text
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, frozenset[tuple[str, str]]], Any] = {}
    for answer in answers:
        for family in parse(answer.body.decode()):
            families.setdefault(family.name, family)
            for sample in family.samples:
                key = family.name, sample.name, frozenset(sample.labels.items())
                if (before := values.get(key)) is not None:
                    value = _together(sample.name, before.value, sample.value)
                    sample = before._replace(value=value, exemplar=sample.exemplar or before.exemplar)
                values[key] = sample
    for family in families.values():
        family.samples = []
    for (name, _, _), sample in values.items():
        families[name].samples.append(sample)
    render = openmetrics.generate_latest if is_open else generate_latest
    return replace(answers[0], body=render(cast(Collector, SimpleNamespace(collect=families.values))))


def _together(sample: str, value: float, other: float) -> float:
    if sample in SMALLEST or sample.endswith("_created"):
        return min(value, other)
    return max(value, other) if sample in LARGEST else value + other


def joined_steps(count: int, parts: Sequence[tuple[Sequence[int], Answered]]) -> dict[str, Any]:
    """Returns the answer to a call with `count` steps. Each part has the indexes of its steps, and their worker's
    answer. If the part failed, its steps have the problem document of its failure."""
    of_parts: list[tuple[Sequence[int], dict[str, Any]]] = []
    latencies: list[dict[str, float]] = []
    is_of_columns = any(answer.is_success and b'"results"' not in answer.body[:16] for _, answer in parts)
    for part, answer in parts:
        document = msgspec.json.decode(answer.body)
        if answer.is_success:
            latencies += [document.pop("latency")] if is_of_columns else []
        else:
            document = (
                {"error": [document] * len(part)} if is_of_columns else {"results": [{"error": document}] * len(part)}
            )
        of_parts.append((part, document))
    joined: dict[str, Any] = {name: [None] * count for _, document in of_parts for name in document}
    for part, document in of_parts:
        for name, values in document.items():
            for index, value in zip(part, values, strict=True):
                joined[name][index] = value
    if latencies:
        joined["latency"] = {name: max(latency[name] for latency in latencies) for name in latencies[0]}
    return joined


READ = frozenset({"GET", "HEAD"})
TOTALS: tuple[tuple[frozenset[str], Callable[[str], object], Join], ...] = (
    (READ, re.compile("/readyz|/v2/health/ready|/v2/models/[^/]+(?:/versions/[^/]+)?/ready").fullmatch, least_ready),
    (READ, re.compile("/metrics").fullmatch, metrics),
    (READ, re.compile("/v1/report").fullmatch, reports),
    (READ, re.compile("/v2/models/(?:[^/]+/(?:versions/[^/]+/)?)?stats").fullmatch, inference_statistics),
    (frozenset({"POST"}), re.compile("/v2/repository/models/[^/]+/(?:un)?load").fullmatch, least_ready),
)
