"""Fits the weights of a cache mixture (`models/cache_mixture.py`) to a stream, and evaluates the mixture.

A mixture has a table of weights. Each position of the stream belongs to one row of the table
(`models/cache_statistics.py`). The weights of a row are fitted by expectation maximisation over the row's positions.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wane.models.cache_mixture import CacheMixture
from wane.models.cache_statistics import CacheStatistics, cache_statistics
from wane.models.manifest import CACHE_BINS, CacheModel
from wane.models.vocabulary import Vocabulary
from wane.training.config import Experiment
from wane.training.data import Corpus

ROWS = (len(CACHE_BINS) + 1) ** 2
ITERATIONS = 200
LEAST_NETWORK = 0.05
"""The smallest weight of the network in a fitted table. A token that the cache does not predict must keep a positive
probability."""
PRIOR = 20.0
"""The number of pseudo-positions that are added to the positions of each row when its weights are fitted. The
pseudo-positions pull the row's weights towards those that fit all positions of the stream."""
WORTH = 0.005
"""The smallest reduction of the loss, in nats per token, for which the counts of single tokens (the first cache
component) get a weight. The loss is measured on the stream to which the cache is fitted."""
FIRST_GUESS = (0.85, 0.05, 0.05, 0.05)
"""The initial weights of a fit: of the network and of the three cache components."""
TINY = 1e-30


def fit_cache(statistics: CacheStatistics, network: NDArray[np.float64]) -> CacheModel:
    """Returns the mixture under which a stream has the largest likelihood. statistics: the cache's statistics of the
    stream.

    network: float64 (n), -log p of each token by the network alone, in nats. The counts of single tokens get a weight
    only if this weight lowers the loss by more than WORTH, because a step is cheaper without the counts.
    """
    found = [_best(statistics, network, np.array([True, counts, True, True])) for counts in (False, True)]
    losses = [-float(statistics.log_probabilities(one, -network).mean()) for one in found]
    return found[losses[0] - losses[1] > WORTH]


def _best(statistics: CacheStatistics, network: NDArray[np.float64], used: NDArray[np.bool_]) -> CacheModel:
    """Returns the mixture under which the stream has the largest likelihood, among the mixtures of the used components.
    used: bool (4), whether the mixture uses the network and each of the three cache components."""
    of_network = np.exp(-network)
    parts = np.column_stack([of_network, statistics.shares])
    # A cache that is not full uses only a part of the first cache component's weight. The network gets the other part.
    parts[:, 1] += (1 - statistics.filled) * of_network
    whole = _fitted(parts, np.array(FIRST_GUESS) * used, None)
    priors = [_prior(row, whole) for row in range(ROWS)]
    table = [_fitted(parts[statistics.rows == row], prior, prior) for row, prior in enumerate(priors)]
    return CacheModel(length=statistics.length, weights=tuple(_rounded(weights) for weights in table))


def unfitted_cache(length: int) -> CacheModel:
    """Returns the mixture that training uses before the first fit."""
    guess = np.array(FIRST_GUESS)
    return CacheModel(length=length, weights=tuple(_rounded(_prior(row, guess)) for row in range(ROWS)))


