"""Tests of the measurement of served bounds and proofs, of its stored JSON, and of the page that shows its figures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from benchmarks.page import with_tables
from research import served_proofs
from research.served_proofs import Distributions, Figures, read, table
from wane.models.bundle import Bundle
from wane.models.bundle_checks import read_manifest
from wane.models.cache_mixture import CacheMixture
from wane.models.reference import Reference
from wane.training.cache import unfitted_cache

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "models" / "bundles" / "rnn-stable"
STREAM = np.random.default_rng(0).integers(3, 2048, size=200)


def measure(positions: int = 4) -> Figures:
    with Progress(disable=True) as progress:
        return asyncio.run(served_proofs.measure(BUNDLE, 64, STREAM, positions, 2, progress))


def test_served_bounds_hold_and_served_proofs_are_correct() -> None:
    found = measure()
    assert (found.k, found.cache, found.positions, found.violations) == (64, None, 4, 0)
    assert 0 < found.observed_median <= found.bound_median <= found.bound_p90 <= found.bound_largest <= 1
    assert found.proved <= found.equal
    assert found.times is not None
    assert found.times.positions == 2
    assert found.times.plain_ms > 0
    assert found.times.prove_ms > 0


def test_a_distribution_outside_the_bounds_is_counted_as_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = np.full(2048, 1 / 2048)
    monkeypatch.setattr(Distributions, "after", lambda self, hidden, before: uniform)
    assert measure().violations == 4


def test_the_never_interrupted_distribution_is_mixed_with_the_cache() -> None:
    bundle = Bundle.read(BUNDLE)
    cache = unfitted_cache(8)
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    hidden = np.random.default_rng(1).normal(size=bundle.manifest.architecture.hidden)
    alone = Distributions(bundle, reference).after(hidden, STREAM)
    cached = replace(bundle, manifest=bundle.manifest.model_copy(update={"cache": cache}))
    mixed = Distributions(cached, reference).after(hidden, STREAM)
    shares = CacheMixture(cache, 2048).of(STREAM)
    counts = np.bincount(STREAM[-8:], minlength=2048) / 8
    assert alone.sum() == pytest.approx(1)
    assert mixed.sum() == pytest.approx(1)
    # The last token has no earlier occurrence in the cache, so only the counts of single tokens are mixed in.
    weight = cache.weights[0][1]
    assert weight > 0
    assert shares.network[0] == pytest.approx(1 - weight)
    assert mixed == pytest.approx((1 - weight) * alone + weight * counts)


def test_the_page_has_the_table_of_the_stored_figures() -> None:
    text = (ROOT / "research" / "stability.md").read_text(encoding="utf-8")
    path = ROOT / "research" / "figures" / "served_proofs.json"
    kept = read(path)
    assert with_tables(text, {"served": table(kept)}, "stability.md") == text
    assert set(kept) == {name for name, _ in served_proofs.SERVED}
    assert all((found.positions, found.violations) == (5000, 0) for found in kept.values())
    found = kept["gated-stable-64"]  # the other does not ship
    manifest = read_manifest(ROOT / served_proofs.BUNDLES / "gated-stable-64")
    assert found.weights == manifest.files[manifest.weights]
    assert manifest.cache is not None
    assert (found.k, found.cache) == (manifest.window, manifest.cache.length)
