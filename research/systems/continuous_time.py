"""A continuous-time linear system, x' = A x + B u, as a recurrence.

If the input is constant during each step of length d, the solution at the steps obeys a recurrence exactly: x_{t+1} =
e^(A d) x_t + A^-1 (e^(A d) - 1) B u_t. Both matrices are blocks of one matrix exponential (Van Loan, 1978). The example
is a damped pendulum, whose free swing is known in closed form. Euler's step x + d (A x + B u) is another recurrence for
the same system: its error at a fixed time falls only in proportion to d. In the other direction, the logarithm of a
recurrence that was learned from samples gives A back, if the samples are closer than half a swing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from research.systems.system import TRIPP, Answer, Measured, System, generator, normal, solve

DAMPING, FREQUENCY, STEP, DURATION = 0.3, 2.0, 0.25, 5.0
A = torch.tensor([[0, 1], [-(DAMPING**2 + FREQUENCY**2), -2 * DAMPING]], dtype=torch.float64)
B = torch.tensor([[0], [1]], dtype=torch.float64)


def discretise(step: float) -> tuple[Tensor, Tensor]:
    """Returns e^(A d) and the integral of e^(A s) B for s from 0 to d: blocks of exp([[A, B], [0, 0]] d)."""
    n, inputs = B.shape
    both = torch.zeros(n + inputs, n + inputs, dtype=torch.float64)
    both[:n] = torch.cat([A, B], 1)
    found = torch.linalg.matrix_exp(both * step)
    return found[:n, :n], found[:n, n:]


def euler(step: float) -> tuple[Tensor, Tensor]:
    """Returns the matrices of Euler's method: 1 + d A and d B."""
    return torch.eye(len(A), dtype=torch.float64) + step * A, step * B


def run(matrices: tuple[Tensor, Tensor], first: Tensor, inputs: Tensor) -> Tensor:
    """Runs x_{t+1} = W x_t + U u_t. first: (n,), inputs: (T,). Returns x_0 ... x_T: (T + 1, n)."""
    W, U = matrices
    states = [first]
    for u in inputs:
        states.append(W @ states[-1] + U[:, 0] * u)
    return torch.stack(states)


def swing(times: Tensor, level: float) -> Tensor:
    """Returns the closed form of the position from x = (1, 0) under the constant input `level`: an exponentially
    falling oscillation about level / (damping^2 + frequency^2)."""
    rest = level / (DAMPING**2 + FREQUENCY**2)
    phase = FREQUENCY * times
    return rest + (1 - rest) * torch.exp(-DAMPING * times) * (phase.cos() + DAMPING / FREQUENCY * phase.sin())


def end_error(step: float, level: float) -> float:
    """Returns the error of Euler's method at the time DURATION."""
    count = round(DURATION / step)
    states = run(
        euler(step), torch.tensor([1, 0], dtype=torch.float64), torch.full((count,), level, dtype=torch.float64)
    )
    return float(abs(states[-1, 0] - swing(torch.tensor(DURATION), level)))


def measure(seed: int) -> Measured:
    """Compares the discretised system with the closed form, and learns the system from samples of random swings."""
    random = generator(seed)
    level = float(normal(random, 1))
    count = round(DURATION / STEP)
    first = torch.tensor([1, 0], dtype=torch.float64)
    states = run(discretise(STEP), first, torch.full((count,), level, dtype=torch.float64))
    times = STEP * torch.arange(count + 1, dtype=torch.float64)

    inputs, W, U = normal(random, 40), normal(random, 2, 2).requires_grad_(), normal(random, 2, 1).requires_grad_()
    samples = run(discretise(STEP), normal(random, 2), inputs)

    def loss() -> Tensor:
        return (samples[:-1] @ W.T + inputs[:, None] @ U.T - samples[1:]).square().mean()

    solve(loss, [W, U])
    rate = torch.linalg.eigvals(W.detach()).log() / STEP  # the eigenvalues of A
    upper = rate[rate.imag.argmax()]
    return Measured(
        [
            Answer(
                "largest distance from the closed form",
                0,
                float((states[:, 0] - swing(times, level)).abs().max()),
                1e-12,
            ),
            Answer(
                "order of Euler's error in d", 1, math.log2(end_error(0.002, level) / end_error(0.001, level)), 0.02
            ),
            Answer("learned damping", DAMPING, -float(upper.real), 1e-4),
            Answer("learned frequency, radians per second", FREQUENCY, float(upper.imag), 1e-4),
        ]
    )


SYSTEM = System(
    title="continuous-time linear system",
    source=TRIPP,
    source_equation="x' = A x + B u, y = C x + D u",
    our_equation="x_{t+1} = e^(A d) x_t + A^-1 (e^(A d) - 1) B u_t",
    task="a damped pendulum: its closed form, and its damping and frequency from samples",
    measure=measure,
)
