"""Requests and answers in the servers' four formats. In every format, the request has the same window, and the answer
has five predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.bench.contenders import Wire

Ranked = list[tuple[int, float]]


class WrongAnswer(Exception):
    """A server's answer differs from the model's. The message contains the two answers."""


def window_body(wire: Wire, tokens: Sequence[int]) -> str:
    """Returns a request for one window's predictions, as compact JSON."""
    listed = list(tokens)
    match wire:
        case "tokens":
            document: dict[str, Any] = {"tokens": listed}
        case "windows":  # The endpoint takes a list of windows and answers with a list of results.
            document = {"windows": [listed]}
        case "oip":  # The request is in the Open Inference Protocol, in which inputs are tensors.
            tensor = {"name": "tokens", "shape": [1, len(listed)], "datatype": "INT64", "data": listed}
            document = {"inputs": [tensor]}
        case "wane":
            # The request has one token more than the window, because Wane prepends <eos> to a sequence that fits in the
            # window.
            document = {"tokens": [listed[0], *listed], "mode": "window", "window": len(listed)}
    return json.dumps(document, separators=(",", ":"))


def window_answer(wire: Wire, answer: bytes) -> Ranked:
    """Returns an answer's token ids and probabilities, the most probable first. Raises WrongAnswer if the answer has no
    predictions."""
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
    """Raises WrongAnswer if the tokens or their order differ, or a probability differs by more than `tolerance`."""
    same = [token for token, _ in given] == [token for token, _ in expected]
    if not same or any(abs(ours - theirs) > tolerance for (_, ours), (_, theirs) in zip(given, expected, strict=True)):
        raise WrongAnswer(f"the answer is {given}, but the model's is {expected}")
