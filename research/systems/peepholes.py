"""Peepholes: gates of an LSTM that also see the cell.

The lecture notes that a gate is a function of the input and the output, "and sometimes states are included as well".
The task is that of Gers, Schraudolph and Schmidhuber (2002): spike at every PERIOD-th step, on an input that never
changes. Here the gates do not see the output, so only a peephole can tell them what the cell has counted.

- Without peepholes the gates are constant. The cell obeys c_t = f c_{t-1} + i z with constants, so the output o
  tanh(c_t) moves in one direction only. The best such output in least squares is an isotonic regression of the target:
  a computed lower bound of the error.
- With peepholes the cell counts up; when it passes a threshold, the output gate opens and the forget gate then erases
  it. Weights that do this for any period are known: with the input 1, c grows by 1 / PERIOD at each step, and both
  gates compare it with 1 - 1 / (2 PERIOD).
"""

from __future__ import annotations

import torch
from torch import Tensor

from research.systems.system import TRIPP, Answer, Measured, System, descend, generator, normal

PERIOD, STEPS, STARTS = 6, 36, 64


def outputs(weights: Tensor, steps: int, peepholes: bool) -> Tensor:
    """Runs one LSTM unit on the input 1, 1, 1, ... Returns v h_t for every step: (..., steps).

    weights: (..., 8) the biases of the gates f, i, o and of z; the peepholes of f, i and o; the output's weight v. The
    gates f and i see the previous cell, and o sees the present one, as in the original. The first cell is 0.
    """
    bf, bi, bo, bz, pf, pi, po, v = weights.unbind(-1)
    if not peepholes:
        pf = pi = po = torch.zeros_like(v)
    c, found = torch.zeros_like(v), []
    for _ in range(steps):
        f, i, z = torch.sigmoid(bf + pf * c), torch.sigmoid(bi + pi * c), torch.tanh(bz)
        c = f * c + i * z
        found.append(v * torch.sigmoid(bo + po * c) * torch.tanh(c))
    return torch.stack(found, -1)


def spikes(period: int, steps: int) -> Tensor:
    """Returns the target: 1 at every `period`-th step, else 0."""
    t = torch.arange(1, steps + 1)
    return (t % period == 0).double()


def known_weights(period: int) -> Tensor:
    """Returns weights whose outputs are the spikes, up to the gates' softness: exp(-10)."""
    gain, threshold = 20.0 * period, 1 - 1 / (2 * period)
    one = torch.tensor(1.0, dtype=torch.float64)
    growth = float(torch.atanh(one / period * (1 + torch.exp(-10 * one))))  # the input gate is open: sigmoid(10)
    values = [gain * threshold, 10.0, -gain * threshold, growth, -gain, 0.0, gain, 1 / float(torch.tanh(one))]
    return torch.tensor(values, dtype=torch.float64)


def best_monotone_error(target: Tensor) -> float:
    """Returns the smallest mean squared error of a sequence that never falls or never rises, by pooling neighbours that
    are in the wrong order (isotonic regression)."""
    errors = []
    for values in (target, -target):
        blocks: list[tuple[float, int]] = []  # mean and size
        for value in values.tolist():
            mean, size = value, 1
            while blocks and blocks[-1][0] > mean:
                below, count = blocks.pop()
                mean, size = (mean * size + below * count) / (size + count), size + count
            blocks.append((mean, size))
        fitted = torch.cat([torch.full((size,), mean, dtype=torch.float64) for mean, size in blocks])
        errors.append(float((fitted - values).square().mean()))
    return min(errors)


def trained_error(peepholes: bool, random: torch.Generator) -> float:
    """Trains STARTS units side by side on two periods. A spike that comes a step early or late has no gradient towards
    its place. So units with peepholes start from disturbed known weights with softer gates, and still many fail; units
    without start from random weights. Returns the smallest mean squared error over STEPS steps."""
    noise = normal(random, STARTS, 8)
    weights = known_weights(PERIOD)
    weights[[0, 2, 4, 6]] /= 2
    weights = (weights * (1 + 0.1 * noise) if peepholes else noise).requires_grad_()

    def errors(steps: int) -> Tensor:
        return (outputs(weights, steps, peepholes) - spikes(PERIOD, steps)).square().mean(-1)

    descend(lambda: errors(2 * PERIOD).sum(), [weights], steps=400, rate=0.01 if peepholes else 0.1)
    return float(errors(STEPS).detach().min())


def measure(seed: int) -> Measured:
    """Tests the known weights for several periods, and trains both kinds of units."""
    random = generator(seed)
    bound, what = best_monotone_error(spikes(PERIOD, STEPS)), f"smallest error of {STARTS} trained units"
    distance = max(
        float((outputs(known_weights(period), STEPS, True) - spikes(period, STEPS)).abs().max())
        for period in range(2, 13)
    )
    return Measured(
        [
            Answer("largest distance from the spikes, known weights, periods 2 to 12", 0, distance, 0.01),
            Answer(f"{what}, with peepholes", 0, trained_error(True, random), 1e-3),
            Answer(f"{what}, without", bound, trained_error(False, random), relation="at least"),
        ]
    )


SYSTEM = System(
    title="peepholes",
    source=TRIPP,
    source_equation="f_i(t) = sigma(b_i + sum_j U_ij x_j(t) + sum_j W_ij h_j(t-1)), "
    '"and sometimes states are included as well"',
    our_equation="f_t = sigma(b_f + p_f c_{t-1}), c_t = f_t c_{t-1} + i_t z, o_t = sigma(b_o + p_o c_t)",
    task=f"spike at every {PERIOD}th step of a constant input",
    measure=measure,
)
