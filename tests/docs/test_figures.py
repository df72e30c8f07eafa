"""Tests that the documentation shows the figures of the shipped bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import figures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("document", "table"),
    [
        ("models/bundles/README.md", figures.results_table),
        ("models/bundles/README.md", figures.proofs_table),
        ("models/bundles/README.md", figures.window_table),
        ("models/bundles/README.md", figures.training_table),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_table_matches_the_manifests(document: str, table: object) -> None:
    assert callable(table)
    text = (ROOT / document).read_text(encoding="utf-8")
    assert "\n".join(table()) in text


def test_every_shipped_bundle_is_at_most_6_mb_and_those_of_text_share_one_vocabulary() -> None:
    manifests = figures.manifests()
    assert sorted(path.name for path in (ROOT / "models" / "bundles").iterdir() if path.is_dir()) == sorted(
        [*figures.SHIPPED, figures.EVENTS]
    )
    assert all(figures.size_mb(manifest) <= 6 for manifest in [*manifests, figures.of_events()])
    assert len({manifest.vocabulary.sha256 for manifest in manifests}) == 1


def test_the_bundle_of_events_is_certified_and_has_names_of_events() -> None:
    manifest = figures.of_events()
    assert (manifest.vocabulary.kind, manifest.certificate.certified) == ("events", True)


def test_the_stable_bundles_are_contractive() -> None:
    for manifest in figures.manifests():
        assert manifest.certificate.contractive == ("stable" in manifest.name)
