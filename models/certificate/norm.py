"""The norm in which a contraction factor holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from wane.models.certificate.interval_rounding import Matrix, Vector

Order = Literal["2", "inf"]


@dataclass(frozen=True, slots=True)
class Norm:
    """The maximum, over a layer's state tensors, of the 2-norm or maximum norm of each tensor divided by its scale.

    scales: one for each state tensor in the manifest's order. A scale is a number, or an array with a weight for each
    unit, (H). transform: (H, H), a matrix by which a layer's only state tensor is multiplied before its norm is
    computed. The scales are then 1.
    """

    order: Order
    scales: tuple[float | Vector, ...] = (1.0,)
    transform: Matrix | None = None

    @property
    def stated_weights(self) -> tuple[float, ...]:
        """The scales (p, q) of two state tensors if both scales are numbers. Empty in all other cases."""
        numbers = tuple(float(scale) for scale in self.scales if not isinstance(scale, np.ndarray))
        return numbers if len(numbers) > 1 else ()

    def __str__(self) -> str:
        """Returns the norm as text: `|s|_2`, `|s / w|_inf`, `|P^(1/2) s|_2`, or with two state tensors `max(|h|_2 / p,
        ...)`."""
        if self.transform is not None:
            return f"|P^(1/2) s|_{self.order}"
        by_unit = any(isinstance(scale, np.ndarray) for scale in self.scales)
        if len(self.scales) == 1:
            return f"|s / w|_{self.order}" if by_unit else f"|s|_{self.order}"
        if by_unit:
            return f"max(|h / v|_{self.order}, |c / w|_{self.order})"
        return f"max(|h|_{self.order} / p, |c|_{self.order} / q)"

    def distance(self, *differences: Matrix) -> Vector:
        """Returns the norms of differences of states: (B, H) for each state tensor -> (B)."""
        order = 2 if self.order == "2" else np.inf
        if self.transform is not None:
            differences = tuple(difference @ self.transform.T for difference in differences)
        sizes = [
            np.linalg.norm(difference / scale, order, axis=1)
            for difference, scale in zip(differences, self.scales, strict=True)
        ]
        longest: Vector = np.max(sizes, axis=0)
        return longest
