from __future__ import annotations

from random import Random

import numpy as np
import pytest
from pydantic import ValidationError

from tests.models.caches import BINS, RandomTables, random_cache
from wane.models.cache_mixture import CacheMixture
from wane.models.cache_statistics import cache_statistics
from wane.models.manifest import CacheModel
from wane.models.reference.cache import mixture
from wane.models.transitions import OWN

SEEDS = range(40)


def without_counts(cache: CacheModel) -> CacheModel:
    """Returns the cache with the weight 0 for the counts of single tokens. In each row, this component's weight is
    added to the network's weight."""
    return CacheModel(length=cache.length, weights=tuple((a + b, 0.0, c, d) for a, b, c, d in cache.weights))


@pytest.mark.parametrize("has_tables", [False, True])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_mixture_equals_the_oracle_s(seed: int, counts: bool, has_tables: bool) -> None:
    random = np.random.default_rng(seed)
    size, length, batch = int(random.integers(2, 30)), int(random.integers(2, 20)), int(random.integers(1, 6))
    length += OWN * has_tables
    cache = random_cache(Random(seed), length)
    tables = RandomTables(Random(seed), size) if has_tables else None
    mixed = CacheMixture(
        cache if counts else without_counts(cache), size, None if tables is None else tables.transitions
    )
    histories = [random.integers(0, size, random.integers(0, 60)) for _ in range(batch)]
    rings = np.stack([mixed.ring(history, len(history)) for history in histories])
    newest = np.array([(len(history) - 1) % length for history in histories])
    logits = (2 * random.normal(size=(batch, size))).astype(np.float32)
    found = mixed.shares(rings, newest)
    network = np.exp(logits.astype(np.float64))
    network /= network.sum(axis=1, keepdims=True)
    expected = np.stack(
        [
            mixture(mixed.model, of_row, history.tolist()) if len(history) else of_row
            for of_row, history in zip(network, histories, strict=True)
        ]
    )
    if tables is not None:
        expected = np.stack(
            [tables.mixed(row, history[-length:].tolist()) for row, history in zip(expected, histories, strict=True)]
        )
    assert expected.sum(axis=1) == pytest.approx(1)
    assert np.exp(mixed.log_probabilities(logits, found)) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    part = [*range(0, batch, 2)]
    of_part = mixed.log_probabilities(logits[part], found.part(part, size))
    assert of_part.tolist() == mixed.log_probabilities(logits, found)[part].tolist()
    assert found.network[:, None] * network + mixed.added(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.tokens.tolist() == [min(len(history), length) for history in histories]
    assert np.bincount(found.keys // (size + 1), minlength=batch).max() <= mixed.most_added
    count = int(random.integers(1, size + 1))
    ids = np.argsort(-logits, axis=1, kind="stable")
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    for known in {count, size}:
        top = mixed.top(logits, sums, ids[:, :known], found, count)
        for row in range(batch):
            best = np.sort(expected[row])[::-1][:count]
            assert top.probabilities[row] == pytest.approx(best, rel=1e-6)
            assert expected[row, top.ids[row]] == pytest.approx(best, rel=1e-6)
            assert len({*top.ids[row].tolist()}) == count


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cache_of_a_sequence_with_an_unknown_beginning_uses_only_the_known_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    length = int(random.integers(2, 12))
    cache = CacheMixture(random_cache(Random(seed), length), 6)
    known, position = random.integers(0, 6, random.integers(0, 2 * length)), int(random.integers(30, 90))
    ring = cache.ring(known, position)
    found = cache.shares(ring[None], np.array([(position - 1) % length]))
    of_alone = cache.of(known)
    assert cache.added(found) == pytest.approx(cache.added(of_alone))
    assert found.network == pytest.approx(of_alone.network)
    assert found.tokens.item() == min(len(known), length)


@pytest.mark.parametrize("kind", ["one sequence", "several sequences", "truncated"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_statistics_of_a_text_equal_those_of_each_of_its_histories(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    size, length = int(random.integers(3, 9)), int(random.integers(2, 20))
    stream = random.integers(0, size, random.integers(2, 80))
    start = 0 if kind == "several sequences" else None
    cache = random_cache(Random(seed), length)
    network = random.dirichlet(np.ones(size), len(stream) - 1)
    at = np.arange(len(stream) - 1)
    statistics = cache_statistics(stream, length, start, truncated=kind == "truncated")
    found = statistics.log_probabilities(cache, np.log(network[at, stream[1:]]))
    first = 0 if kind == "truncated" else 1
    for place in at:
        first = int(place) + 1 if stream[place] == start else first
        history = stream[first : place + 1].tolist()
        of_place = mixture(cache, network[place], history) if history else network[place]
        assert found[place] == pytest.approx(np.log(of_place[stream[place + 1]]), abs=1e-9)


@pytest.mark.parametrize(
    ("row", "weights", "message"),
    [
        (7, (0.5, 0.2, 0.2, 0.2), "weights[7] sums to"),
        (7, (0.0, 0.5, 0.3, 0.2), "weights[7][0], the network's weight, must be above 0"),
        (2, (0.5, 0.3, 0.2, 0.0), "weights[2] must have the weight 0 for a share that is based on 0 occurrences"),
        (6, (0.5, 0.3, 0.0, 0.2), "weights[6] must have the weight 0 for a share that is based on 0 occurrences"),
    ],
)
def test_the_error_names_wrong_weights(row: int, weights: tuple[float, float, float, float], message: str) -> None:
    table = [*random_cache(Random(0), 4).weights]
    table[row] = weights
    with pytest.raises(ValidationError) as caught:
        CacheModel(length=4, weights=tuple(table))
    assert message in str(caught.value)


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(ValidationError, match=f"35 rows, but must have {BINS**2}"):
        CacheModel(length=4, weights=random_cache(Random(0), 4).weights[:-1])
