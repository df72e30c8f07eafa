"""A linear dynamical system: the recurrent network without a nonlinearity.

Its state is a sum of modes. A mode is an eigenvalue of W: after t steps it has been multiplied by the eigenvalue's t-th
power. A real eigenvalue a < 1 is a decay, a^t. A complex pair r e^(+-i theta) is a rotation by theta per step that
shrinks by r. So the answer to one impulse is known in closed form, and the impulse's answer determines the eigenvalues:
a network that learns the answer from the outputs alone must find them, in whatever basis it keeps its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from research.systems.system import KAMPER, TRIPP, Answer, Measured, System, generator, normal, solve

STEPS = 15
DECAY, RADIUS, ANGLE = 0.8, 0.95, math.pi / 6


def impulse_response(weights: Sequence[Tensor], steps: int) -> Tensor:
    """Runs h_t = W h_{t-1} + U x_t, y_t = C h_t on the input 1, 0, 0, ... Returns the outputs (steps,).

    weights: W (n, n), U (n,), C (n,)
    """
    W, U, C = weights
    h, outputs = U, []
    for _ in range(steps):
        outputs.append(C @ h)
        h = W @ h
    return torch.stack(outputs)


def decay(steps: int) -> Tensor:
    """Returns the closed form of a decay: a^t."""
    return DECAY ** torch.arange(steps, dtype=torch.float64)


def rotation(steps: int) -> Tensor:
    """Returns the closed form of a shrinking rotation of (1, 0), seen along the second axis: r^t sin(theta t)."""
    t = torch.arange(steps, dtype=torch.float64)
    return RADIUS**t * torch.sin(ANGLE * t)


def learned_eigenvalues(target: Tensor, units: int, seed: int) -> tuple[Tensor, float]:
    """Fits W, U and C to an impulse response, from a random start. Returns the eigenvalues of W and the mean squared
    error."""
    random = generator(seed)
    turn = torch.linalg.qr(normal(random, units, units)).Q
    W = (0.7 * turn).contiguous().requires_grad_()
    U, C = (normal(random, units, scale=units**-0.5).requires_grad_() for _ in range(2))

    def loss() -> Tensor:
        return (impulse_response((W, U, C), len(target)) - target).square().mean()

    error = solve(loss, [W, U, C])
    return torch.linalg.eigvals(W.detach()), error


def measure(seed: int) -> Measured:
    """Compares the recurrence with the closed forms. Then learns both systems from their outputs."""
    cos, sin = math.cos(ANGLE), math.sin(ANGLE)
    W = RADIUS * torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    first, second = torch.eye(2, dtype=torch.float64)
    run = impulse_response((W, first, second), STEPS)
    [shrinking], _ = learned_eigenvalues(decay(STEPS), 1, seed)
    turning, _ = learned_eigenvalues(rotation(STEPS), 2, seed)
    upper = turning[turning.imag.argmax()]
    return Measured(
        [
            Answer(
                "largest distance of the run from r^t sin(theta t)",
                0,
                float((run - rotation(STEPS)).abs().max()),
                1e-12,
            ),
            Answer("learned eigenvalue of the decay", DECAY, float(shrinking.real), 1e-3),
            Answer("learned modulus of the rotation", RADIUS, float(upper.abs()), 1e-3),
            Answer("learned angle of the rotation", ANGLE, float(upper.angle()), 1e-3),
        ]
    )


SYSTEM = System(
    title="linear dynamical system",
    source=f"{TRIPP}; {KAMPER}",
    source_equation="x(t+1) = f(x(t), u(t)), y(t) = g(x(t), u(t)); h_t = W_hh h_{t-1} + W_ih x_t + b_h with g(x) = x",
    our_equation="h_t = W h_{t-1} + U x_t, y_t = C h_t",
    task="learn a decay and a rotation from the outputs of one impulse",
    measure=measure,
)
