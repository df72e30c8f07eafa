"""Requests and answers of the servers: the same windows and the same five predictions in four formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.bench.contenders import Wire

Ranked = list[tuple[int, float]]


class WrongAnswer(Exception):
    """A server's answer differs from the model's; the message has both."""


def window_body(wire: Wire, tokens: Sequence[int]) -> str:
    """Returns a request for one window's predictions, as compact JSON."""
    listed = list(tokens)
    match wire:
        case "tokens":
            document: dict[str, Any] = {"tokens": listed}
        case "windows":  # a batched endpoint takes and answers lists
            document = {"windows": [listed]}
        case "oip":  # the Open Inference Protocol's tensors
            tensor = {"name": "tokens", "shape": [1, len(listed)], "datatype": "INT64", "data": listed}
            document = {"inputs": [tensor]}
        case "wane":  # one token more than the window, because Wane prepends <eos> to a shorter sequence
            document = {"tokens": [listed[0], *listed], "mode": "window", "window": len(listed)}
    return json.dumps(document, separators=(",", ":"))


def window_answer(wire: Wire, answer: bytes) -> Ranked:
    """Returns token ids and probabilities, most probable first. Raises WrongAnswer if there are none."""
    try:
        document = json.loads(answer)
        match wire:
            case "oip":
                columns = {output["name"]: output["data"] for output in document["outputs"]}
                return list(zip(columns["token_id"], columns["probability"], strict=True))
            case "windows":
                predictions = document[0]
            case _:
                predictions = document["predictions"]
        return [(prediction["token_id"], prediction["probability"]) for prediction in predictions]
    except (ValueError, LookupError, TypeError) as error:
        raise WrongAnswer(f"no predictions in {answer[:300]!r}") from error


def check_ranked(given: Ranked, expected: Ranked, tolerance: float = 1e-4) -> None:
    """Raises WrongAnswer unless the tokens are the same, in the same order, with probabilities within `tolerance`."""
    same = [token for token, _ in given] == [token for token, _ in expected]
    if not same or any(abs(ours - theirs) > tolerance for (_, ours), (_, theirs) in zip(given, expected, strict=True)):
        raise WrongAnswer(f"answered {given}, but the model says {expected}")
