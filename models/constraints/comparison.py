"""The comparisons of `models/certificate/lstm.py` and `gru.py` again, in torch and fit for shrinking matrices.

A comparison bounds one step's differences unit by unit: `step(d)` for bounds d (by unit, in the order of `owners`),
homogeneous and monotone. If `step(w) <= r w` for positive w, differences shrink by r in the maximum norm weighted by w.
All of it shrinks with every entry's magnitude in the recurrent matrix, the box that it is settled in included: rows may
be shrunk one by one. The LSTM's and the GRU's rules in the 2-norm are here too: those are better for dense matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wane.models.constraints.l1_ball import project_rows

SETTLING = 30
SETTLED = 1e-7
PIECES = 16
PERRON_ITERATIONS = 60
LEAST_WEIGHT = 1e-6

HEARD = 1.2
"""How much larger than an LSTM's c its h may be taken: room for the output gate's recurrent rows."""

OPEN = 1e-9
"""A forget gate that may come this close to 1 leaves the cell without a bound worth the name."""


@dataclass(frozen=True, slots=True)
class Drive:
    """Least and greatest of what input and biases together add to the pre-activations: (G H), float64.

    recalled: the bias that is added to the GRU's `W_n h`, inside the reset gate; (H), zero for an LSTM.
    """

    least: Tensor
    greatest: Tensor
    recalled: Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """A sigmoid gate over a range of pre-activations, (H); `low`, `high`, `slope` by case, (C, H).

    The smaller of two gates is between low and high, and the two are apart by at most slope times their
    pre-activations' distance: `models/certificate/cases.py`.
    """

    low: Tensor
    high: Tensor
    slope: Tensor

    @classmethod
    def over(cls, least: Tensor, greatest: Tensor) -> Gate:
        least, greatest = least.clamp(-700, 700), greatest.clamp(-700, 700)
        bottom, top = torch.sigmoid(least), torch.sigmoid(greatest)
        shares = torch.linspace(0, 1, PIECES + 1, dtype=least.dtype, device=least.device)[:, None]
        edges = torch.logit(bottom + shares * (top - bottom))
        edges = torch.minimum(torch.maximum(edges, least), greatest).cummax(0).values
        edges[0], edges[-1] = least, greatest
        nearest = torch.maximum(edges[:-1], -greatest).clamp(min=0)
        return cls(
            torch.sigmoid(edges[:-1]), torch.sigmoid(edges[1:]), torch.sigmoid(nearest) * torch.sigmoid(-nearest)
        )

    @property
    def widest(self) -> Tensor:
        """The greatest the gate can be, (H)."""
        return self.high[-1]

    @property
    def steepest(self) -> Tensor:
        """The greatest slope, (H)."""
        return self.slope.amax(0)


def _tanh_slope(least: Tensor, greatest: Tensor) -> Tensor:
    nearest = torch.maximum(least, -greatest).clamp(min=0)
    return 4 * torch.sigmoid(2 * nearest) * torch.sigmoid(-2 * nearest)


def _spectral(rows: Tensor, matrix: Tensor) -> float:
    scaled = rows[:, None] * matrix
    return math.sqrt(max(float(torch.linalg.eigvalsh(scaled @ scaled.T)[-1]), 0.0))


def _pick(cases: Tensor, chosen: Tensor) -> Tensor:
    return cases.gather(0, chosen[None])[0]


class Comparison(Protocol):
    """What is proved of one layer with one recurrent matrix (G H, H)."""

    h: Tensor
    """The greatest |h| of each unit from the zero state, (H)."""

    def even(self) -> Tensor:
        """Bounds that leave every row some room, whatever the matrix."""

    def step(self, bounds: Tensor) -> Tensor:
        """One step's bounds after these."""

    def two_norm(self) -> float:
        """The factor by the rule in the 2-norm."""

    def rows_held(self, bounds: Tensor, target: float) -> Tensor:
        """The matrix with each row shrunk to the nearest at which `step(bounds) <= target bounds`, where the cases and
        the box stay as they are: a smaller matrix changes both for the better, or the cases a little for the worse.
        """


