"""The largest requests that a server's limits allow, for every route of its OpenAPI description.

Each list of a body is at its limit, each number at its maximum, and each flag is true: first the fields alone, and then
in pairs. The description has all fields and limits. This module knows only what names and tokens the values must be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain, combinations
from typing import Any, NamedTuple

from wane.service.api.tensors import BINARY_BYTES, JSON_BYTES
from wane.service.settings import Settings

Json = Mapping[str, Any]

SOURCES = ("input", "inputs", "tokens", "events", "prompt", "history", "rewind")
"""The fields with the input of a request. A body has one of them."""
FREE_TEXT, STEP_TOKENS, STEP_FILTER, ROW_TOKENS = 60_000, 64, 500, 1000
SESSION = "large"
BIASED = 6000  # the tokens in `logit_bias`; a body has at most about so many fields


class Subject(NamedTuple):
    """A served model. events: the names of events, or an empty list for a model of text."""

    name: str
    version: str
    vocabulary: int
    events: list[str]


class Case(NamedTuple):
    """A request. route: the method and the path of the description. name: the fields at their largest. body: the body,
    which is encoded when it is sent, because all bodies together take gigabytes."""

    route: str
    name: str
    method: str
    path: str
    body: bytes | Json


def cases(document: Json, subjects: list[Subject]) -> Iterator[Case]:
    """Yields the largest requests to every route."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for subject in subjects:
                route = f"{method.upper()} {path}"
                here = path.format(name=subject.name, version=subject.version, session=f"{SESSION}-{subject.name}")
                query = {
                    one["name"]: most
                    for one in operation["parameters"]
                    if one["in"] == "query" and (most := _largest(document, one["schema"])) is not None
                }
                described = operation.get("requestBody", {}).get("content", {}).get("application/json")
                if described is not None:
                    for name, body in bodies(document, described["schema"], subject, path):
                        yield Case(route, f"{subject.name}: {name}", "POST", here, body)
                elif method != "delete":
                    here += "".join(f"?{name}={most}" for name, most in query.items())
                    yield Case(route, subject.name, method.upper(), here, b"")


