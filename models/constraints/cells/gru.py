"""The constraint of the GRU. It uses `models/constraints/gated_memory.py` with the GRU's comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from wane.models.constraints.comparison import SETTLED, SETTLING, Drive, Gate, pick, spectral_norm, tanh_slope
from wane.models.constraints.gated_memory import hold
from wane.models.constraints.l1_ball import project_rows
from wane.models.constraints.layer import ConstrainedLayer


class GruComparison:
    """The GRU's `Comparison`. The matrix's blocks are in the order r, z, n. `bounds` are bounds of the difference of h,
    (H)."""

    def __init__(self, drive: Drive, matrix: Tensor) -> None:
        self.matrix, self.magnitude = matrix, matrix.abs()
        h = torch.ones_like(matrix[0])
        # recalled: the recurrent bias of n, which r multiplies.
        gates, recalled = drive.bias[: 2 * len(h)], drive.bias[2 * len(h) :]
        outside = torch.cat([gates, torch.zeros_like(recalled)])
        least, greatest = (drive.least + outside).chunk(3), (drive.greatest + outside).chunk(3)
        for _ in range(SETTLING):
            reach = (self.magnitude @ h).chunk(3)
            r_low, r_high = least[0] - reach[0], greatest[0] + reach[0]
            q_low, q_high = recalled - reach[2], recalled + reach[2]
            opens = torch.sigmoid(r_low), torch.sigmoid(r_high)
            n_low = least[2] + torch.minimum(opens[0] * q_low, opens[1] * q_low)
            n_high = greatest[2] + torch.maximum(opens[0] * q_high, opens[1] * q_high)
            most = torch.tanh(torch.maximum(n_low.abs(), n_high.abs()))
            settled = torch.minimum(h, most)
            done = bool((h - settled <= SETTLED).all())
            h = settled
            if done:
                break
        self.h, self.range = h, h + most
        self.z = Gate.over(least[1] - reach[1], greatest[1] + reach[1])
        slope = tanh_slope(n_low, n_high)
        self.by_n = slope * opens[1]
        self.by_r = slope * torch.maximum(q_low.abs(), q_high.abs()) * Gate.over(r_low, r_high).steepest

    def even(self) -> Tensor:
        return torch.ones_like(self.h)

    def _cases(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bounds of h's difference after a step for each of the C intervals of z, once with the least and
        once with the greatest z of the interval: (2, C, H). Also returns these values of z, (2, C, H)."""
        y = (self.magnitude @ bounds).chunk(3)
        n = self.by_n * y[2] + self.by_r * y[0]
        keep = torch.stack([self.z.low, self.z.high])
        return keep * bounds + (1 - keep) * n + self.z.slope * (self.range * y[1]), keep

    def step(self, bounds: Tensor) -> Tensor:
        return self._cases(bounds)[0].amax((0, 1))

    def two_norm(self) -> float:
        w_r, w_z, w_n = self.matrix.chunk(3)
        enter = 1 - self.z.low[0]
        blocks = ((enter * self.by_r, w_r), (self.range * self.z.steepest, w_z), (enter * self.by_n, w_n))
        return float(self.z.widest.max()) + sum(spectral_norm(rows, block) for rows, block in blocks)

    def rows_held(self, bounds: Tensor, target: float) -> Tensor:
        found, keep = (cases.flatten(0, 1) for cases in self._cases(bounds))
        at = found.argmax(0)
        kept, slope = pick(keep, at), pick(self.z.slope.repeat(2, 1), at)
        by = ((1 - kept) * self.by_r, self.range * slope, (1 - kept) * self.by_n)
        weights = torch.cat([each[:, None] * bounds for each in by], 1)
        rows = torch.cat(self.matrix.chunk(3), 1)
        return torch.cat(project_rows(rows, weights, (target - kept) * bounds).chunk(3, 1))


def constrain(layer: ConstrainedLayer, target: float) -> Tensor:
    """Changes a layer's weights in place so that its contraction factor is at most `target`. Returns the greatest |h|
    of each unit, (H) float64."""
    return hold(layer.recurrence(), target, GruComparison)
