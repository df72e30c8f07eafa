"""A gradient-based adversary: finds tokens and initial states that bring a run's end far from its window's end.

Tokens are discrete, so the gradient is taken with respect to the share of each token at each place, in a mixture of
embeddings. It is used in two ways. *Flips*: the gradient estimates the gain of every single substitution; the best
ones, at one or several places at once, are tried and kept if they gain (HotFlip, Ebrahimi et al. 2018, arXiv
1712.06751). *Softened*: the mixtures themselves climb, and end as their largest parts.

The objective is the logarithm of the distance at the end, which ranges from 1 to 1e-12, or of its part along a
direction: the lead of one token over another.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from wane.models.manifest import Architecture
from wane.models.networks import Network
from wane.models.weights import Weights

Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]

AT_ONCE = (1, 3, 9)
"""Numbers of places changed in one try."""

SHARPNESS = 2.0
"""The initial logit of a mixture's starting token above the others."""

STEP = 1.0
"""The largest change of a mixture's logits in one step."""

NEAREST = 1e-300
"""Keeps the logarithm of a zero distance finite."""


class Adversary:
    """The adversary of one model, in float64 (torch evaluates gates and convolutions in float32 in both runs)."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self._architecture = architecture
        self._network = Network(architecture).double().eval()
        self._weights = {name: torch.from_numpy(tensor.astype(np.float64)) for name, tensor in weights.items()}
        self._names = [tensor.name for tensor in architecture.state_tensors()]
        self._front = [name for name in self._names if name.startswith("front.")]

    def flipped(
        self, tokens: Tokens, past: int, rounds: int, window: Tokens | None = None, direction: Floats | None = None
    ) -> Tokens:
        """Substitutes tokens (N, T), the first `past` of them before the cut, to increase the distance.

        window: (K), fixed tokens after the cut; `tokens` are then the pasts alone. direction: (H).
        """
        chosen = torch.from_numpy(tokens)
        fixed = None if window is None else self._shares(torch.from_numpy(window)[None].expand(len(tokens), -1))
        best = self._ends(self._shares(chosen), fixed, past, direction).detach()
        rows = torch.arange(len(tokens))
        for _ in range(rounds):
            shares = self._shares(chosen).requires_grad_()
            (slopes,) = torch.autograd.grad(self._ends(shares, fixed, past, direction).sum(), shares)
            gains = (slopes - slopes.gather(2, chosen.T[..., None])).transpose(0, 1).nan_to_num(0, 0, 0)  # (N, T, V)
            most, other = gains.max(dim=2)
            order = most.argsort(dim=1, descending=True)
            for count in AT_ONCE:
                places = order[:, :count]
                tried = chosen.scatter(1, places, other.gather(1, places))
                with torch.no_grad():
                    found = self._ends(self._shares(tried), fixed, past, direction)
                better = found > best
                chosen = torch.where(better[rows, None], tried, chosen)
                best = torch.where(better, found, best)
        return chosen.numpy()

    def softened(self, tokens: Tokens, past: int, steps: int) -> Tokens:
        """Returns the tokens (N, T) at which climbing mixtures end that start from these."""
        logits = SHARPNESS * self._shares(torch.from_numpy(tokens))
        for _ in range(steps):
            logits = logits.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(self._ends(logits.softmax(dim=2), None, past, None).sum(), logits)
            slopes = slopes.nan_to_num(0, 0, 0)
            largest = slopes.abs().amax(dim=(0, 2), keepdim=True).clamp(min=NEAREST)
            logits = logits + STEP * slopes / largest
        return logits.detach().argmax(dim=2).T.contiguous().numpy()

    def states(
        self, reach: Mapping[str, tuple[Floats, Floats]], last: Tokens, rounds: int, generator: np.random.Generator
    ) -> tuple[dict[str, Floats], Tokens]:
        """Returns climbed initial states, (N, ...) by name, and the tokens from there, (N, K), which start as `last`.

        reach: the least and the greatest value of each unit, by state tensor, except a convolution's inputs, which are
        outputs of a LayerNorm.
        """
        count, size = len(last), len(self._names) - len(self._front)
        places = {name: (np.full(1, -1.0), np.full(1, 1.0)) for name in self._front} | dict(reach)
        assert len(places) == len(self._front) + size, "this is a bug: every state tensor has a reach"
        low = [torch.from_numpy(places[name][0]) for name in self._names]
        high = [torch.from_numpy(places[name][1]) for name in self._names]
        shapes = [(count, *tensor.shape) for tensor in self._architecture.state_tensors()]
        corners = [torch.from_numpy(generator.integers(2, size=shape).astype(np.float64)) for shape in shapes]
        held = [a + (b - a) * corner for a, b, corner in zip(low, high, corners, strict=True)]
        chosen = torch.from_numpy(last)
        best = self._ends_from(held, self._shares(chosen)).detach()
        for index in range(rounds):
            free, shares = [state.requires_grad_() for state in held], self._shares(chosen).requires_grad_()
            slopes = torch.autograd.grad(self._ends_from(free, shares).sum(), [*free, shares])
            gains = (slopes[-1] - slopes[-1].gather(2, chosen.T[..., None])).transpose(0, 1).nan_to_num(0, 0, 0)
            most, other = gains.max(dim=2)
            place = most.argmax(dim=1, keepdim=True)
            flipped = chosen.scatter(1, place, other.gather(1, place))
            held = [state.detach() for state in held]
            moved = [
                torch.clamp(state + (b - a) * 0.5**index * slope.nan_to_num(0, 0, 0).sign(), a, b)
                for state, slope, a, b in zip(held, slopes, low, high, strict=False)
            ]
            for states, tokens in ((moved, chosen), (moved, flipped), (held, flipped)):
                with torch.no_grad():
                    found = self._ends_from(states, self._shares(tokens))
                better = found > best
                held = [
                    torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old)
                    for new, old in zip(states, held, strict=True)
                ]
                chosen = torch.where(better[:, None], tokens, chosen)
                best = torch.where(better, found, best)
        found_states = {name: state.numpy() for name, state in zip(self._names, self._admitted(held), strict=True)}
        return found_states, chosen.numpy()

    def _admitted(self, states: list[Tensor]) -> list[Tensor]:
        """Returns the states with normalised inputs of the convolutions."""
        admitted = []
        for name, state in zip(self._names, states, strict=True):
            if name in self._front:
                norm = name.removesuffix("inputs") + "norm."
                state = functional.layer_norm(
                    state,
                    state.shape[-1:],
                    self._weights[norm + "weight"],
                    self._weights[norm + "bias"],
                    self._architecture.norm_epsilon,
                )
            admitted.append(state)
        return admitted

    def _ends_from(self, states: list[Tensor], shares: Tensor) -> Tensor:
        return self._logarithm(self._apart(self._admitted(states), shares), None)

    def _ends(self, shares: Tensor, fixed: Tensor | None, past: int, direction: Floats | None) -> Tensor:
        """Returns the logarithm of the ends' distance, (N). shares: (T, N, V), of which `past` are before the cut."""
        _, full = self._run(shares[:past], self._zero(shares.shape[1]))
        return self._logarithm(self._apart(full, shares[past:] if fixed is None else fixed), direction)

    def _apart(self, full: list[Tensor], last: Tensor) -> Tensor:
        """Returns the difference of the ends of runs from `full` and from zero: (N, H)."""
        count = last.shape[1]
        both = [torch.cat([one, other]) for one, other in zip(full, self._zero(count), strict=True)]
        hidden, _ = self._run(torch.cat([last, last], dim=1), both)
        return hidden[-1, :count] - hidden[-1, count:]

    def _logarithm(self, apart: Tensor, direction: Floats | None) -> Tensor:
        squares = (apart**2).sum(dim=1) if direction is None else (apart @ torch.from_numpy(direction)) ** 2
        return torch.log(squares + NEAREST)

    def _run(self, shares: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Runs the network over mixtures of tokens, (T, N, V); each place has its own embedding."""
        time, count = shares.shape[:2]
        rows = (shares @ self._weights["embedding.weight"]).reshape(time * count, -1)
        places = torch.arange(time * count).view(time, count)
        run: tuple[Tensor, list[Tensor]] = functional_call(
            self._network, {**self._weights, "embedding.weight": rows}, (places, state)
        )
        return run

    def _zero(self, count: int) -> list[Tensor]:
        shapes = [tensor.shape for tensor in self._architecture.state_tensors()]
        return [torch.zeros(count, *shape, dtype=torch.float64) for shape in shapes]

    def _shares(self, tokens: Tensor) -> Tensor:
        """Returns pure tokens as shares: (N, T) -> (T, N, V)."""
        return functional.one_hot(tokens.T, self._architecture.vocabulary_size).double()
