"""Tests that a bundle of an older schema is exported again, with the same weights, certificate and quality."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.docs.figures import EVENTS
from tests.models.bundles import edit_manifest, remove_field
from wane.models.bundle import Bundle
from wane.models.export import ExportError, export_again
from wane.models.export.parity import OnnxGraphs
from wane.models.manifest import CACHE_BINS, CacheModel

SHIPPED = Path(__file__).parents[2] / "models" / "bundles"


@pytest.fixture
def old(tmp_path: Path) -> Bundle:
    """A shipped bundle in the format of schema version 3."""
    path = tmp_path / "old" / "rnn-stable"
    shutil.copytree(SHIPPED / "rnn-stable", path)
    edit_manifest(path, "schema_version", value=3)
    for field in ("unknown", "start"):
        remove_field(path, field)
    return Bundle.open(path)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value that are neither dictionaries nor sequences, with their places."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from leaves(part, f"{path}.{index}")
    else:
        yield path, value


def test_an_exported_bundle_has_the_same_weights_certificate_and_quality(old: Bundle, tmp_path: Path) -> None:
    manifest = export_again(tmp_path / "new", old, version="3")
    bundle = Bundle.read(tmp_path / "new")
    assert bundle.manifest == manifest
    assert (manifest.schema_version, manifest.version, manifest.name) == (6, "3", "rnn-stable")
    assert manifest.certificate.certified
    for field in ("quality", "provenance", "architecture", "window"):
        assert getattr(manifest, field) == getattr(old.manifest, field)
    # the last digits of a certificate depend on the processor
    found, expected = (dict(leaves(one.certificate.model_dump())) for one in (manifest, old.manifest))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path] == (pytest.approx(value, rel=1e-12, abs=0) if isinstance(value, float) else value), path
    for name, tensor in old.weights().items():
        assert np.array_equal(tensor, bundle.weights()[name])


def test_a_cache_and_int8_products_are_added_on_request(old: Bundle, tmp_path: Path) -> None:
    cache = CacheModel(length=8, weights=((1.0, 0.0, 0.0, 0.0),) * (len(CACHE_BINS) + 1) ** 2)
    assert export_again(tmp_path / "cached", old, version="2", cache=cache).cache == cache
    quantised = export_again(tmp_path / "rnn-stable-int8", old, version="2", precision="int8")
    assert (quantised.name, quantised.precision, quantised.quality) == ("rnn-stable-int8", "int8", None)
    assert not quantised.certificate.contractive
    with pytest.raises(ExportError, match="no certificate of its float32 weights"):
        export_again(tmp_path / "back", Bundle.read(tmp_path / "rnn-stable-int8"), version="3", precision="float32")


@pytest.mark.parametrize("name", ["gated-stable", "lstm"])
def test_a_scan_outputs_hidden_after_every_token(name: str) -> None:
    bundle = Bundle.read(SHIPPED / name)
    run, size = OnnxGraphs(bundle).run, bundle.vocabulary.size
    tokens = np.random.default_rng(5).integers(size, size=(2, 12))
    lengths = np.array([12, 7])
    state = {tensor.name: np.zeros((2, *tensor.shape), np.float32) for tensor in bundle.manifest.state}
    outputs = run("scan", {"tokens": tokens, "targets": tokens, "lengths": lengths, **state})
    assert outputs["hiddens"].shape == (2, 12, bundle.manifest.architecture.hidden)
    assert not outputs["hiddens"][1, 7:].any()
    for t in range(12):
        step = run("step", {"tokens": tokens[:, t], **state})
        state = {tensor.name: step[f"next.{tensor.name}"] for tensor in bundle.manifest.state}
        inside = lengths > t
        np.testing.assert_allclose(outputs["hiddens"][inside, t], step["hidden"][inside], atol=1e-5)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/tokenizer.json")), ids=lambda path: path.parent.name)
def test_the_tokenizers_library_decodes_what_it_encoded(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    text = "aisle-3/4" if path.parent.name == EVENTS else "The history of naïve cafés, 1990 to 2001"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads(path.with_name("tokenizer_config.json").read_text())
    assert (config["tokenizer_class"], config["eos_token"]) == ("PreTrainedTokenizerFast", "<eos>")
