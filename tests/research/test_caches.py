"""Tests of the perplexities with caches of several lengths, and of their table in the model card."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.page import with_tables
from benchmarks.summary import bundle_hashes
from research import caches
from wane.models.bundle import Bundle
from wane.models.cache_mixture import CacheMixture
from wane.models.reference import Reference
from wane.training.bundle import corpus_of
from wane.training.cache import unfitted_cache

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "models" / "bundles" / "rnn-stable"
CACHE = unfitted_cache(16)
WORDS = ["the", "cat", "and", "a", "dog", "saw", "old", "young", "near", "river"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, size=9)) for _ in range(60)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_perplexities_equal_those_of_the_distributions_token_by_token(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "fit_cache", lambda statistics, network: CACHE)
    monkeypatch.setattr(caches, "LENGTHS", (CACHE.length,))
    monkeypatch.setattr(caches, "POSITIONS", 20)
    found = caches.measure(BUNDLE, text, lambda tokens: None)
    assert list(found) == [0, CACHE.length]

    bundle = Bundle.read(BUNDLE)
    stream = corpus_of(bundle, text).streams["test"]
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    mixture = CacheMixture(CACHE, bundle.manifest.vocabulary.size)
    state, alone, mixed = reference.zero_state(1), [], []
    for at, (token, following) in enumerate(pairwise(stream)):
        hidden, state = reference.advance(np.array([token]), state)
        logits = reference.logits(hidden)[0]
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        cache = mixture.of(stream[1 : at + 1])
        alone.append(math.log(shares[following]))
        mixed.append(math.log(cache.network[0] * shares[following] + mixture.added(cache)[0][following]))
    assert found[0].recurrent == pytest.approx(math.exp(-np.mean(alone)), rel=1e-4)
    assert found[CACHE.length].recurrent == pytest.approx(math.exp(-np.mean(mixed)), rel=1e-4)
    # The layer contracts by 0.9, so a window of 64 tokens has nearly the same perplexity as the recurrent run.
    for perplexities in found.values():
        assert perplexities.windows == {k: pytest.approx(1, abs=0.01) for k in caches.WINDOWS}


def test_the_model_card_has_the_table_of_the_stored_perplexities() -> None:
    kept = caches.read(ROOT / caches.FIGURES)
    card = (ROOT / caches.CARD).read_text(encoding="utf-8")
    assert with_tables(card, {caches.TABLE: caches.table(kept)}, "the model card") == card
    document = json.loads((ROOT / caches.FIGURES).read_bytes())
    assert document["bundles"] | bundle_hashes(kept) == document["bundles"]
    assert {"gated", "gated-stable-64", "gated-stable-128"} <= set(kept)
