"""Sequence to sequence with attention: the decoder looks at every state of the encoder, and weights them.

At each output the decoder's state is compared with a key of each input; the softmax of the products is the attention,
and the weighted mean of the inputs' values is all that the output sees. The task is to write the input in another
order, a fixed permutation. The decoder knows the input by its attention alone, and a value contains its own symbol
only. So output i is right for every input if its attention is 1 at the place permutation(i), and the permutation can be
read off the attention of a trained network. The encoder must count for this: a key must say which place it has. Without
the comparison the attention is uniform: an output sees how often each symbol occurs, not where. Its best answer is the
most frequent symbol of the input, and its best accuracy is the mean largest share of a symbol, by enumeration.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from research.systems.system import POST, Answer, Measured, System, descend, generator, trainable

SYMBOLS, LENGTH, UNITS, SENTENCES = 3, 6, 16, 200


class Attention:
    """h_j = tanh(W h_{j-1} + U x_j + b) encodes from 0; s_i = tanh(A s_{i-1} + d) decodes from a trained s_0.

    attention_i = softmax_j(s_i . K h_j), and the logits are V times the sum over j of attention_ij x_j.
    """

    def __init__(self, random: torch.Generator) -> None:
        square = (UNITS, UNITS)
        self.weights = trainable(
            random, square, (UNITS, SYMBOLS), (UNITS,), square, (UNITS,), (1, UNITS), square, (SYMBOLS, SYMBOLS)
        )
        self.uniform = False

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits (batch, LENGTH, SYMBOLS) and attention (batch, outputs, inputs) for one-hot x (batch, LENGTH,
        SYMBOLS)."""
        W, U, b, A, d, s, K, V = self.weights
        h, states = torch.zeros(len(x), UNITS, dtype=torch.float64), []
        for j in range(LENGTH):
            h = torch.tanh(h @ W.T + x[:, j] @ U.T + b)
            states.append(h)
        decoded = []
        for _ in range(LENGTH):
            s = torch.tanh(s @ A.T + d)
            decoded.append(s.expand(len(x), UNITS))
        scores = torch.stack(decoded, 1) @ (torch.stack(states, 1) @ K.T).mT
        attention = (torch.zeros_like(scores) if self.uniform else scores).softmax(2)
        return attention @ x @ V.T, attention


def trained(permutation: Tensor, uniform: bool, random: torch.Generator) -> tuple[float, Tensor]:
    """Trains on random inputs. Returns the accuracy over all inputs, and the mean attention (outputs, inputs)."""
    network = Attention(random)
    network.uniform = uniform
    everything = torch.tensor(list(itertools.product(range(SYMBOLS), repeat=LENGTH)))

    def loss() -> Tensor:
        x = everything[torch.randint(len(everything), (SENTENCES,), generator=random)]
        logits, _ = network(nn.functional.one_hot(x, SYMBOLS).double())
        return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, permutation].flatten())

    descend(loss, network.weights, steps=400, rate=0.03)
    with torch.no_grad():
        logits, attention = network(nn.functional.one_hot(everything, SYMBOLS).double())
    return float((logits.argmax(2) == everything[:, permutation]).double().mean()), attention.mean(0)


def best_without_order() -> float:
    """Returns the mean largest share of one symbol over all inputs."""
    inputs = itertools.product(range(SYMBOLS), repeat=LENGTH)
    return sum(max(x.count(symbol) for symbol in range(SYMBOLS)) for x in inputs) / LENGTH / float(SYMBOLS**LENGTH)


def measure(seed: int) -> Measured:
    """Trains with attention and with uniform weights, on a random permutation."""
    random = generator(seed)
    permutation = torch.randperm(LENGTH, generator=random)
    accuracy, attention = trained(permutation, False, random)
    blind, _ = trained(permutation, True, random)
    read_off = (attention.argmax(1) == permutation).double().mean()
    return Measured(
        [
            Answer("accuracy", 1, accuracy, 0.01),
            Answer("share of the permutation's places read off the attention", 1, float(read_off)),
            Answer("accuracy with uniform attention", best_without_order(), blind, 0.01),
        ],
        {"permutation": permutation.tolist(), **{f"output {i}": row.tolist() for i, row in enumerate(attention)}},
    )


SYSTEM = System(
    title="sequence to sequence with attention",
    source=POST,
    source_equation='"Sequence to Sequence with Attention model" (named); translation with the whole sentence',
    our_equation="a_ij = softmax_j(s_i . K h_j), o_i = V sum_j a_ij x_j",
    task="write the input in the order of a permutation",
    measure=measure,
)
