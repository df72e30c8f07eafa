"""Evaluates the perplexity of one network in both modes of serving: recurrent, and with a window of the last k tokens.

Recurrent perplexity covers a whole split. The state is never reset between its first and its last token. Window
perplexity covers positions spread evenly through the split. The token after each position is predicted from exactly the
last k tokens. The recurrent perplexity is also computed at these positions, so that the two perplexities differ only by
the truncated past.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wane.models.cache_statistics import cache_statistics
from wane.models.manifest import CacheModel, Perplexity, Quality, WindowPerplexity
from wane.models.networks import Network
from wane.training.cache import cache_start
from wane.training.data import Corpus

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POSITIONS = 8192
PIECE = 1024
ROWS = 256
TOLERATED_LOSS = 1.005

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SplitLosses:
    """The mean negative log-probabilities of one split, in nats per token. If there is a cache, they are the losses of
    the mixture of network and cache.

    `recurrent`: over all tokens, in the recurrent mode. `recurrent_at_positions`: the same, but only at the `positions`
    positions at which windows are evaluated. `window`: for windows of k tokens at these positions, by k.
    `without_cache`: like `recurrent`, but for the network alone; None if there is no cache.
    """

    tokens: int
    words: int | None
    recurrent: float
    positions: int
    recurrent_at_positions: float
    window: dict[int, float]
    without_cache: float | None = None

    def perplexity(self, nats: float) -> Perplexity:
        """Converts a mean loss per token to perplexity per token and, for text, per word. The loss per word is the
        total loss divided by the number of words."""
        per_word = None if self.words is None else math.exp(nats * self.tokens / self.words)
        return Perplexity(per_token=math.exp(nats), per_word=per_word)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the uninterrupted run over a stream, at most PIECE tokens. `start`: the index of the first token.

    `hidden`: float32 (tokens, H), the output layer's input after each token. `losses`: float32 (tokens,), the loss of
    each token's successor. `state`: the state after the last token.
    """

    start: int
    hidden: Tensor
    losses: Tensor
    state: list[Tensor]


@torch.inference_mode()
def recurrent_pieces(
    network: Network, stream: NDArray[np.int64], stops: Sequence[int] = (), advance: Advance | None = None
) -> Iterator[Piece]:
    """Runs the network over all tokens but the last, without resetting its state. Yields the run in parts of at most
    PIECE tokens. A part also ends before each index in `stops`."""
    tokens = torch.from_numpy(np.ascontiguousarray(stream)).to(network.embedding.weight.device)
    length = len(tokens) - 1
    ends = sorted({*range(PIECE, length, PIECE), *(stop for stop in stops if 0 < stop < length), length})
    state = None
    for start, end in pairwise([0, *ends]):
        hidden, state = network(tokens[start:end, None], state)
        hidden = hidden[:, 0]
        losses = functional.cross_entropy(network.logits(hidden), tokens[start + 1 : end + 1], reduction="none")
        if advance is not None:
            advance(end - start)
        yield Piece(start, hidden, losses, state)


def recurrent_losses(network: Network, stream: NDArray[np.int64], advance: Advance | None = None) -> Tensor:
    """Returns -log p(stream[t + 1] | stream[0..t]) for every t, without resetting the state: float32 (tokens - 1,)."""
    return torch.cat([piece.losses for piece in recurrent_pieces(network, stream, advance=advance)])


@torch.inference_mode()
def window_losses(
    network: Network,
    stream: NDArray[np.int64],
    k: int,
    positions: NDArray[np.int64],
    advance: Advance | None = None,
) -> Tensor:
    """Runs windows of k tokens from the zero state. Returns -log p(stream[t + 1] | stream[t - k + 1 .. t]) for every t
    in `positions`."""
    losses = []
    for start in range(0, len(positions), ROWS):
        ends = positions[start : start + ROWS]
        targets = torch.from_numpy(stream[ends + 1]).to(network.embedding.weight.device)
        logits = network.logits(window_hidden(network, stream, k, ends))
        losses.append(functional.cross_entropy(logits, targets, reduction="none"))
        if advance is not None:
            advance(k * len(ends))
    return torch.cat(losses)


