"""Makes bundles of several versions of one model from the shipped bundles."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, models

from tests.models.bundles import edit_manifest
from tests.service.live_server import LiveServer, live_server
from tests.service.shipped import FOLDER
from wane.models.vocabulary import EOS, UNK

MODEL = "small"
TEXT_MODEL, EVENT_MODEL = "text.1", "clicks"


def put(folder: Path, version: str, source: str = "rnn-stable", name: str = MODEL) -> Path:
    """Copies the shipped bundle `source` into the folder as a version of the model. Replaces a version that is already
    in the folder."""
    building, path = folder.parent / f".{name}-{version}", folder / name
    shutil.copytree(FOLDER / source, building)
    edit_manifest(building, "name", value=name)
    edit_manifest(building, "version", value=version)
    if path.exists():
        path.rename(folder.parent / f".{name}-before-{version}")
    building.rename(path)
    return path


def retokenize(path: Path) -> None:
    """Appends a line break to the tokenizer's file, so the tokenizer has another digest but still encodes every text in
    the same way."""
    file = path / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    _edit_digest(path)


def make_eventful(path: Path, first: Sequence[str] = ()) -> None:
    """Replaces the bundle's tokenizer with a tokenizer of event names. `<eos>` keeps its id, and `<unk>` gets the next
    id. The ids after them are of the events `first`. An unknown event is read as `<unk>`."""
    file, manifest = path / "tokenizer.json", json.loads((path / "manifest.json").read_text())
    size, eos_id = manifest["vocabulary"]["size"], manifest["vocabulary"]["eos_id"]
    names = [f"event {index}" for index in range(size)]
    for offset, name in enumerate((EOS, UNK, *first)):
        names[(eos_id + offset) % size] = name
    words = models.WordLevel({name: index for index, name in enumerate(names)}, UNK)
    file.write_text(str(Tokenizer(words).to_str()), encoding="utf-8")
    edit_manifest(path, "vocabulary", "kind", value="events")
    edit_manifest(path, "unknown", value="token")
    _edit_digest(path)


def version_of(path: Path) -> str:
    """Returns the bundle's version."""
    version: str = json.loads((path / "manifest.json").read_text())["version"]
    return version


def _edit_digest(path: Path) -> None:
    """Writes the tokenizer's digest to the manifest."""
    digest = hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    edit_manifest(path, "files", "tokenizer.json", value=digest)
    edit_manifest(path, "vocabulary", "sha256", value=digest)


@contextmanager
def server_of_two_models(folder: Path, **settings: str) -> Iterator[LiveServer]:
    """Starts a server of the models TEXT_MODEL, which is the default, and EVENT_MODEL. Puts their bundles into
    `folder`."""
    bundles = folder / "bundles"
    bundles.mkdir()
    put(bundles, "1", name=TEXT_MODEL)
    make_eventful(put(bundles, "2", name=EVENT_MODEL))
    with live_server(WANE_BUNDLES=str(bundles), WANE_DEFAULT_MODEL=TEXT_MODEL, **settings) as server:
        yield server
