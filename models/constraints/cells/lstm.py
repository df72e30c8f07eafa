"""The constraint of the LSTM. It uses `models/constraints/gated_memory.py` with the LSTM's comparison."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wane.models.constraints.comparison import SETTLED, SETTLING, Drive, Gate, pick, spectral_norm, tanh_slope
from wane.models.constraints.gated_memory import hold
from wane.models.constraints.l1_ball import project_rows
from wane.models.constraints.layer import ConstrainedLayer

HEARD = 1.2
"""The weight of each unit of h in the weights that `LstmComparison.even` returns. The weight of each unit of c is 1. A
larger weight of h allows larger recurrent rows of the output gate."""

OPEN = 1e-9
"""If a forget gate may come this close to 1, c has no useful bound."""


class LstmComparison:
    """The LSTM's `Comparison`. The matrix's blocks are in the order i, f, g, o. `bounds` are bounds of the difference
    of h, then of the difference of c, (2 H)."""

    def __init__(self, drive: Drive, matrix: Tensor) -> None:
        self.matrix, self.magnitude = matrix, matrix.abs()
        least, greatest = drive.least + drive.bias, drive.greatest + drive.bias
        h = torch.ones_like(matrix[0])
        for _ in range(SETTLING):
            reach = self.magnitude @ h
            low, high = (least - reach).chunk(4), (greatest + reach).chunk(4)
            room = torch.sigmoid(-high[1])
            most = torch.tanh(torch.maximum(high[2].abs(), low[2].abs()))
            c = torch.sigmoid(high[0]) * most / room.clamp(min=OPEN)
            settled = torch.minimum(h, torch.sigmoid(high[3]) * torch.tanh(c))
            done = bool((h - settled <= SETTLED).all())
            h = settled
            if done:
                break
        self.h, self.c, self.shown = h, c, torch.tanh(c)
        self.closed = bool((room < 2 * OPEN).any())
        i, self.forget, self.output = (Gate.over(low[gate], high[gate]) for gate in (0, 1, 3))
        self.by_i, self.by_g = most * i.steepest, i.widest * tanh_slope(low[2], high[2])

    def even(self) -> Tensor:
        ones = torch.ones_like(self.h)
        return torch.cat([HEARD * ones, ones])

    def _cases(self, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three arrays of bounds. The first, (C, H), bounds the part of c's difference that the previous c and
        f cause, for each interval of f. The second, (C, H), bounds the part of h's difference that o causes, for each
        interval of o. The third, (H), bounds the part of c's difference that i and g cause."""
        v, w = bounds.chunk(2)
        y = (self.magnitude @ v).chunk(4)
        kept = self.forget.high * w + self.forget.slope * (self.c * y[1])
        return kept, self.output.slope * (self.shown * y[3]), self.by_i * y[0] + self.by_g * y[2]

    def step(self, bounds: Tensor) -> Tensor:
        if self.closed:
            return torch.full_like(bounds, math.inf)
        kept, turned, added = self._cases(bounds)
        c = kept.amax(0) + added
        return torch.cat([(self.output.high * c + turned).amax(0), c])

    def two_norm(self) -> float:
        if self.closed:
            return math.inf
        w_i, w_f, w_g, w_o = self.matrix.chunk(4)
        blocks = ((self.by_i, w_i), (self.c * self.forget.steepest, w_f), (self.by_g, w_g))
        o, f = self.output.widest, self.forget.widest
        a = sum(spectral_norm(rows, block) for rows, block in blocks)
        b = sum(spectral_norm(o * rows, block) for rows, block in blocks)
        b += spectral_norm(self.shown * self.output.steepest, w_o)
        keep, shown = float(f.max()), float((o * f).max())
        half = (keep - b) / 2
        return (keep + b) / 2 + math.hypot(half, math.sqrt(a * shown))

    def rows_held(self, bounds: Tensor, target: float) -> Tensor:
        v, w = bounds.chunk(2)
        kept, turned, _ = self._cases(bounds)
        at_f, at_o = kept.argmax(0), (self.output.high * (target * w) + turned).argmax(0)
        w_i, w_f, w_g, w_o = self.matrix.chunk(4)
        by = (self.by_i, self.c * pick(self.forget.slope, at_f), self.by_g)
        weights = torch.cat([each[:, None] * v for each in by], 1)
        room = (target - pick(self.forget.high, at_f)) * w
        i, f, g = project_rows(torch.cat([w_i, w_f, w_g], 1), weights, room).chunk(3, 1)
        room = target * v - pick(self.output.high, at_o) * (target * w)
        o = project_rows(w_o, (self.shown * pick(self.output.slope, at_o))[:, None] * v, room)
        return torch.cat([i, f, g, o])


def constrain(layer: ConstrainedLayer, target: float) -> Tensor:
    """Changes a layer's weights in place so that its contraction factor is at most `target`. Returns the greatest |h|
    of each unit, (H) float64."""
    return hold(layer.recurrence(), target, LstmComparison)
