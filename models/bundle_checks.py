"""What is checked of a bundle's files before anything is made of them."""

from __future__ import annotations

import hashlib
import json
from math import isclose
from pathlib import Path

from pydantic import ValidationError

from models.manifest import SCHEMA_VERSION, Certificate, Manifest, Role
from models.vocabulary import Vocabulary

MANIFEST = "manifest.json"
ROLES: tuple[Role, ...] = ("step", "window", "advance", "scan", "head")

NEWEST_OPSET = 21
"""The newest ONNX opset that the oldest supported onnxruntime (1.20) runs."""

CERTIFICATE_TOLERANCE = 1e-9
"""Relative: how far a recomputed factor may be from the manifest's."""

WEIGHT_TOLERANCE = 1e-6
"""Relative, for a norm's weights: where an LSTM hardly recurs they magnify the rounding of what they come from."""


class BundleError(Exception):
    """A bundle that cannot be served; the message names the file, the field, what was expected and what was found."""


class CertificateError(BundleError):
    """A bundle whose certificate does not hold, though all else does: it can be served as uncertified."""


def read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BundleError(f"{file}: the file is missing") from error
    except (OSError, ValueError, RecursionError) as error:  # also bytes that are no UTF-8, and integers of many digits
        raise BundleError(f"{file}: cannot be read as JSON: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BundleError(
            f"{file}: written by a newer Wane (schema_version {version}, this one reads {SCHEMA_VERSION})"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, problem['loc'])) or 'manifest'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise BundleError(f"{file}: {'; '.join(problems)}") from error


def check_names(path: Path, manifest: Manifest) -> None:
    """Every file that is used is hashed, every name is a plain one, every role has a graph."""
    file = path / MANIFEST
    for name in manifest.files:
        if name in ("", ".", "..", MANIFEST) or Path(name).name != name or "\\" in name or "\0" in name:
            raise BundleError(f"{file}: files: {name!r} is not the plain name of a file in the bundle")
    for role in ROLES:
        if role not in manifest.graphs:
            raise BundleError(f"{file}: graphs: the role {role!r} is missing")
    used = {f"graphs.{role}": name for role, name in manifest.graphs.items()}
    used |= {"weights": manifest.weights, "tokenizer": manifest.tokenizer}
    for field, name in used.items():
        if name not in manifest.files:
            raise BundleError(f"{file}: {field}: {name!r} has no hash in files")
    if manifest.opset > NEWEST_OPSET:
        raise BundleError(f"{file}: opset: {manifest.opset} is newer than {NEWEST_OPSET}, the newest that runs here")


def check_hash(path: Path, expected: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise BundleError(f"{path}: the file is missing") from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    if found != expected:
        raise BundleError(f"{path}: SHA-256 differs: expected {expected}, found {found}")


def read_vocabulary(path: Path, manifest: Manifest) -> Vocabulary:
    file, info = path / manifest.tokenizer, manifest.vocabulary
    try:
        vocabulary = Vocabulary.read(info.kind, file)
    except (ValueError, OSError) as error:
        raise BundleError(f"{file}: {error}") from error
    for field, expected, found in (
        ("vocabulary.sha256", info.sha256, vocabulary.sha256),
        ("vocabulary.size", info.size, vocabulary.size),
        ("vocabulary.eos_id", info.eos_id, vocabulary.eos_id),
    ):
        if expected != found:
            raise BundleError(f"{file}: {field}: the manifest says {expected}, the file has {found}")
    return vocabulary


def check_certificate(path: Path, claimed: Certificate, computed: Certificate) -> None:
    """Refuses a manifest whose certificate is not what its weights give."""
    where = f"{path / MANIFEST}: certificate"
    if len(claimed.layers) != len(computed.layers):
        raise CertificateError(
            f"{where}.layers: {len(claimed.layers)} claimed, the weights have {len(computed.layers)}"
        )
    for index, (told, found) in enumerate(zip(claimed.layers, computed.layers, strict=True)):
        if not isclose(told.factor, found.factor, rel_tol=CERTIFICATE_TOLERANCE):
            raise CertificateError(
                f"{where}.layers.{index}.factor: {told.factor!r} claimed, the weights give {found.factor!r}"
            )
        for field in ("layer", "rule", "norm"):
            if getattr(told, field) != getattr(found, field):
                raise CertificateError(
                    f"{where}.layers.{index}.{field}: {getattr(told, field)!r} claimed, "
                    f"the weights give {getattr(found, field)!r}"
                )
        if len(told.weights) != len(found.weights) or not all(
            isclose(one, other, rel_tol=WEIGHT_TOLERANCE)
            for one, other in zip(told.weights, found.weights, strict=True)
        ):
            raise CertificateError(
                f"{where}.layers.{index}.weights: {told.weights!r} claimed, the weights give {found.weights!r}"
            )
    if claimed.contractive != computed.contractive:
        raise CertificateError(
            f"{where}.contractive: {claimed.contractive} claimed, the weights give {computed.contractive}"
        )
