"""Measures how fast a model forgets: compares windows of the last k tokens with the uninterrupted run.

Two runs of the same weights read the same last k tokens. The uninterrupted run starts from the state after all earlier
tokens, the window from the zero state. Three quantities are compared: the 2-norm distance of `hidden`, the output
layer's input; the total variation between the predicted distributions, and whether their most probable tokens agree;
and the perplexity of the next tokens. Gradient norms measure how much the probability of the next token depends on the
input i steps earlier. All results are float32 measurements at sampled positions of one text, not bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from wane.models.layer_registry import Frozen
from wane.models.manifest import Perplexity, Positive
from wane.models.networks import Network
from wane.training.data import Corpus
from wane.training.evaluate import ROWS, Advance, SplitLosses, recurrent_pieces, spread_positions, window_hidden

GRADIENT_ROWS = 32
GRADIENT_POSITIONS = 256
"""The largest number of positions for which gradients are computed."""
LARGEST_LOSS = 700.0
"""The largest mean loss, in nats per token, for which a perplexity is computed. Up to this limit the exponential of the
difference of any two losses is a finite float64 above 0."""


class Unmeasurable(FloatingPointError):
    """Raised if a run of the model overflows (the message names the run and the token), or if a perplexity would
    overflow."""


class Quantiles(Frozen):
    """The median, the 99th percentile and the maximum of a quantity over all measured positions."""

    median: float = Field(ge=0)
    p99: float = Field(ge=0)
    max: float = Field(ge=0)


class AtWindow(Frozen):
    """The comparison of windows of k tokens with the uninterrupted run, at the same positions.

    `distance`: the 2-norm distance between the output layer's inputs in the two runs. `perplexity_ratio`: the windows'
    perplexity divided by the uninterrupted run's.
    """

    k: Positive
    distance: Quantiles
    total_variation: Quantiles
    top1_match: float = Field(ge=0, le=1)
    perplexity: Perplexity
    perplexity_ratio: float = Field(gt=0)


class AtLag(Frozen):
    """Statistics of the norms |d p_{t+i} / d x_t|. p_{t+i} is the predicted probability of the token after position
    t+i, and x_t is the embedding of the token at position t."""

    i: int = Field(ge=0)
    gradient: Quantiles


@dataclass(frozen=True, slots=True)
class Forgetting:
    """The measurements of one stream. `losses`: the mean losses, with the same fields as in an evaluation of a split
    (`training/evaluate.py`)."""

    windows: tuple[AtWindow, ...]
    lags: tuple[AtLag, ...]
    gradient_positions: int
    losses: SplitLosses


def window_grid(longest: int) -> list[int]:
    """Returns the window lengths to evaluate: 1, 2, 3, 4, 6, 8, 12, ... up to `longest`."""
    powers = [2**n for n in range(longest.bit_length())]
    return sorted(k for k in {*powers, *(3 * power // 2 for power in powers[1:])} if k <= longest)


def token_steps(tokens: int, windows: Sequence[int], count: int) -> int:
    """Estimates the number of token steps of a measurement, for the total of its progress bar. The backward pass of a
    token counts as two token steps."""
    return tokens - 1 + count * sum(windows) + 3 * min(count, GRADIENT_POSITIONS) * max(windows)


def measure(
    network: Network,
    corpus: Corpus,
    split: str,
    windows: Sequence[int],
    count: int,
    advance: Advance | None = None,
    *,
    differentiable: bool = True,
) -> Forgetting:
    """Compares windows with the uninterrupted run at `count` positions, or fewer if the split is short. The positions
    are spread evenly over the positions at which the uninterrupted run has read at least twice as many tokens as the
    largest window has. If the network is not `differentiable`, no gradients are measured. Raises Unmeasurable."""
    network.eval()
    stream = corpus.streams[split]
    longest = max(windows)
    positions = spread_positions(stream, count, 2 * longest)
    picked = np.linspace(0, len(positions) - 1, min(len(positions), GRADIENT_POSITIONS)).round().astype(int)
    chosen = positions[picked]
    starts = chosen - longest + 1
    hidden, losses, states = _recurrent(network, stream, positions, set(starts.tolist()), advance)
    found = _compare(network, stream, positions, hidden, windows, advance)
    lags = [i for i in (0, *windows) if i < longest] if differentiable else []
    gradients = _gradients(network, stream, starts, longest, states, advance) if lags else torch.empty(0)
    summary = _losses(losses, positions, found, corpus.words.get(split))
    return Forgetting(
        windows=tuple(
            AtWindow(
                k=k,
                distance=_spread(each.distance),
                total_variation=_spread(each.total_variation),
                top1_match=each.top1.double().mean().item(),
                perplexity=summary.perplexity(summary.window[k]),
                perplexity_ratio=math.exp(summary.window[k] - summary.recurrent_at_positions),
            )
            for k, each in found.items()
        ),
        lags=tuple(AtLag(i=i, gradient=_spread(gradients[longest - 1 - i])) for i in lags),
        gradient_positions=len(chosen) if lags else 0,
        losses=summary,
    )


def smallest_window(windows: Sequence[AtWindow], tolerance: float, quantile: str) -> int | None:
    """Returns the smallest evaluated k such that, for this k and all larger evaluated k, a quantile of the total
    variation is within the tolerance. `quantile`: "p99" or "max"."""
    within = None
    for at in sorted(windows, key=lambda at: at.k, reverse=True):
        if not getattr(at.total_variation, quantile) <= tolerance:
            break
        within = at.k
    return within


def _recurrent(
    network: Network, stream: NDArray[np.int64], positions: NDArray[np.int64], starts: set[int], advance: Advance | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs the network over the whole stream without resetting the state. Returns the output layer's input at
    `positions`, the losses of all tokens, and the states before each position in `starts`."""
    hidden, losses, states = [], [], []
    for piece in recurrent_pieces(network, stream, sorted(starts), advance):
        tokens = np.arange(piece.start, piece.start + len(piece.hidden))
        _check("the uninterrupted run", tokens, piece.hidden, piece.losses)
        inside = positions[(positions >= piece.start) & (positions < piece.start + len(piece.hidden))]
        hidden.append(piece.hidden[torch.from_numpy(inside - piece.start)])
        losses.append(piece.losses)
        if piece.start + len(piece.hidden) in starts:
            states.append([tensor.clone() for tensor in piece.state])
    return torch.cat(hidden), torch.cat(losses), [torch.cat(each) for each in zip(*states, strict=True)]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The measurements for windows of one length k. Each field has the shape (positions,) and the dtype float32, except
    `distance` (float64) and `top1` (bool)."""

    distance: Tensor
    total_variation: Tensor
    top1: Tensor
    losses: Tensor


@torch.inference_mode()
def _compare(
    network: Network,
    stream: NDArray[np.int64],
    positions: NDArray[np.int64],
    hidden: Tensor,
    windows: Sequence[int],
    advance: Advance | None,
) -> dict[int, _Pairs]:
    found: dict[int, list[_Pairs]] = {k: [] for k in windows}
    for start in range(0, len(positions), ROWS):
        ends = positions[start : start + ROWS]
        recurrent = hidden[start : start + ROWS]
        target = torch.from_numpy(stream[ends + 1])[:, None].to(hidden.device)
        truth = torch.softmax(network.logits(recurrent), -1)
        for k in windows:
            window = window_hidden(network, stream, k, ends)
            logprobs = torch.log_softmax(network.logits(window), -1)
            losses = -logprobs.gather(1, target)[:, 0]
            _check(f"the window of {k} token(s)", ends, window, losses)
            found[k].append(
                _Pairs(
                    distance=torch.linalg.vector_norm(window.double() - recurrent.double(), dim=-1),
                    total_variation=(logprobs.exp() - truth).abs().sum(-1) / 2,
                    top1=logprobs.argmax(-1) == truth.argmax(-1),
                    losses=losses,
                )
            )
            if advance is not None:
                advance(k * len(ends))
    return {
        k: _Pairs(*(torch.cat([getattr(pair, name) for pair in pairs]) for name in _Pairs.__slots__))
        for k, pairs in found.items()
    }


def _gradients(
    network: Network,
    stream: NDArray[np.int64],
    starts: NDArray[np.int64],
    length: int,
    states: list[Tensor],
    advance: Advance | None,
) -> Tensor:
    """Runs the network over `length` tokens from each position in `starts`, with the initial states `states`. Computes
    the gradient of the predicted probability of the token after the last input, with respect to the embedding of each
    input. Returns the 2-norms of these gradients: float64 (length, len(starts))."""
    embedding = network.embedding.weight.detach()
    norms = []
    for first in range(0, len(starts), GRADIENT_ROWS):
        begin = starts[first : first + GRADIENT_ROWS]
        tokens = torch.from_numpy(stream[np.arange(length)[:, None] + begin[None, :]]).to(embedding.device)
        target = torch.from_numpy(stream[begin + length])[:, None].to(embedding.device)
        # each input has its own row in the embedding table, and therefore its own gradient
        table = embedding[tokens.flatten()].requires_grad_()
        rows = torch.arange(tokens.numel(), device=embedding.device).view_as(tokens)
        state = [tensor[first : first + GRADIENT_ROWS].clone() for tensor in states]
        weights = {"embedding.weight": table}
        hidden, _ = functional_call(network, weights, (rows, state), tie_weights=False)
        probability = torch.softmax(network.logits(hidden[-1]), -1).gather(1, target)
        (gradient,) = torch.autograd.grad(probability.sum(), table)
        norm = torch.linalg.vector_norm(gradient.double(), dim=-1).view_as(tokens)
        _check(f"the gradient over {length} token(s)", begin + length - 1, norm.T)
        norms.append(norm)
        if advance is not None:
            advance(3 * tokens.numel())
    return torch.cat(norms, dim=1)


def _losses(
    recurrent: Tensor, positions: NDArray[np.int64], windows: dict[int, _Pairs], words: int | None
) -> SplitLosses:
    """Returns the mean losses. Omits the number of words if a perplexity per word would overflow a float64. Raises
    Unmeasurable if a perplexity per token would overflow."""
    found = SplitLosses(
        tokens=len(recurrent),
        words=words,
        recurrent=recurrent.double().mean().item(),
        positions=len(positions),
        recurrent_at_positions=recurrent[torch.from_numpy(positions)].double().mean().item(),
        window={k: each.losses.double().mean().item() for k, each in windows.items()},
    )
    worst = max(found.recurrent, found.recurrent_at_positions, *found.window.values())
    if worst > LARGEST_LOSS:
        raise Unmeasurable(f"the perplexity of a mean loss of {worst:.4g} nats per token overflows a float64")
    if words is not None and worst * found.tokens > LARGEST_LOSS * words:
        found = replace(found, words=None)
    return found


def _check(what: str, ends: NDArray[np.int64], *found: Tensor) -> None:
    """Raises Unmeasurable unless all values of the tensors `found`, each of shape (len(ends), ...), are finite. `ends`:
    the index of the last token of each run. `what`: the name of the run, for the message."""
    finite = torch.stack([each.reshape(len(ends), -1).isfinite().all(-1) for each in found]).all(0).cpu().numpy()
    if not finite.all():
        raise Unmeasurable(f"{what} overflows float32 at token {ends[~finite][0] + 1}")


def _spread(values: Tensor) -> Quantiles:
    array = values.double().cpu().numpy()
    median, p99 = np.quantile(array, [0.5, 0.99])
    return Quantiles(median=float(median), p99=float(p99), max=float(array.max()))
