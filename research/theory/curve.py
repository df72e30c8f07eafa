"""Measured curves beside their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

Result = dict[str, Any]

FLOAT = 1e-9
"""The relative error of a bound and of a measured value in float64 is smaller than this."""

ROUNDING = 1e-14
"""The absolute rounding of one step in float64, for states, outputs and weights of a size of about 1."""


def spread(values: Tensor) -> Result:
    """Returns the median, the smallest and the largest of each column. values: (seeds, points)."""
    return {
        "median": numbers(values.median(0).values),
        "least": numbers(values.amin(0)),
        "most": numbers(values.amax(0)),
    }


def numbers(values: Tensor) -> list[float | None]:
    """Returns a vector as numbers for JSON, with None for infinity."""
    return [rounded(value) if math.isfinite(value) else None for value in values.tolist()]


def rounded(value: float) -> float:
    """Rounds to five significant digits."""
    return float(f"{value:.5g}")


def curve(measured: Tensor, bound: Tensor, kept: Sequence[int] | slice = slice(None)) -> Result:
    """Compares a measured curve with its bound, seed by seed and point by point. Both: (seeds, points). `largest_ratio`
    is the largest measured value as a share of its bound: more than 1 if the curve leaves its bound. It is of all
    points; `kept` selects the points whose spread is stored."""
    return {
        "measured": spread(measured[:, kept]),
        "bound": spread(bound[:, kept]),
        "largest_ratio": rounded(float((measured / bound).max())),
    }


def departures(found: Any, place: str = "") -> list[str]:
    """Returns a sentence for each curve in the results that leaves its bound, and for each claim that does not hold."""
    if isinstance(found, list):
        return [line for item in found for line in departures(item, place)]
    if not isinstance(found, dict):
        return []
    named = " ".join([place, *(f"{key} {found[key]}" for key in NAMES if key in found)]).strip()
    lines = []
    ratio = found.get("largest_ratio", 0.0)
    if not ratio <= 1 + FLOAT:
        lines.append(f"{named}: the measured curve is {ratio:.3g} times its bound")
    if found.get("holds") is False:
        lines.append(f"{named}: {found['claim']} does not hold")
    return lines + [line for key, item in found.items() for line in departures(item, f"{named} {key}".strip())]


NAMES = ("kind", "factor", "rate", "window", "epsilon")
"""The keys that name a part of the results in a sentence."""
