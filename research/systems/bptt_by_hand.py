"""Back-propagation through time, by hand.

A weight that is used at every step gets a gradient from every step, so its gradient is a sum that is accumulated while
the graph is walked backwards. The order matters: delta_h[t] is complete only when both operations that take h_t have
been back-propagated, the output at t and the step to t+1. Only then may it be used for the weights of step t. The
network is a language model with the mean negative log likelihood as its loss. Its gradients must be those of autograd,
which knows nothing of this derivation, and the differences of the loss in a random direction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from research.systems.system import KAMPER, TRIPP, Answer, Measured, System, generator, normal, trainable

WORDS, UNITS, STEPS = 7, 5, 12
NAMES = ("W_hh", "W_ih", "b_h", "W_ho", "b_o")


def forward(weights: list[Tensor], words: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Runs h_t = tanh(W_hh h_{t-1} + W_ih x_t + b_h) and y_t = softmax(W_ho h_t + b_o) over words (STEPS + 1,).

    Returns h_0 ... h_T, the probabilities y_1 ... y_T, and J, the mean of -log y_t[next word].
    """
    W_hh, W_ih, b_h, W_ho, b_o = weights
    states, outputs, losses = [torch.zeros(UNITS, dtype=torch.float64)], [], []
    for t in range(STEPS):
        states.append(torch.tanh(W_hh @ states[-1] + W_ih[:, words[t]] + b_h))
        outputs.append(torch.softmax(W_ho @ states[-1] + b_o, 0))
        losses.append(-outputs[-1][words[t + 1]].log())
    return states, outputs, torch.stack(losses).mean()


def backward(weights: list[Tensor], words: Tensor) -> list[Tensor]:
    """Returns the gradients of J by the weights. Walks back from step T to step 1."""
    W_hh, _, _, W_ho, _ = weights
    states, outputs, _ = forward(weights, words)
    d_hh, d_ih, d_h, d_ho, d_o = (torch.zeros_like(weight) for weight in weights)
    from_next = torch.zeros(UNITS, dtype=torch.float64)  # what h_t receives from step t+1
    for t in range(STEPS, 0, -1):
        d_logits = outputs[t - 1] / STEPS
        d_logits[words[t]] -= 1 / STEPS
        d_ho += d_logits.outer(states[t])
        d_o += d_logits
        d_state = W_ho.T @ d_logits + from_next  # complete: both operations that take h_t are done
        d_sum = d_state * (1 - states[t] ** 2)  # before the tanh
        d_hh += d_sum.outer(states[t - 1])
        d_ih[:, words[t - 1]] += d_sum
        d_h += d_sum
        from_next = W_hh.T @ d_sum
    return [d_hh, d_ih, d_h, d_ho, d_o]


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Returns the distance of two tensors, relative to the norm of the second."""
    return float((one - other).norm() / other.norm())


def measure(seed: int) -> Measured:
    """Compares the gradients with autograd's for each weight, and with central differences of the loss."""
    random = generator(seed)
    weights = trainable(random, (UNITS, UNITS), (UNITS, WORDS), (UNITS,), (WORDS, UNITS), (WORDS,))
    words = torch.randint(WORDS, (STEPS + 1,), generator=random)
    automatic = torch.autograd.grad(forward(weights, words)[2], weights)
    plain = [weight.detach() for weight in weights]
    by_hand = backward(plain, words)
    answers = [
        Answer(f"relative distance from autograd, {name}", 0, relative_distance(mine, theirs), 1e-6)
        for name, mine, theirs in zip(NAMES, by_hand, automatic, strict=True)
    ]
    way = [normal(random, *weight.shape) for weight in plain]
    above, below = (
        float(forward([w + side * 1e-5 * d for w, d in zip(plain, way, strict=True)], words)[2]) for side in (1, -1)
    )
    slope = sum(float((gradient * d).sum()) for gradient, d in zip(by_hand, way, strict=True))
    return Measured([*answers, Answer("slope in a random direction", (above - below) / 2e-5, slope, 1e-8)])


SYSTEM = System(
    title="back-propagation through time, by hand",
    source=f"{KAMPER}; {TRIPP}",
    source_equation="delta_h_t = prod(dy_t/dh_t, delta_y_t) + prod(dh_{t+1}/dh_t, delta_h_{t+1}); "
    "delta_W_hh += prod(dh_t/dW_hh, delta_h_t) for t = T, T - 1, ..., 1",
    our_equation="d_t = W_ho^T (y_t - x_{t+1}) / T + W_hh^T a_{t+1}, a_t = d_t (1 - h_t^2); "
    "dJ/dW_hh = sum over t of a_t h_{t-1}^T",
    task="the gradients of a language model, against autograd and central differences",
    measure=measure,
)