@torch.inference_mode()
def window_hidden(network: Network, stream: NDArray[np.int64], k: int, ends: NDArray[np.int64]) -> Tensor:
    """Runs windows of k tokens, stream[t - k + 1 .. t] for each t in `ends`, from the zero state. Returns the output
    layer's input after each window.

    Shape: (ends, H).
    """
    inputs = torch.from_numpy(stream[np.arange(1 - k, 1)[:, None] + ends[None, :]])
    hidden: Tensor = network(inputs.to(network.embedding.weight.device))[0][-1]
    return hidden


def spread_positions(stream: NDArray[np.int64], count: int, longest: int) -> NDArray[np.int64]:
    """Returns at most `count` evenly spread positions. At each position, the stream has at least `longest` tokens up to
    and including this position, and a token after it."""
    first, last = longest - 1, len(stream) - 2
    if last < first:
        return np.empty(0, dtype=np.int64)
    return np.unique(np.linspace(first, last, min(count, last - first + 1)).round().astype(np.int64))


def evaluate_split(
    network: Network,
    corpus: Corpus,
    split: str,
    windows: Sequence[int] = WINDOWS,
    count: int = POSITIONS,
    advance: Advance | None = None,
    cache: CacheModel | None = None,
) -> SplitLosses:
    """Evaluates one split in the recurrent mode and with windows. Leaves out windows that are longer than the split.

    With a `cache`, a window's prediction uses the same cache contents as the recurrent run.
    """
    network.eval()
    stream = corpus.streams[split]
    windows = [k for k in windows if k <= len(stream) - 1]
    statistics = None
    if cache is not None:
        statistics = cache_statistics(stream, cache.length, cache_start(corpus.vocabulary))

    def mixed(losses: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
        if cache is None or statistics is None:
            return losses
        return -statistics.at(at).log_probabilities(cache, -losses)

    network_losses = recurrent_losses(network, stream, advance).double().numpy(force=True)
    recurrent = mixed(network_losses, np.arange(len(network_losses)))
    positions = spread_positions(stream, count, max(windows))

    def of_window(k: int) -> float:
        losses = window_losses(network, stream, k, positions, advance).double().numpy(force=True)
        return float(mixed(losses, positions).mean())

    return SplitLosses(
        tokens=len(stream) - 1,
        words=corpus.words.get(split),
        recurrent=float(recurrent.mean()),
        without_cache=None if cache is None else float(network_losses.mean()),
        positions=len(positions),
        recurrent_at_positions=float(recurrent[positions].mean()),
        window={k: of_window(k) for k in windows},
    )


def evaluation_steps(corpus: Corpus, splits: Sequence[str], windows: Sequence[int], count: int) -> int:
    """Returns the number of token steps in an evaluation, which is the total of its progress bar."""
    return sum(
        len(corpus.streams[split]) - 1 + min(count, len(corpus.streams[split])) * sum(windows) for split in splits
    )


def quality(splits: dict[str, SplitLosses], judged: str = "valid") -> Quality:
    """Returns the manifest's record of an evaluation. `judged`: the split whose perplexities determine the field
    `window_within_half_percent`."""
    return Quality(
        tokens={name: losses.tokens for name, losses in splits.items()},
        words={name: losses.words for name, losses in splits.items() if losses.words is not None},
        recurrent={name: losses.perplexity(losses.recurrent) for name, losses in splits.items()},
        window={
            name: WindowPerplexity(
                positions=losses.positions,
                recurrent=losses.perplexity(losses.recurrent_at_positions),
                by_k={k: losses.perplexity(nats) for k, nats in losses.window.items()},
            )
            for name, losses in splits.items()
        },
        window_within_half_percent=smallest_close_window(splits[judged]) if judged in splits else None,
        without_cache={
            name: losses.perplexity(losses.without_cache)
            for name, losses in splits.items()
            if losses.without_cache is not None
        }
        or None,
    )


def smallest_close_window(losses: SplitLosses) -> int | None:
    """Returns the smallest evaluated k such that, for this k and all larger evaluated k, the perplexity per token
    differs by at most 0.5 % from the recurrent perplexity at the same positions."""
    close = None
    for k, nats in sorted(losses.window.items(), reverse=True):
        ratio = math.exp(nats - losses.recurrent_at_positions)
        if not 1 / TOLERATED_LOSS <= ratio <= TOLERATED_LOSS:
            break
        close = k
    return close
