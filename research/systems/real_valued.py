"""Real-valued input and output: predicting the next heart rate.

A resting heart rate swings with the breath. The signal here is an autoregression of order 2 about 70 beats per minute,
x_t = m + a_1 (x_{t-1} - m) + a_2 (x_{t-2} - m) + e_t, with Gaussian noise e_t of known standard deviation. So the best
prediction is known, and its errors too:

- The variance of the best prediction's error is the noise's, and its negative log likelihood is log(2 pi e s^2) / 2.
- The best prediction several steps ahead errs by s^2 times the sum of the squared impulse response.

The network reads one number, keeps a state, and returns two numbers, a mean and the logarithm of a standard deviation.
Only the latest rate is an input, so the state must keep the one before. Without a state the best error is that of the
best prediction from one rate, the signal's variance times 1 - r^2, with r the correlation of neighbours.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from research.systems.system import TRIPP, Answer, Measured, System, descend, generator, normal, trainable

MEAN, NOISE = 70.0, 1.5  # beats per minute
RADIUS, PERIOD = 0.9, 8  # the breath's swing: a pair of poles; steps per breath
A1, A2 = 2 * RADIUS * math.cos(2 * math.pi / PERIOD), -(RADIUS**2)
UNITS, LENGTH, LANES, AHEAD = 8, 24, 200, 4


def signal(random: torch.Generator, lanes: int, length: int) -> Tensor:
    """Returns heart rates (lanes, length), in beats per minute. The first 100 steps are dropped."""
    x = [torch.zeros(lanes, dtype=torch.float64)] * 2
    for _ in range(100 + length):
        x.append(A1 * x[-1] + A2 * x[-2] + normal(random, lanes, scale=NOISE))
    return MEAN + torch.stack(x[-length:], 1)


def variance_ahead(steps: int) -> float:
    """Returns the variance of the best prediction's error `steps` steps ahead."""
    response = [0.0, 1.0]
    for _ in range(steps - 1):
        response.append(A1 * response[-1] + A2 * response[-2])
    return NOISE**2 * sum(value**2 for value in response)


class Network:
    """h_t = tanh(W h_{t-1} + U x_t + b); mean and log deviation of the next rate: V h_t + c, plus D x_t for the mean.
    Without `memory`, W h_{t-1} is left out. x: (lanes, T) in beats per minute."""

    def __init__(self, memory: bool, random: torch.Generator) -> None:
        self.memory = memory
        self.weights = trainable(random, (UNITS, UNITS), (UNITS, 1), (UNITS,), (2, UNITS), (2,), (1, 1))

    def advance(self, h: Tensor, x: Tensor) -> Tensor:
        """Returns the states (lanes, UNITS) after the rates x (lanes,)."""
        W, U, b, *_ = self.weights
        return torch.tanh((h @ W.T if self.memory else 0) + (x[:, None] - MEAN) / 5 @ U.T + b)

    def read(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log deviation of the next rates (...,), from states (..., UNITS) and rates x (...,)."""
        *_, V, c, D = self.weights
        mean, log_deviation = (h @ V.T + c).unbind(-1)
        return MEAN + 5 * mean + D[0, 0] * (x - MEAN), log_deviation

    def predict(self, x: Tensor, ahead: int = 1) -> tuple[Tensor, Tensor]:
        """Returns means and log deviations (lanes, T) of the rate after each rate of x. For a rate more than one step
        ahead, feeds back the means, and returns only the prediction after the last rate of x: (lanes,)."""
        states = [torch.zeros(len(x), UNITS, dtype=torch.float64)]
        for rates in x.T:
            states.append(self.advance(states[-1], rates))
        if ahead == 1:
            return self.read(torch.stack(states[1:], 1), x)
        h, found = states[-1], self.read(states[-1], x[:, -1])
        for _ in range(ahead - 1):
            h = self.advance(h, found[0])
            found = self.read(h, found[0])
        return found

    def loss(self, x: Tensor) -> Tensor:
        """Returns the mean negative log likelihood of x, in nats, without the first two rates, which lack a past."""
        mean, log_deviation = self.predict(x[:, :-1])
        scaled = (x[:, 3:] - mean[:, 2:]) * torch.exp(-log_deviation[:, 2:])
        return (scaled.square() / 2 + log_deviation[:, 2:] + math.log(2 * math.pi) / 2).mean()


def measure(seed: int) -> Measured:
    """Trains a network with and one without a state, and measures their errors on fresh signals."""
    random = generator(seed)
    shown, network, blind = signal(random, LANES, LENGTH), Network(True, random), Network(False, random)
    for one in (network, blind):
        descend(partial(one.loss, shown), one.weights, steps=250, rate=0.02)
    x = signal(random, 10_000, 20)
    mean, _ = network.predict(x[:, :-1])
    without, _ = blind.predict(x[:, :-1])
    ahead, _ = network.predict(x[:, :-AHEAD], AHEAD)
    correlation, entropy = A1 / (1 - A2), math.log(2 * math.pi * math.e * NOISE**2) / 2
    one_rate = variance_ahead(300) * (1 - correlation**2)  # so far ahead, the signal's variance

    def error(what: str, known: float, found: Tensor, wanted: Tensor, within: float) -> Answer:
        return Answer(what, known, float((found - wanted).square().mean().detach()), within * known)

    return Measured(
        [
            error("squared error of the next rate", NOISE**2, mean[:, 2:], x[:, 3:], 0.04),
            error(f"squared error {AHEAD} steps ahead", variance_ahead(AHEAD), ahead, x[:, -1], 0.08),
            error("squared error of the next rate, without a state", one_rate, without[:, 2:], x[:, 3:], 0.04),
            Answer("negative log likelihood, nats", entropy, float(network.loss(x).detach()), 0.03),
        ]
    )


SYSTEM = System(
    title="real-valued input and output",
    source=TRIPP,
    source_equation='"Estimating heart rate from ECG"; h(t) = f(h(t-1), x(t)), o(t) = g(h(t), x(t))',
    our_equation="h_t = tanh(W h_{t-1} + U x_t + b), (mean, log deviation) of x_{t+1} = V h_t + c + (D x_t, 0)",
    task="predict a heart rate: an autoregression of order 2 with known noise",
    measure=measure,
)
