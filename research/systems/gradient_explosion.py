"""Vanishing and exploding gradients: the eigenvalues of a linear network, and the gates of an LSTM.

- In a linear network the gradient by an earlier state is a power of W^T, which is P D^n P^-1: each eigenvalue is raised
  to the number of steps. It vanishes below 1 and explodes above 1, at the rate of the largest one.
- In an LSTM the cell's gradient by the previous cell is diag(f_t) when the gates are held: a product of forget gates,
  each between 0 and 1, in place of the power of one matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from research.systems.system import KAMPER, TRIPP, Answer, Measured, System, generator, normal

UNITS, STEPS, RADII = 6, 60, (0.9, 1.0, 1.1)


def gradients(recurrent: Tensor, last: Tensor) -> Tensor:
    """Returns dJ/dh_i for i = T ... 0 of a linear network whose loss has the gradient `last` by h_T: (T + 1, n).
    Autograd computes them."""
    h = torch.zeros(len(last), dtype=torch.float64, requires_grad=True)
    states = [h]
    for _ in range(STEPS):
        states.append(recurrent @ states[-1])
    return torch.stack(torch.autograd.grad(states[-1] @ last, states)).flip(0)


def by_eigenvalues(recurrent: Tensor, last: Tensor) -> Tensor:
    """Returns the closed form P D^(T-i) P^-1 dJ/dh_T for i = T ... 0."""
    D, P = torch.linalg.eig(recurrent.T)
    weights = torch.linalg.solve(P, last.to(P.dtype))
    powers = D[None] ** torch.arange(STEPS + 1)[:, None]
    found: Tensor = ((powers * weights) @ P.T).real
    return found


def cell_gradient(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns dc_T/dc_0 of an LSTM cell whose gates depend on the input only, by autograd, and the product of the
    forget gates."""
    forget = torch.sigmoid(2 + normal(random, STEPS, UNITS))
    added = normal(random, STEPS, UNITS)
    first = normal(random, UNITS).requires_grad_()
    c = first
    for f, z in zip(forget, added, strict=True):
        c = f * c + (1 - f) * torch.tanh(z)
    return torch.autograd.grad(c.sum(), first)[0], forget.prod(0)


def measure(seed: int) -> Measured:
    """Compares gradients with their closed forms."""
    random = generator(seed)
    direction, last = normal(random, UNITS, UNITS), normal(random, UNITS)
    answers, curves = [], {}
    for radius in RADII:
        W = direction * (radius / torch.linalg.eigvals(direction).abs().max())
        found, known = gradients(W, last), by_eigenvalues(W, last)
        distance = ((found - known).norm(dim=1) / known.norm(dim=1)).max()
        answers.append(Answer(f"largest relative distance from P D^n P^-1, radius {radius}", 0, float(distance), 1e-8))
        curves[f"found {radius}"], curves[f"known {radius}"] = found.norm(dim=1).tolist(), known.norm(dim=1).tolist()
    gradient, product = cell_gradient(random)
    answers += [
        Answer(
            "LSTM cell: largest distance of dc_T/dc_0 from the product of f_t",
            0,
            float((gradient - product).abs().max()),
            1e-12,
        ),
    ]
    return Measured(answers, curves)


SYSTEM = System(
    title="vanishing and exploding gradients",
    source=f"{KAMPER}; {TRIPP}",
    source_equation="dJ_T/dh_i = (W_hh^T)^(T-i) dJ_T/dh_T = P D^(T-i) P^-1 dJ_T/dh_T; dc_t/dc_{t-1} = diag(f_t)",
    our_equation="dJ/dh_i = P D^(T-i) P^-1 dJ/dh_T; dc_T/dc_0 = diag(f_T ... f_1)",
    task="gradients of linear networks with largest eigenvalue 0.9, 1 and 1.1, and of an LSTM's cell",
    measure=measure,
)
