"""A gradient-based adversary of two runs that read the same last tokens. The first, called the run, has read other
tokens (the past) before. The second, called the window, starts from the zero state at the end of the past (the cut).
The adversary searches for tokens and initial states of the run that maximise the distance between the run's and the
window's `hidden` (the input of the output layer) after the last token.

Tokens are discrete and have no gradient. The input at each position is therefore a weighted mean of all tokens'
embeddings, called a mixture. The gradient is taken with respect to the mixture's weights (`shares`). The search has two
methods:

- `flipped`: the gradient estimates how much each substitution of one token increases the distance. The best
  substitutions are tried, at one or at several positions at once. A tried substitution is kept if the distance grows
  (HotFlip, Ebrahimi et al. 2018, arXiv 1712.06751).
- `softened`: gradient ascent on the mixtures' weights. At the end each mixture is replaced by its token with the
  largest weight.

The objective is the logarithm of the squared distance after the last token. A logarithm is used because distances range
from 1 to 1e-12. If a direction in the space of `hidden` is given, only the component of the difference in this
direction counts. An example is the direction in which one token's lead over another token (the difference of their
logits) changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from wane.models.architecture import Architecture
from wane.models.networks import Network
from wane.models.weights import Weights

Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]

AT_ONCE = (1, 3, 9)
"""The numbers of positions at which `flipped` substitutes tokens at once. It tries each number in turn."""

SHARPNESS = 2.0
"""The initial logit of the token at which a mixture starts. The logits of all other tokens start at 0."""

STEP = 1.0
"""The largest change of a logit in one step of the gradient ascent."""

NEAREST = 1e-300
"""Added to squared distances, to keep the logarithm of zero finite."""


class Adversary:
    """The adversary of one model. The run and the window are computed in float64, but torch evaluates their gates and
    convolutions in float32."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self._architecture = architecture
        self._network = Network(architecture).double().eval()
        self._weights = {name: torch.from_numpy(tensor.astype(np.float64)) for name, tensor in weights.items()}
        self._names = [tensor.name for tensor in architecture.state_tensors()]
        self._front = [name for name in self._names if name.startswith("front.")]

    def flipped(
        self, tokens: Tokens, past: int, rounds: int, window: Tokens | None = None, direction: Floats | None = None
    ) -> Tokens:
        """Returns `tokens` (N, T) with substitutions that increase the distance. The first `past` tokens are before the
        cut.

        window: (K), the fixed tokens after the cut. If `window` is given, `tokens` contains only the tokens before the
            cut.
        direction: (H), the direction in which a difference of `hidden` counts. If it is None, all directions count.
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
        """Returns the tokens (N, T) that a gradient ascent on mixtures finds. The ascent starts at `tokens`."""
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
        """Returns initial states of the run, (N, ...) by name, and tokens (N, K) that follow them. States and tokens
        are chosen to maximise the distance: the states by gradient ascent, the tokens by substitutions that start at
        `last`, (N, K).

        reach: the smallest and the largest value of each unit, by state tensor. The stored inputs of convolutions have
            no entry in `reach`, because they are outputs of a LayerNorm.
        """
        count, size = len(last), len(self._names) - len(self._front)
        places = {name: (np.full(1, -1.0), np.full(1, 1.0)) for name in self._front} | dict(reach)
        assert len(places) == len(self._front) + size, (
            "`reach` lacks a state tensor, or has one too many: this is a bug"
        )
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
        """Returns the states, with the LayerNorm applied to the state tensors that store inputs of convolutions. These
        tensors can only hold outputs of the LayerNorm. The other state tensors are unchanged."""
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
        """Returns the objective, (N). shares: (T, N, V). The first `past` positions are before the cut."""
        _, full = self._run(shares[:past], self._zero(shares.shape[1]))
        return self._logarithm(self._apart(full, shares[past:] if fixed is None else fixed), direction)

    def _apart(self, full: list[Tensor], last: Tensor) -> Tensor:
        """Returns the difference (N, H) between `hidden` at the ends of two runs over `last`. One run starts from the
        states `full`, the other from the zero state."""
        count = last.shape[1]
        both = [torch.cat([one, other]) for one, other in zip(full, self._zero(count), strict=True)]
        hidden, _ = self._run(torch.cat([last, last], dim=1), both)
        return hidden[-1, :count] - hidden[-1, count:]

    def _logarithm(self, apart: Tensor, direction: Floats | None) -> Tensor:
        squares = (apart**2).sum(dim=1) if direction is None else (apart @ torch.from_numpy(direction)) ** 2
        return torch.log(squares + NEAREST)

    def _run(self, shares: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Runs the network over mixtures of tokens, (T, N, V). The embedding of each position is the mean of all
        tokens' embeddings, weighted by `shares`."""
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
        """Returns tokens (N, T) as one-hot shares (T, N, V)."""
        return functional.one_hot(tokens.T, self._architecture.vocabulary_size).double()
