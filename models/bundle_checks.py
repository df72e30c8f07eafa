"""The checks of a bundle's files before they are used."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from io import BufferedReader
from math import isclose
from pathlib import Path

from pydantic import ValidationError

from wane.models.layer_registry import Frozen
from wane.models.manifest import OLDEST_SCHEMA, SCHEMA_VERSION, Certificate, Manifest, Role
from wane.models.vocabulary import UNK, Vocabulary

MANIFEST = "manifest.json"
ROLES: tuple[Role, ...] = ("step", "window", "advance", "scan", "head")

TOP = 32
"""The number of largest logits that exported graphs output. If the vocabulary has fewer tokens, the graphs output all
logits in descending order. Answers with a `top_k` below this number need no other logits."""

NEWEST_OPSET = 21
"""The newest ONNX opset that the oldest supported onnxruntime (1.20) runs."""

CERTIFICATE_TOLERANCE = 1e-7
"""The relative tolerance between a number of the manifest's certificate and its recomputed value. Machines sum in
different orders, so the last digits differ."""

WEIGHT_TOLERANCE = 1e-6
"""The relative tolerance of the weights of a norm in the certificate. The rounding of these weights is larger if an
LSTM's recurrent matrix is nearly zero."""


MANIFEST_BYTES = 16 * 2**20
"""The largest accepted size of a manifest in bytes."""


class BundleError(Exception):
    """Raised for a bundle that cannot be served. The message names the file, the field, and the expected and actual
    values."""


class CertificateError(BundleError):
    """Raised for a bundle whose only fault is its certificate. The service can serve it as uncertified."""


class BundleExistsError(BundleError):
    """Raised if the path of a new bundle already exists and may not be replaced. `replaceable` says whether
    `replace=True` would allow the write."""

    def __init__(self, message: str, replaceable: bool = True) -> None:
        super().__init__(message)
        self.replaceable = replaceable


