"""The k-step bound of a whole stack."""

from __future__ import annotations

import numpy as np

from models.certificate.admissible import Vector
from models.certificate.layer_bound import LayerBound
from models.manifest import Architecture
from models.weights import Weights

MARGIN = 1e-10


def state_error_curve(
    architecture: Architecture, weights: Weights, bounds: list[LayerBound], max_window: int
) -> Vector:
    """e_k for k = 1 to max_window, (max_window): non-increasing, rounded outward."""
    if architecture.block == "residual":
        gain = np.abs(weights["norm.weight"].astype(np.float64)).max()
        return np.full(max_window, 2 * np.sqrt(architecture.hidden) * gain * (1 + MARGIN))
    top, width = bounds[-1], np.sqrt(architecture.hidden)
    reach = float(np.linalg.norm(top.reach[0])) if np.isfinite(top.reach[0]).all() else 1e30
    if architecture.layers > 1:
        return np.full(max_window, 2 * reach * (1 + MARGIN))
    order, into = (2, 1.0) if top.norm == "2" else (np.inf, width)
    cut = max(float(np.linalg.norm(r, order)) / w for r, w in zip(top.reach, top.weights, strict=True))
    cut = min(cut, 1e30)
    steps = np.arange(1, max_window + 1)
    curve = np.minimum(cut * top.factor**steps * top.weights[0] * into, 2 * reach)
    result: Vector = curve * (1 + MARGIN) + 1e-300
    return result
