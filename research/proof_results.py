"""The results of `research.proofs`, in the form of its JSON file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from benchmarks.summary import write_json
from wane.models.layer_registry import Frozen
from wane.models.manifest import Contraction

Values = NDArray[np.float64]


class MedianAndLargest(Frozen):
    """The median and the largest value over positions. An infinite value is stored as null."""

    median: float | None
    largest: float | None

    @classmethod
    def of(cls, values: Values) -> MedianAndLargest:
        """Summarises `values`, (N)."""
        found = [float(np.median(values)), float(values.max())]
        median, largest = (value if np.isfinite(value) else None for value in found)
        return cls(median=median, largest=largest)


class Proved(Frozen):
    """The shares of positions at which the window's most probable token is proved to equal that of the
    never-interrupted run.

    curve: the share that the service's margin proof proves from the certificate's error bound e_k.
    request: the share that the service's margin proof proves from the smaller of e_k and the request's radius (the
        bound of the distance for the window's own tokens).
    direction: the share that the direction proof of `models/certificate/top1.py` proves, in exact arithmetic.

    For `curve` and `request`, the rounding of two float32 runs is added to the error bound.
    """

    curve: float
    request: float
    direction: float


class WindowFigures(Frozen):
    """The results of one bundle for windows of one length k. A distance is the 2-norm distance between the `hidden` of
    the window and of the never-interrupted run. A variation is the total variation distance between their predictions
    at temperature 1.

    positions: the number of measured positions.
    observed: the distance, in float64.
    observed_variation: the variation, in float64.
    worst_case: e_k, the certificate's bound of the distance.
    worst_case_variation: epsilon(k), the certificate's bound of the variation, including the rounding of two runs.
    request: the request's radius (see `Proved`).
    request_variation: the bound of the variation that follows from the smaller of this radius and e_k.
    direction_variation: the direction proof's bound of the variation (see `Proved`). It is None in older results.
    over_worst_case: the observed distance divided by `worst_case`.
    over_request: the observed distance divided by the request's radius at the same position.
    same_top1: the share of positions at which the window and the never-interrupted run have the same most probable
        token.
    violations: the number of positions at which a bound was violated or a proof was wrong.
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
    """The results of one bundle.

    weights: the SHA-256 of the weights file.
    tokens: the number of tokens of the split. The never-interrupted run reads all of them.
    smallest_window: k(1e-3), the smallest window whose total variation is proved to be at most 1e-3.
    curve: e_k, by k.
    rounding: the certificate's rounding of two runs.
    perplexity: the recurrent mode's perplexity per token at the sampled positions of the validation split, from the
        manifest.
    window_perplexity: the perplexity per token of windows at these positions, by k, from the manifest.
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
        """Returns a copy with the measurements (`windows`) of `before`, if these were made with the same weights,
        certificate and text. Otherwise returns `self`."""
        same = before is not None and before.model_copy(update={"windows": {}}) == self.model_copy(
            update={"perplexity": before.perplexity, "window_perplexity": before.window_perplexity}
        )
        return self.model_copy(update={"windows": before.windows}) if before is not None and same else self


class Results(Frozen):
    """The results of all measured bundles, by bundle name."""

    split: str
    models: dict[str, ModelFigures] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Writes the JSON file atomically."""
        write_json(path, self)

    def having(self, name: str, model: ModelFigures) -> Results:
        return self.model_copy(update={"models": {**self.models, name: model}})