def open_regular(path: Path) -> BufferedReader:
    """Opens a file of a bundle. A symbolic link is followed. Raises BundleError if the file is missing, cannot be
    opened, or is not a regular file: reading a FIFO or a device may block forever."""
    try:
        _check_regular(path, path.stat().st_mode)  # opening a device may already have an effect
        # Without O_NONBLOCK, opening a FIFO that has replaced the file meanwhile would block.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except FileNotFoundError as error:
        raise BundleError(f"{path}: the file is missing") from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        _check_regular(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise BundleError(f"{path}: must be a regular file, or a link to one, but is {_KINDS.get(stat.S_IFMT(mode))}")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def manifest_bytes(path: Path) -> bytes:
    """Returns the contents of a bundle's manifest. Raises BundleError if it cannot be read or is longer than
    MANIFEST_BYTES."""
    with open_regular(path / MANIFEST) as file:
        try:
            raw = file.read(MANIFEST_BYTES + 1)
        except OSError as error:
            raise BundleError(f"{path / MANIFEST}: cannot be read: {error.strerror}") from error
    if len(raw) > MANIFEST_BYTES:
        raise BundleError(f"{path / MANIFEST}: has more than {MANIFEST_BYTES} bytes")
    return raw


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of the bundle in the folder `path`. Raises BundleError."""
    return parse_manifest(path, manifest_bytes(path))


def parse_manifest(path: Path, contents: bytes) -> Manifest:
    """Returns the manifest with these contents. Raises BundleError. `path`: the bundle's folder, for the message."""
    file = path / MANIFEST
    try:
        raw = json.loads(contents.decode())
    # ValueError is also raised for invalid UTF-8 and for very long integers.
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: cannot be read as JSON: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BundleError(
            f"{file}: written by a newer version of Wane: schema_version is {version}, but this version reads up to "
            f"{SCHEMA_VERSION}"
        )
    if isinstance(version, int) and not isinstance(version, bool) and 1 <= version < OLDEST_SCHEMA:
        raise BundleError(
            f"{file}: written by an older version of Wane: schema_version is {version}, but this version reads "
            f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}: export the bundle again"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, problem['loc'])) or 'manifest'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise BundleError(f"{file}: {'; '.join(problems)}") from error


def check_unknown(path: Path, manifest: Manifest, vocabulary: Vocabulary) -> None:
    """Raises BundleError if the manifest's `unknown` does not fit the vocabulary."""
    unknown, kind = manifest.unknown, vocabulary.kind
    if unknown == "skip" and kind != "events":
        raise BundleError(f"{path / MANIFEST}: unknown: 'skip' needs a vocabulary of kind 'events', not {kind!r}")
    if unknown == "token" and kind == "events" and vocabulary.unk_id is None:
        raise BundleError(f"{path / MANIFEST}: unknown: 'token' needs the token {UNK}, which the vocabulary lacks")


def check_names(path: Path, manifest: Manifest) -> None:
    """Raises BundleError unless every file that the manifest names has a hash and a plain name, every role has a graph,
    and the opset is supported."""
    file = path / MANIFEST
    for name in manifest.files:
        if name in ("", ".", "..", MANIFEST) or Path(name).name != name or "\\" in name or "\0" in name:
            raise BundleError(f"{file}: files: {name!r} is not the plain name of a file in the bundle")
    for role in ROLES:
        if role not in manifest.graphs:
            raise BundleError(f"{file}: graphs: the role {role!r} is missing")
    used = {f"graphs.{role}": name for role, name in manifest.graphs.items()}
    used |= {"weights": manifest.weights, "tokenizer": manifest.tokenizer}
    if manifest.cache is not None and manifest.cache.transitions is not None:
        used["cache.transitions.file"] = manifest.cache.transitions.file
    for field, name in used.items():
        if name not in manifest.files:
            raise BundleError(f"{file}: {field}: {name!r} has no hash in `files`")
    if manifest.opset > NEWEST_OPSET:
        raise BundleError(f"{file}: opset: {manifest.opset} is newer than {NEWEST_OPSET}, the newest supported opset")


def check_hash(path: Path, expected: str) -> None:
    """Raises BundleError unless the file has the expected SHA-256."""
    with open_regular(path) as file:
        try:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    if found != expected:
        raise BundleError(f"{path}: SHA-256 differs: expected {expected}, found {found}")


def read_vocabulary(path: Path, manifest: Manifest) -> Vocabulary:
    file, info = path / manifest.tokenizer, manifest.vocabulary
    try:
        vocabulary = Vocabulary.read(info.kind, file, info.reserved)
    except (ValueError, OSError) as error:
        raise BundleError(f"{file}: {error}") from error
    for field, expected, found in (
        ("vocabulary.sha256", info.sha256, vocabulary.sha256),
        ("vocabulary.size", info.size, vocabulary.size),
        ("vocabulary.eos_id", info.eos_id, vocabulary.eos_id),
    ):
        if expected != found:
            raise BundleError(f"{file}: {field}: the manifest says {expected}, the file has {found}")
    check_unknown(path, manifest, vocabulary)
    return vocabulary


def check_certificate(path: Path, claimed: Certificate, computed: Certificate) -> None:
    """Raises CertificateError if the claimed certificate differs from the computed one. The message names the field and
    both values."""
    names = Certificate.model_fields
    # The message names the first difference, so the layers, which determine all other fields, come first.
    for name in sorted(names, key=lambda name: (name != "layers", name == "reason")):
        _check_alike(f"{path / MANIFEST}: certificate.{name}", getattr(claimed, name), getattr(computed, name))


def _check_alike(where: str, claimed: object, computed: object) -> None:
    """Compares two values recursively. Numbers may differ within the tolerances, all other values must be equal. Raises
    CertificateError."""
    if isinstance(claimed, Frozen) and isinstance(computed, Frozen):
        for name in type(computed).model_fields:
            _check_alike(f"{where}.{name}", getattr(claimed, name), getattr(computed, name))
    elif isinstance(claimed, dict) and isinstance(computed, dict) and claimed.keys() == computed.keys():
        for name in computed:
            _check_alike(f"{where}.{name}", claimed[name], computed[name])
    elif isinstance(claimed, tuple) and isinstance(computed, tuple):
        if len(claimed) != len(computed):
            raise CertificateError(f"{where}: {len(claimed)} entries claimed, the weights give {len(computed)}")
        for index, (stated, found) in enumerate(zip(claimed, computed, strict=True)):
            _check_alike(f"{where}.{index}", stated, found)
    elif isinstance(claimed, float) and isinstance(computed, float):
        tolerance = WEIGHT_TOLERANCE if ".weights." in where else CERTIFICATE_TOLERANCE
        if not isclose(claimed, computed, rel_tol=tolerance):
            raise CertificateError(f"{where}: {claimed!r} claimed, the weights give {computed!r}")
    elif claimed != computed:
        raise CertificateError(f"{where}: {claimed!r} claimed, the weights give {computed!r}")
