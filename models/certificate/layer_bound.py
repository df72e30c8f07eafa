"""What is proved of one layer: a contraction factor, the norm that it holds in, and how large the state can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from models.certificate.admissible import Matrix, Vector

Norm = Literal["2", "inf"]


@dataclass(frozen=True, slots=True)
class LayerBound:
    """`|phi(s, x) - phi(s~, x)| <= factor |s - s~|` for every admissible x and all s, s~ within `reach`.

    The norm is the greatest, over the layer's state tensors, of their own norm (2 or maximum) divided by its weight.
    reach: by state tensor, in the manifest's order, the greatest |value| of each unit from the zero state, (H).
    """

    factor: float
    rule: str
    norm: Norm
    reach: tuple[Vector, ...]
    weights: tuple[float, ...] = (1.0,)

    @property
    def stated_weights(self) -> tuple[float, ...]:
        """The weights that `norm_name` speaks of: p and q, or none."""
        return self.weights if len(self.weights) > 1 else ()

    @property
    def norm_name(self) -> str:
        """The norm, for people: `|s|_2`, or with two state tensors `max(|h|_2 / p, |c|_2 / q)`."""
        if len(self.weights) == 1:
            return f"|s|_{self.norm}"
        return f"max(|h|_{self.norm} / p, |c|_{self.norm} / q)"

    def distance(self, *differences: Matrix) -> Vector:
        """The norm of differences of states, (B, H) for each state tensor: (B)."""
        order = 2 if self.norm == "2" else np.inf
        sizes = [
            np.linalg.norm(difference, order, axis=1) / weight
            for difference, weight in zip(differences, self.weights, strict=True)
        ]
        longest: Vector = np.max(sizes, axis=0)
        return longest
