"""Compares a bundle's windows with the bundle's never-interrupted run at many positions. Computes distances, bounds and
proofs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from research.proof_results import MedianAndLargest, Proved, Values, WindowFigures
from wane.models.bundle import Bundle
from wane.models.certificate.request import RequestBound
from wane.models.certificate.top1 import Top1
from wane.models.certificate.total_variation import total_variation
from wane.models.reference import Reference
from wane.service.engine.top1_proof import MarginProof

AT_ONCE = 128

FLOAT64 = 1e-9
"""The largest excess of a distance or total variation over its bound that is attributed to the rounding of float64."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Never:
    """The results of a never-interrupted run over the whole stream, at N positions. ends: the indices of these
    positions in the stream, (N). hidden: `hidden` after the token at each position, (N, H)."""

    ends: Tokens
    hidden: Values

    def fewer(self, count: int) -> Never:
        """Returns the results at no more than `count` of these positions, evenly spread."""
        chosen = np.linspace(0, len(self.ends) - 1, min(count, len(self.ends))).astype(np.int64)
        return Never(self.ends[chosen], self.hidden[chosen])


def never_interrupted(reference: Reference, stream: Tokens, first: int, count: int, progress: Progress) -> Never:
    """Runs the network over the whole stream, and returns `hidden` at `count` evenly spread positions. The smallest
    position is `first`."""
    ends = np.linspace(first, len(stream) - 1, count).astype(np.int64)
    wanted, hidden = set(ends.tolist()), []
    state = reference.zero_state(1)
    task = progress.add_task("never interrupted", total=len(stream))
    for position, token in enumerate(stream):
        after, state = reference.advance(np.array([token]), state)
        if position in wanted:
            hidden.append(after[0])
        if position % 1000 == 0:
            progress.update(task, completed=position)
    progress.remove_task(task)
    return Never(ends, np.array(hidden))


class Prover:
    """Computes the bounds and proofs of one bundle."""

    def __init__(self, bundle: Bundle) -> None:
        architecture, weights = bundle.manifest.architecture, bundle.weights()
        self.certificate = bundle.manifest.certificate
        self.reference = Reference(architecture, weights)
        self._request = RequestBound(architecture, weights)
        self._direction = Top1(architecture, weights, self._request)
        self._margin = MarginProof(weights)
        self._rounding = self.certificate.rounding.between_runs if self.certificate.rounding else 0.0

    def figures(self, stream: Tokens, never: Never, k: int, progress: Progress) -> WindowFigures:
        """Measures windows of `k` tokens at all positions of `never`."""
        columns: dict[str, list[Values]] = {}
        task = progress.add_task(f"windows of {k}", total=len(never.ends))
        for start in range(0, len(never.ends), AT_ONCE):
            ends = never.ends[start : start + AT_ONCE]
            found = self._measure(stream[ends[:, None] + np.arange(1 - k, 1)], never.hidden[start : start + AT_ONCE])
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
            progress.advance(task, len(ends))
        progress.remove_task(task)
        of = {name: np.concatenate(parts) for name, parts in columns.items()}
        worst, epsilon = self.certificate.state_error_at(k), self.certificate.error_bound_at(k)
        wrong = (of["observed"] > of["smaller"] + FLOAT64) | (of["observed_variation"] > of["variation"] + FLOAT64)
        wrong |= of["observed_variation"] > of["direction_variation"] + FLOAT64
        for name in ("curve", "request", "direction"):
            wrong |= (of[name] > 0) & (of["same"] == 0)
        return WindowFigures(
            positions=len(never.ends),
            observed=MedianAndLargest.of(of["observed"]),
            observed_variation=MedianAndLargest.of(of["observed_variation"]),
            worst_case=worst,
            worst_case_variation=epsilon,
            request=MedianAndLargest.of(of["radius"]),
            request_variation=MedianAndLargest.of(of["variation"]),
            direction_variation=MedianAndLargest.of(of["direction_variation"]),
            over_worst_case=None if worst is None else MedianAndLargest.of(of["observed"] / worst),
            over_request=MedianAndLargest.of(of["observed"] / of["radius"]),
            same_top1=float(of["same"].mean()),
            proved=Proved(**{name: float(of[name].mean()) for name in ("curve", "request", "direction")}),
            violations=int(wrong.sum()),
        )

    def _measure(self, windows: Tokens, hidden: Values) -> dict[str, Values]:
        bound = self._request(windows)
        worst = self.certificate.state_error_at(windows.shape[1])
        curve = np.inf if worst is None else worst
        smaller = np.minimum(bound.radius, curve)
        logits, never = self.reference.logits(bound.hidden), self.reference.logits(hidden)
        rows = list(zip(logits.astype(np.float32), bound.hidden.astype(np.float32), smaller, strict=True))
        direction = self._direction.proved(replace(bound, radius=smaller))
        return {
            "observed": np.linalg.norm(bound.hidden - hidden, axis=1),
            "observed_variation": np.abs(_softmax(logits) - _softmax(never)).sum(axis=1) / 2,
            "radius": bound.radius,
            "smaller": smaller,
            "variation": total_variation(self.certificate.head_diameter, smaller + self._rounding),
            "same": (logits.argmax(axis=1) == never.argmax(axis=1)).astype(np.float64),
            "curve": np.array([self._has_no_rival(x, h, curve) for x, h, _ in rows]),
            "request": np.array([self._has_no_rival(x, h, error) for x, h, error in rows]),
            "direction": direction.astype(np.float64),
            "direction_variation": self._direction.variation(bound),
        }

    def _has_no_rival(self, logits: NDArray[np.float32], hidden: NDArray[np.float32], error: float) -> float:
        return float(self._margin.has_no_rival(logits, hidden, error + self._rounding, int(logits.argmax())))


def _softmax(logits: Values) -> Values:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Values = shares / shares.sum(axis=1, keepdims=True)
    return result