def perron(comparison: Comparison, enough: float = 0.0) -> tuple[float, Tensor]:
    """The factor by unit, and the bounds that it holds for, the greatest of them 1; a factor of `enough` will do.

    The iteration of `models/certificate/perron.py`, cut short: what it finds here is found there too.
    """
    bounds = torch.ones_like(comparison.even())
    best, chosen = math.inf, bounds
    for _ in range(PERRON_ITERATIONS):
        after = comparison.step(bounds)
        factor = float((after / bounds).max())
        if not math.isfinite(factor):
            break
        if factor < best:
            best, chosen = factor, bounds
        if best <= enough:
            break
        if (greatest := after.max()) > 0:
            bounds = (after / greatest + bounds) / 2
        bounds = (bounds / bounds.max()).clamp(min=LEAST_WEIGHT)
    return best, chosen


class LstmComparison:
    """Gates in the order i, f, g, o; bounds are those of h, then those of c, (2 H)."""

    def __init__(self, drive: Drive, matrix: Tensor) -> None:
        self.matrix, self.magnitude = matrix, matrix.abs()
        h = torch.ones_like(matrix[0])
        for _ in range(SETTLING):
            reach = self.magnitude @ h
            low, high = (drive.least - reach).chunk(4), (drive.greatest + reach).chunk(4)
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
        self.by_i, self.by_g = most * i.steepest, i.widest * _tanh_slope(low[2], high[2])

    def even(self) -> Tensor:
        ones = torch.ones_like(self.h)
        return torch.cat([HEARD * ones, ones])

    def _cases(self, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By f's cases what is kept of c and f's change; by o's what o's change adds to h; what i and g add to c."""
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
        a = sum(_spectral(rows, block) for rows, block in blocks)
        b = sum(_spectral(o * rows, block) for rows, block in blocks)
        b += _spectral(self.shown * self.output.steepest, w_o)
        keep, shown = float(f.max()), float((o * f).max())
        half = (keep - b) / 2
        return (keep + b) / 2 + math.hypot(half, math.sqrt(a * shown))

    def rows_held(self, bounds: Tensor, target: float) -> Tensor:
        v, w = bounds.chunk(2)
        kept, turned, _ = self._cases(bounds)
        at_f, at_o = kept.argmax(0), (self.output.high * (target * w) + turned).argmax(0)
        w_i, w_f, w_g, w_o = self.matrix.chunk(4)
        by = (self.by_i, self.c * _pick(self.forget.slope, at_f), self.by_g)
        weights = torch.cat([each[:, None] * v for each in by], 1)
        room = (target - _pick(self.forget.high, at_f)) * w
        i, f, g = project_rows(torch.cat([w_i, w_f, w_g], 1), weights, room).chunk(3, 1)
        room = target * v - _pick(self.output.high, at_o) * (target * w)
        o = project_rows(w_o, (self.shown * _pick(self.output.slope, at_o))[:, None] * v, room)
        return torch.cat([i, f, g, o])


class GruComparison:
    """Gates in the order r, z, n; bounds are those of h, (H)."""

    def __init__(self, drive: Drive, matrix: Tensor) -> None:
        self.matrix, self.magnitude = matrix, matrix.abs()
        h = torch.ones_like(matrix[0])
        for _ in range(SETTLING):
            reach = (self.magnitude @ h).chunk(3)
            least, greatest = drive.least.chunk(3), drive.greatest.chunk(3)
            r_low, r_high = least[0] - reach[0], greatest[0] + reach[0]
            q_low, q_high = drive.recalled - reach[2], drive.recalled + reach[2]
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
        slope = _tanh_slope(n_low, n_high)
        self.by_n = slope * opens[1]
        self.by_r = slope * torch.maximum(q_low.abs(), q_high.abs()) * Gate.over(r_low, r_high).steepest

    def even(self) -> Tensor:
        return torch.ones_like(self.h)

    def _cases(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """h's bounds by z's cases, with z at the least and at the greatest of each: (2, C, H); and those z, alike."""
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
        return float(self.z.widest.max()) + sum(_spectral(rows, block) for rows, block in blocks)

    def rows_held(self, bounds: Tensor, target: float) -> Tensor:
        found, keep = (cases.flatten(0, 1) for cases in self._cases(bounds))
        at = found.argmax(0)
        kept, slope = _pick(keep, at), _pick(self.z.slope.repeat(2, 1), at)
        by = ((1 - kept) * self.by_r, self.range * slope, (1 - kept) * self.by_n)
        weights = torch.cat([each[:, None] * bounds for each in by], 1)
        rows = torch.cat(self.matrix.chunk(3), 1)
        return torch.cat(project_rows(rows, weights, (target - kept) * bounds).chunk(3, 1))
