"""The results of `research.proofs`, as stored in its JSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from benchmarks.summary import write_json
from wane.models.manifest import Contraction, Frozen

Values = NDArray[np.float64]


class MedianAndLargest(Frozen):
    """Median and largest of a number over positions; null if infinite."""

    median: float | None
    largest: float | None

    @classmethod
    def of(cls, values: Values) -> MedianAndLargest:
        """Summarises values: (N)."""
        found = [float(np.median(values)), float(values.max())]
        median, largest = (value if np.isfinite(value) else None for value in found)
        return cls(median=median, largest=largest)


class Proved(Frozen):
    """Shares of positions whose most probable token is proved to be the never-interrupted run's.

    curve, request: the service's margin test, with the certificate's e_k, and with the smaller of e_k and the request's
    radius, each plus the rounding of two float32 runs. direction: `models/certificate/top1.py`, in exact arithmetic.
    """

    curve: float
    request: float
    direction: float


class WindowFigures(Frozen):
    """One k. Distances are in the 2-norm, of `hidden`; variations are total variations at temperature 1.

    observed, observed_variation: window against never-interrupted run, both in float64. worst_case: e_k;
    worst_case_variation: epsilon(k), with the rounding of two runs; request, request_variation: the same for the
    window's tokens, the latter from the smaller of radius and e_k. direction_variation: by direction, like
    `Proved.direction`; None in older figures. over_worst_case, over_request: observed distance divided by the bound,
    position by position. violations: positions at which a bound was violated or a proof was wrong.
    """

    positions: int
    observed: MedianAndLargest
    observed_variation: MedianAndLargest
    worst_case: float | None
    worst_case_variation: float | None
    request: MedianAndLargest
    request_variation: MedianAndLargest
    direction_variation: MedianAndLargest | None = None
    over_worst_case: MedianAndLargest | None
    over_request: MedianAndLargest
    same_top1: float
    proved: Proved
    violations: int


class ModelFigures(Frozen):
    """One bundle. weights: SHA-256 of the file; tokens: of the never-interrupted run, the whole split.

    smallest_window: k(1e-3); curve: e_k at some k; rounding: of two runs, of the certificate. perplexity,
    window_perplexity: the manifest's, of the validation split per token, recurrent and by window at the same positions.
    """

    weights: str
    cell: str
    layers: tuple[Contraction, ...]
    certified: bool
    max_window: int
    tokens: int
    smallest_window: int | None
    perplexity: float | None
    window_perplexity: dict[int, float]
    curve: dict[int, float]
    rounding: float | None
    windows: dict[int, WindowFigures] = Field(default_factory=dict)

    def with_windows_of(self, before: ModelFigures | None) -> ModelFigures:
        """Adds earlier measurements if they are of the same weights, certificate and text."""
        same = before is not None and before.model_copy(update={"windows": {}}) == self.model_copy(
            update={"perplexity": before.perplexity, "window_perplexity": before.window_perplexity}
        )
        return self.model_copy(update={"windows": before.windows}) if before is not None and same else self


class Results(Frozen):
    """The measured bundles by name."""

    split: str
    models: dict[str, ModelFigures] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Writes atomically."""
        write_json(path, self)

    def having(self, name: str, model: ModelFigures) -> Results:
        return self.model_copy(update={"models": {**self.models, name: model}})