def bodies(document: Json, schema: Json, subject: Subject, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the largest bodies of one class: each source of the input, then with each other field, then with pairs."""
    if path.endswith("load"):  # an unloaded model would leave the other requests without an answer
        return
    if path.endswith("infer"):
        yield from inferences(subject)
        return
    properties = next(_choices(document, schema)).get("properties", {})
    fixed: dict[str, Any] = {"model": subject.name} if "model" in properties and "/{session}" not in path else {}
    if "position" in properties and "history" in properties:
        fixed["position"] = 10**6
    others = {
        field: most
        for field, one in properties.items()
        if field not in (*SOURCES, *fixed, "session", "steps", "position", "model", "models")
        and (most := _value(document, field, one, subject)) is not None
    }
    if "steps" in properties:
        for source, given in _sources({"tokens", "events", "input"}, subject, STEP_TOKENS):
            others = _others(document, "SessionStepBody", subject)
            others |= {name: others[name][:STEP_FILTER] for name in ("exclude", "candidates") if name in others}
            for chosen in _chosen(others):
                steps = [
                    {"session": f"{SESSION}-{subject.name}-{index}", source: given, **chosen} for index in range(256)
                ]
                for form in ("documents", "columns"):
                    yield f"{source} of 256 steps, {_text(chosen)}, {form}", {"steps": steps, "format": form}
        return
    found = [*_sources(properties.keys(), subject, _tokens(document, properties))]
    for source, given in found or [("", None)]:
        for chosen in _chosen(others):
            yield f"{source} {_text(chosen)}".strip(), {**fixed, **({source: given} if source else {}), **chosen}


def inferences(subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the largest inferences: each output alone and in pairs, of as many rows as a batch and the answer may
    have, as JSON and binary."""
    outputs = ("top_ids", "top_logprobs", "logits", "token_logprobs", "error_bound", "top1_proved", "position")
    rows = [_ids(subject, ROW_TOKENS) for _ in range(256)]
    widths = {"logits": subject.vocabulary, "token_logprobs": ROW_TOKENS}
    for wanted in chain(((one,) for one in outputs), combinations(outputs, 2)):
        width = sum(widths.get(name, 0) for name in wanted)
        for binary, size in ((False, JSON_BYTES), (True, BINARY_BYTES)) if width else ((False, 0),):
            count = min(256, Settings().max_answer_bytes // (width * size)) if width else 256
            tensor = {"name": "tokens", "shape": [count, ROW_TOKENS], "datatype": "INT64", "data": rows[:count]}
            body = {"inputs": [tensor], "outputs": [{"name": name} for name in wanted]}
            form = ", binary" if binary else ""
            yield ", ".join(wanted) + form, body | {"parameters": {"binary_data_output": binary}}
    if subject.events:
        names = [_names(subject, ROW_TOKENS // 4) for _ in range(256)]
        tensor = {"name": "events", "shape": [256, ROW_TOKENS // 4], "datatype": "BYTES", "data": names}
        yield "events", {"inputs": [tensor]}
    else:
        texts = ["the history of " * 200] * 256
        yield "text", {"inputs": [{"name": "text", "shape": [256], "datatype": "BYTES", "data": texts}]}


def _chosen(others: Json) -> Iterator[dict[str, Any]]:
    for count in (0, 1, 2):
        for names in combinations(others, count):
            yield {name: others[name] for name in names}


def _text(chosen: Json) -> str:
    return "with " + " and ".join(chosen) if chosen else "alone"


def _others(document: Json, name: str, subject: Subject) -> dict[str, Any]:
    properties = document["components"]["schemas"][name]["properties"]
    return {
        field: most
        for field, one in properties.items()
        if field not in (*SOURCES, "session", "model") and (most := _value(document, field, one, subject)) is not None
    }


def _tokens(document: Json, properties: Json) -> int:
    """Returns the largest number of tokens of the input."""
    limits = [
        int(one["maxItems"])
        for name in ("tokens", "events", "history")
        if name in properties
        for one in _choices(document, properties[name])
        if "maxItems" in one
    ]
    return min(limits, default=65_536)


def _sources(fields: Any, subject: Subject, tokens: int) -> Iterator[tuple[str, Any]]:
    for field in fields:
        if field in ("tokens", "history"):
            yield field, _ids(subject, tokens)
        elif field == "events" and subject.events:
            yield field, _names(subject, tokens)
        elif field == "input" and not subject.events:
            yield field, ("the history of the game " * tokens)[: min(4 * tokens, FREE_TEXT)]
        elif field == "inputs":
            yield field, [_ids(subject, ROW_TOKENS) for _ in range(256)]
            yield field, [{"events": _names(subject, 500)} if subject.events else "the game " * 500 for _ in range(256)]
        elif field == "prompt":
            yield field, _ids(subject, 2600)
            yield field, _ids(subject, tokens)
            yield field, [_ids(subject, ROW_TOKENS) for _ in range(256)]
            yield field, "\n".join(_names(subject, tokens)) if subject.events else "the game " * 10_000


def _value(document: Json, field: str, schema: Json, subject: Subject) -> Any:
    """Returns the largest value of a field, or None if its size does not matter."""
    if field in ("exclude", "candidates"):
        return _names(subject, 9999) if subject.events else None
    if field == "logit_bias":
        return {str(token): 1 for token in range(min(BIASED, subject.vocabulary - 1))}
    if field in ("stop", "stop_texts"):
        return [f"{index:0256}" for index in range(16)]
    if field == "windows":
        return [*range(97, 129)]
    if field in ("expected_position", "idempotency_key", "session", "user", "suffix", "rewind", "best_of", "truncated"):
        return None
    return _largest(document, schema)


def _largest(document: Json, schema: Json) -> Any:
    for one in _choices(document, schema):
        if one.get("type") in ("integer", "number") and "maximum" in one:
            return one["maximum"]
        if one.get("type") == "boolean":
            return True
    return None


def _choices(document: Json, schema: Json) -> Iterator[Json]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield schema
    for inner in schema.get("anyOf", ()):
        yield from _choices(document, inner)


def _ids(subject: Subject, count: int) -> list[int]:
    return _random(subject.vocabulary, count)


@cache
def _random(vocabulary: int, count: int) -> list[int]:
    return random.Random(count).choices(range(2, vocabulary), k=count)


def _names(subject: Subject, count: int) -> list[str]:
    return [subject.events[index % len(subject.events)] for index in _random(len(subject.events), count)]
