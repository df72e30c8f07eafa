"""Bundles with dummy graphs. They pass all checks of `Bundle.read`, and can be created without the package onnx."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.models.random_models import architecture as of_kind
from tests.models.random_models import random_weights
from wane.models.architecture import Architecture
from wane.models.bundle import write_bundle
from wane.models.certificate import certify
from wane.models.layer_registry import Kind
from wane.models.manifest import SCHEMA_VERSION, Manifest, Provenance, Quality, VocabularyInfo
from wane.models.vocabulary import Vocabulary
from wane.models.weights import encode_weights

WORDS = ("<unk>", "<eos>", *"abcdefghi")


def words_tokenizer(size: int = len(WORDS)) -> str:
    """Returns the tokenizer.json of a vocabulary of at least eleven words."""
    words = [*WORDS, *(f"word{index}" for index in range(len(WORDS), size))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str())


PROVENANCE = Provenance(
    created="2026-01-01T00:00:00+00:00",
    command="wane train test.toml",
    config={},
    seed=0,
    steps=0,
    best_step=0,
    git_commit=None,
    data={},
    versions={},
    hardware="none",
    train_wall_s=0.0,
)


def small_architecture(cell: Kind = "lstm", **fields: object) -> Architecture:
    """Returns an architecture with the vocabulary of eleven words."""
    chosen: dict[str, Any] = {"layers": 2, "vocabulary_size": len(WORDS)} | fields
    return of_kind(cell, **chosen)


def write_small_bundle(
    path: Path,
    architecture: Architecture | None = None,
    *,
    version: str = "1",
    quality: Quality | None = None,
    replace: bool = False,
) -> Manifest:
    """Writes a bundle with dummy graphs to `path`. `Bundle.read` accepts the bundle."""
    architecture = architecture or small_architecture()
    tokenizer = words_tokenizer()
    vocabulary = Vocabulary("words", tokenizer)
    weights = random_weights(architecture, seed=0, recurrent=0.2)
    graphs = {role: f"{role}.onnx" for role in ("step", "window", "advance", "scan", "head")}
    manifest = Manifest.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "name": path.name,
            "version": version,
            "architecture": architecture,
            "vocabulary": VocabularyInfo(
                kind="words", size=vocabulary.size, eos_id=vocabulary.eos_id, sha256=vocabulary.sha256
            ),
            "state": architecture.state_tensors(),
            "window": 4,
            "max_window": 8,
            "opset": 20,
            "graphs": graphs,
            "weights": "weights.safetensors",
            "tokenizer": "tokenizer.json",
            "files": {},
            "certificate": certify(architecture, weights, 8, None),
            "quality": quality,
            "provenance": PROVENANCE,
        }
    )
    files = {name: f"no graph: {name}".encode() for name in graphs.values()}
    files |= {"weights.safetensors": encode_weights(weights), "tokenizer.json": tokenizer.encode()}
    return write_bundle(path, manifest, files, lambda _: None, replace=replace)


def export_words(
    path: Path, architecture: Architecture, weights: Mapping[str, NDArray[Any]], **fields: Any
) -> Manifest:
    """Exports a model with the vocabulary of `words_tokenizer`. fields: further arguments of `export_bundle`."""
    from wane.models.export import export_bundle

    size = architecture.vocabulary_size
    arguments = {
        "vocabulary_kind": "words",
        "tokenizer_json": words_tokenizer(size),
        "name": path.name,
        "version": "1",
        "description": "",
        "window": 8,
        "max_window": 32,
        "quality": None,
        "provenance": PROVENANCE,
        "sample_tokens": np.random.default_rng(3).integers(min(size, len(WORDS)), size=60).tolist(),
    }
    return export_bundle(path, architecture=architecture, weights=weights, **(arguments | fields))


def edit_manifest(path: Path, *keys: str | int, value: Any) -> None:
    """Sets one field of a bundle's manifest.json. `keys` is the path to the field."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    target = manifest
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    file.write_text(json.dumps(manifest))


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Replaces a file of a bundle and the file's hash in the manifest, so that the check of the hashes passes."""
    (path / name).write_bytes(data)
    edit_manifest(path, "files", name, value=hashlib.sha256(data).hexdigest())


def remove_field(path: Path, field: str) -> None:
    """Removes one field of a bundle's manifest.json."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest[field]
    file.write_text(json.dumps(manifest))
