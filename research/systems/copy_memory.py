"""Copy memory: how long does a model remember? "Infinite memory is absent in practice."

The first input is one of four symbols, then come `delay` blanks, then the model must name the symbol. A blind guess
costs log 4; a delay counts as learned if the loss is under half of that. Every model is trained on all four sequences.

- A feed-forward window of k inputs contains the symbol for a delay of k - 1, and not for k: it learns k - 1 exactly.
- A recurrent network with norm(W) <= lambda, tanh, n units and norm(V) <= R: the states of two symbols differ by at
  most lambda^delay 2 sqrt(n), and their logits by d = R times that. So their answers' total variation is at most
  TV = tanh(sqrt(2) d / 4), the mean probability of the right symbol is at most (1 + 3 TV) / 4, and the loss is at least
  its negative logarithm. This bound passes half of log 4 at a known delay: no training learns a longer one.
- A linear network with W = 1 never forgets: infinite memory exists. But no closed form says what gradient descent finds
  from a usual start. The longest delays that an unconstrained tanh network and an LSTM learn are reported as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from research.systems.system import POST, SLIDES, Answer, Curves, Measured, System, descend

SYMBOLS, UNITS, WINDOW, FACTOR, LARGEST_READOUT = 4, 16, 8, 0.8, 4.0
DELAYS = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128)
MODELS = (f"window of {WINDOW}", f"tanh network, norm(W) <= {FACTOR}", "tanh network", "LSTM")


def inputs(delay: int) -> Tensor:
    """Returns the four sequences, one-hot, a blank as zeros: (SYMBOLS, 1 + delay, SYMBOLS)."""
    x = torch.zeros(SYMBOLS, 1 + delay, SYMBOLS)
    x[:, 0] = torch.eye(SYMBOLS)
    return x


@torch.no_grad()
def project(matrix: Tensor, limit: float) -> None:
    """Projects a matrix, in place, onto the matrices with norm at most `limit`: clips its singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    matrix.copy_(left * values.clamp_max(limit) @ right)


class Model(nn.Module):
    """One of MODELS, with a linear readout of its last state."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.window = nn.Linear(WINDOW * SYMBOLS, UNITS)
        self.cell: nn.RNNBase = (nn.LSTM if name == "LSTM" else nn.RNN)(SYMBOLS, UNITS, batch_first=True)
        self.readout = nn.Linear(UNITS, SYMBOLS)
        if name == MODELS[1]:
            nn.init.eye_(self.cell.all_weights[0][1])  # at the limit, after the first projection

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, SYMBOLS) after the last input of x (batch, T, SYMBOLS)."""
        if self.name == MODELS[0]:
            padded = nn.functional.pad(x, (0, 0, WINDOW, 0))[:, -WINDOW:]
            return self.readout(torch.tanh(self.window(padded.flatten(1))))  # type: ignore[no-any-return]
        if self.name == MODELS[1]:
            project(self.cell.all_weights[0][1], FACTOR)  # W
            project(self.readout.weight, LARGEST_READOUT)
        return self.readout(self.cell(x)[0][:, -1])  # type: ignore[no-any-return]


def trained_loss(name: str, delay: int, seed: int) -> float:
    """Trains a model of the usual start on one delay. Returns its loss in nats."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(name)
    x, symbols = inputs(delay), torch.arange(SYMBOLS)
    return descend(lambda: nn.functional.cross_entropy(model(x), symbols), list(model.parameters()), 300, 0.02)


def least_loss(delay: int) -> float:
    """Returns the lower bound of the loss of the network with norm(W) <= FACTOR."""
    apart = LARGEST_READOUT * FACTOR**delay * 2 * math.sqrt(UNITS)
    variation = math.tanh(math.sqrt(2) * apart / 4)
    return -math.log((1 + (SYMBOLS - 1) * variation) / SYMBOLS)


def measure(seed: int) -> Measured:
    """Trains every model on longer and longer delays, until one is not learned."""
    half = math.log(SYMBOLS) / 2
    longest, curves = dict[str, int](), Curves()
    for name in MODELS:
        losses: list[float] = []
        for delay in DELAYS:
            losses.append(trained_loss(name, delay, seed))
            if not losses[-1] < half:
                break
        curves[name] = losses
        longest[name] = max((delay for delay, loss in zip(DELAYS, losses, strict=False) if loss < half), default=0)
    within_reach = max(delay for delay in range(1, 1000) if least_loss(delay) < half)
    below = max(least_loss(delay) - loss for delay, loss in zip(DELAYS, curves[MODELS[1]], strict=False))
    kept = nn.functional.cross_entropy(20 * inputs(1000).sum(1), torch.arange(SYMBOLS))  # h_t = h_{t-1} + x_t
    what = "longest delay learned, "
    return Measured(
        [
            Answer(what + MODELS[0], WINDOW - 1, longest[MODELS[0]]),
            Answer(f"loss of the {MODELS[0]} at the next delay", math.log(SYMBOLS), curves[MODELS[0]][-1], 1e-3),
            Answer(what + MODELS[1], within_reach, longest[MODELS[1]], relation="at most"),
            Answer(f"{MODELS[1]}: bound of the loss - loss, largest", 0, below, 1e-6, "at most"),
            Answer("loss of W = 1 after a delay of 1,000", 0, float(kept), 1e-6),
            *(Answer(what + name, None, longest[name]) for name in MODELS[2:]),
        ],
        {**curves, "bound": [least_loss(delay) for delay in DELAYS]},
    )


SYSTEM = System(
    title="copy memory",
    source=f"{POST}; {SLIDES}",
    source_equation='"The infinite memory advantage of RNNs is largely absent in practice" (Bai et al.); '
    "norm(h_t - h_t^k) <= epsilon (Lemma 1)",
    our_equation="loss >= -log((1 + 3 tanh(sqrt(2) R lambda^delay 2 sqrt(n) / 4)) / 4)",
    task="name the first of 1 + delay inputs",
    measure=measure,
    seeds=3,
)