def _prior(row: int, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns `weights` for a row of the table. A component gets the weight 0 if, at the row's positions, the cache has
    no earlier occurrence of the last token (or of the last two tokens) on which the component's share is based. The
    other weights are scaled to the sum 1."""
    bins = len(CACHE_BINS) + 1
    possible = np.array([True, True, row >= bins, row % bins > 0])
    prior: NDArray[np.float64] = weights * possible
    prior /= prior.sum()
    return prior


def _fitted(
    parts: NDArray[np.float64], weights: NDArray[np.float64], prior: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Returns the weights (4) that maximise the likelihood, by expectation maximisation. parts: (n, 4), the probability
    of each token by each component. prior: (4), the weights at the PRIOR pseudo-positions, or None for a fit without
    pseudo-positions."""
    extra = np.zeros(4) if prior is None else PRIOR * prior
    for _ in range(ITERATIONS):
        total = np.maximum(parts @ weights, TINY)
        found = weights * (parts.T @ (1 / total)) + extra
        weights = found / max(found.sum(), TINY)
    if weights[0] < LEAST_NETWORK:
        weights = np.concatenate([[LEAST_NETWORK], weights[1:] * (1 - LEAST_NETWORK) / weights[1:].sum()])
    return weights


def _rounded(weights: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Returns the weights rounded to 6 decimals. The network's weight is 1 minus the rounded other weights, so the sum
    stays 1."""
    _, one, two, three = (round(float(weight), 6) for weight in weights)
    return round(1 - one - two - three, 6), one, two, three


class CacheTraining:
    """The mixture of a network with a cache, during training: its current weights, and the cache's statistics of each
    split."""

    def __init__(
        self,
        streams: dict[str, NDArray[np.int64]],
        size: int,
        cache: CacheModel,
        start: int | None,
        device: torch.device,
    ) -> None:
        """streams: the token stream of each split. size: the size V of the vocabulary. start: the token that empties
        the cache, or None."""
        self.model = cache
        self._streams, self._size, self._start, self._device = streams, size, start, device
        self._statistics = {name: cache_statistics(stream, cache.length, start) for name, stream in streams.items()}

    @classmethod
    def of(cls, experiment: Experiment, corpus: Corpus, device: torch.device) -> CacheTraining:
        """Returns the mixture of an experiment with a cache, with weights that are not fitted yet."""
        assert experiment.model.cache is not None, "the experiment has no cache: this is a bug"
        streams = {split: corpus.streams[split] for split in ("train", "valid")}
        start = cache_start(corpus.vocabulary)
        return cls(streams, corpus.vocabulary.size, unfitted_cache(experiment.model.cache), start, device)

    def losses(self, split: str, positions: NDArray[np.int64], network: Tensor) -> Tensor:
        """Returns the mixture's -log p of the token after each position. network: the network's -log p of this token.
        Result and `network` have the shape of `positions`."""
        weight, added = self._statistics[split].at(positions).parts(self.model)
        log_added = self._tensor(np.log(np.maximum(added, TINY)))
        return -torch.logaddexp(self._tensor(np.log(weight)) - network, log_added)

    def fitted(
        self, split: str, positions: NDArray[np.int64], network: NDArray[np.float64]
    ) -> tuple[CacheModel, float]:
        """Returns the mixture with the smallest mean loss at `positions`, and this loss. network: the network's -log p
        of the token after each position, in the shape of `positions`."""
        statistics = self._statistics[split].at(positions.ravel())
        found = fit_cache(statistics, network.ravel())
        return found, float(-statistics.log_probabilities(found, -network.ravel()).mean())

    def shares(self, split: str, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns the mixture's parts at the B `positions`: the network's weight (B), and the probability that the
        cache adds to each token (B, V)."""
        mixture, stream = CacheMixture(self.model, self._size), self._streams[split]
        histories = [sequence_before(stream, int(at), self.model.length, self._start) for at in positions]
        newest = np.array([(len(known) - 1) % self.model.length for known in histories])
        found = mixture.shares(np.stack([mixture.ring(known, len(known)) for known in histories]), newest)
        return self._tensor(found.network), self._tensor(mixture.added(found))

    def _tensor(self, values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.float32)


def cache_start(vocabulary: Vocabulary) -> int | None:
    """Returns the token that empties the cache: `<eos>` of event sequences. Returns None for text, which is one
    sequence."""
    return vocabulary.eos_id if vocabulary.kind == "events" else None


def sequence_before(stream: NDArray[np.int64], at: int, length: int, start: int | None) -> NDArray[np.int64]:
    """Returns the tokens that are in the cache after the token at position `at` of a stream: at most `length` tokens.
    start: the token that empties the cache, or None."""
    known = stream[max(1, at - length + 1) : at + 1]
    if start is not None and len(begins := np.flatnonzero(known == start)):
        known = known[begins[-1] + 1 :]
    return known
