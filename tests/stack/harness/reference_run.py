"""Checks the error bounds and proofs that answers state (their claims) against reference sessions. A reference session
runs all tokens of a session without interruption through the numpy oracle, in float64.

An answer lists only its most probable tokens. The total variation is half of the sum of the absolute differences of all
probabilities. By the triangle inequality, merging several tokens into one does not increase this sum. So the check
merges all tokens that are not listed into one. The total variation of the merged distributions must be within the
answer's error bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.bundle import Bundle
from wane.models.certificate.total_variation import total_variation
from wane.models.reference import Reference
from wane.service.engine.agreement import FLOAT32_ROUNDING

Answers = Mapping[int, Mapping[str, Any]]
"""The JSON documents of the answers to a session's steps. The key is the session's position after the step."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of comparing answers with the reference. `answers` is the number of answers. `rebuilt`, `bounded` and
    `proved` are the numbers of answers whose state was rebuilt, whose bound is above 0, and whose first token is
    claimed as proved. `largest` is the largest distance (total variation) from the reference among the answers whose
    state was not resident or whose bound is above 0. `of_bounds` is the largest ratio of an answer's distance to the
    distance that its bound and the rounding errors allow, if the bound is above 0. `broken` has a line for every claim
    of an answer that does not hold."""

    answers: int
    rebuilt: int
    bounded: int
    proved: int
    largest: float
    of_bounds: float
    broken: tuple[str, ...]


class ReferenceRun:
    """Runs a bundle's model through the numpy oracle, and compares answers with the results."""

    def __init__(self, path: Path) -> None:
        bundle = Bundle.open(path)
        certificate = bundle.manifest.certificate
        assert certificate.certified and certificate.head_diameter is not None
        self._reference = Reference(bundle.manifest.architecture, bundle.weights())
        self._eos = bundle.manifest.vocabulary.eos_id
        self._unlisted = bundle.vocabulary.unlisted
        self._rounding = FLOAT32_ROUNDING
        if certificate.rounding is not None:
            between_runs = np.array(certificate.rounding.between_runs)
            self._rounding = float(total_variation(certificate.head_diameter, between_runs))

    def compare(self, sessions: Sequence[tuple[Sequence[int], Answers]]) -> Compared:
        """Compares every answer of every session with the reference. Each session is given as its tokens and its
        answers."""
        count = {"answers": 0, "rebuilt": 0, "bounded": 0, "proved": 0}
        largest = of_bounds = 0.0
        broken: list[str] = []
        for session, position, probabilities in self._distributions(sessions):
            answer = sessions[session][1][position]
            distance = _distance(answer["predictions"], probabilities)
            bound = answer["error_bound"]
            after = answer["state"] != "resident" or bound > 0
            count["answers"] += 1
            count["rebuilt"] += answer["state"] == "rebuilt"
            count["bounded"] += bound > 0
            count["proved"] += answer["top1_proved"]
            if after:
                largest = max(largest, distance)
            if bound > 0:
                of_bounds = max(of_bounds, distance / (bound + self._rounding))
            where = f"session {session} at {position}, {answer['state']}"
            if distance > bound + self._rounding:
                broken.append(
                    f"{where}: the distance from the reference is {distance:g}, but the answer claims at most {bound:g}"
                )
            probabilities[[*self._unlisted]] = 0  # `top1_proved` is about the listed tokens
            if answer["top1_proved"] and answer["predictions"][0]["token_id"] != int(probabilities.argmax()):
                broken.append(f"{where}: the first token is claimed as proved, but another token is the most probable")
        return Compared(**count, largest=largest, of_bounds=of_bounds, broken=tuple(broken))

    def _distributions(
        self, sessions: Sequence[tuple[Sequence[int], Answers]]
    ) -> Iterator[tuple[int, int, NDArray[np.float64]]]:
        """Yields the session's index, the position and the reference's probabilities (V) for every answer."""
        order = sorted(range(len(sessions)), key=lambda number: -len(sessions[number][0]))
        state = self._reference.zero_state(len(order))
        for position in range(len(sessions[order[0]][0]) + 1):
            left = [number for number in order if len(sessions[number][0]) >= position]
            input_ids = [sessions[number][0][position - 1] if position else self._eos for number in left]
            state = {name: tensor[: len(left)] for name, tensor in state.items()}
            hidden, state = self._reference.advance(np.array(input_ids), state)
            rows = [row for row, number in enumerate(left) if position in sessions[number][1]]
            if rows:
                logits = self._reference.logits(hidden[rows])
                exp = np.exp(logits - logits.max(axis=1, keepdims=True))
                for row, probabilities in zip(rows, exp / exp.sum(axis=1, keepdims=True), strict=True):
                    yield left[row], position, probabilities


def _distance(predictions: Sequence[Mapping[str, Any]], probabilities: NDArray[np.float64]) -> float:
    """Returns the total variation after all tokens that the answer does not list are merged into one. It is a lower
    bound of the total variation of all probabilities."""
    ours = np.array([prediction["probability"] for prediction in predictions])
    theirs = probabilities[[prediction["token_id"] for prediction in predictions]]
    return float(np.abs(ours - theirs).sum() + abs(ours.sum() - theirs.sum())) / 2
