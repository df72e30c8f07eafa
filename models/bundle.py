"""A bundle is a directory of data files with everything that the service needs to run a model.

    manifest.json  weights.safetensors  tokenizer.json  step.onnx  window.onnx  advance.onnx  scan.onnx  head.onnx

`Bundle.read` checks every file's hash, the weights' shapes and the vocabulary, and recomputes the certificate.
`verify_graphs` compares the graphs' outputs with those of the numpy oracle. Name, version, description, quality and
provenance cannot be checked. The service reports them as claims.

The graphs of a bundle may be imported (`models/imported/`). The meaning of their weights is not known, so that there is
no oracle and no certificate.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wane.models.bundle_checks import (
    MANIFEST,
    BundleError,
    BundleExistsError,
    CertificateError,
    check_certificate,
    check_hash,
    check_names,
    read_manifest,
    read_vocabulary,
)
from wane.models.certificate import certify
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.layers import build_layers
from wane.models.certificate.propagation import Propagation
from wane.models.certificate.request import RequestBound
from wane.models.certificate.rounding import of_finite
from wane.models.manifest import Certificate, Manifest, Quality, Role
from wane.models.parity import ParityError, RoundingError, Run, StepGraph, check_graphs
from wane.models.reference import Reference, State
from wane.models.transitions import Transitions, TransitionsError
from wane.models.vocabulary import Vocabulary
from wane.models.weights import WeightsError, check_weights, decode_weights

__all__ = [
    "Bundle",
    "BundleError",
    "BundleExistsError",
    "CertificateError",
    "check_place",
    "verify_graphs",
    "write_bundle",
]

PROBE_LENGTHS = (24, 1, 17)
"""The lengths of the token sequences on which `verify_graphs` runs the graphs. All lengths differ, and one is 1."""

BEYOND_FRONT = 16
"""The longest sequence in `verify_graphs` has at least this many tokens more than the `reach` of the convolution
blocks. The `window` graph's radius for this sequence depends on the gates at these additional tokens. Without them, the
check would not cover the gates' effect on the radius."""

ROUNDING_SCHEMA = 5
"""The oldest schema whose certificates bound the rounding of every answer. An older contractive bundle is served as
uncertified."""

QUANTISED = Certificate(
    contractive=False, reason="its graphs multiply in int8, and what is proved is of the float32 weights", layers=()
)
"""The certificate of a bundle whose graphs multiply in int8."""


IMPORTED = Certificate(
    contractive=False,
    reason="it is an imported graph: its layers are not known, so nothing is proved about it. error_bound is null "
    "where tokens were left out, auto runs all tokens, and a lost state is rebuilt from the whole kept history",
    layers=(),
)
"""The certificate of an imported graph. The reason says what the model lacks."""


LARGEST_TRANSITIONS = 1 << 26
"""The largest size of the file of transition tables, in bytes. In memory the tables take three times as much."""


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. Its weights are read from the file once, and the proofs of its layers are computed once."""

    path: Path
    manifest: Manifest
    vocabulary: Vocabulary

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Reads a bundle and verifies everything except the graphs' arithmetic. Raises BundleError."""
        bundle = cls.open(path)
        bundle.verify_certificate()
        return bundle

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Like `read`, but does not check the certificate, which `verify_certificate` does. Raises BundleError."""
        manifest = read_manifest(path)
        check_names(path, manifest)
        for name, expected in sorted(manifest.files.items()):
            check_hash(path / name, expected)
        bundle = cls(path, manifest, read_vocabulary(path, manifest))
        if manifest.imported:
            _check_imported(path, manifest)
        else:
            bundle.weights()
            bundle.transitions()
        return bundle

    def verify_certificate(self) -> None:
        """Recomputes the certificate from the weights. Raises CertificateError if it differs from the manifest's."""
        claimed = self.manifest.certificate
        if self.manifest.imported:
            check_certificate(self.path, claimed, IMPORTED)
            return
        if self.manifest.precision != "float32":
            check_certificate(self.path, claimed, QUANTISED)
            return
        if claimed.rounding is not None and self.manifest.schema_version < ROUNDING_SCHEMA:
            raise CertificateError(
                f"{self.path}: its rounding was measured by an earlier version of Wane, on sequences that do not show "
                f"the largest rounding: write it again with `wane export {self.path}`"
            )
        architecture, max_window = self.manifest.architecture, self.manifest.max_window
        computed = certify(architecture, self._weights, max_window, claimed.rounding, self._layers)
        check_certificate(self.path, claimed, computed)

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors of the weights file by name; none for an imported graph, whose weights have no known
        meaning. Raises BundleError if their names or shapes do not fit the architecture."""
        return {} if self.manifest.imported else dict(self._weights)

    def transitions(self) -> Transitions | None:
        """Returns the transition tables, None for a model without them. Raises BundleError if the file is invalid."""
        return self._transitions

    def request_bound(self) -> RequestBound:
        """Returns the object that bounds the distance between the hidden state at the end of a window and the hidden
        state of any uninterrupted run that ends with the same tokens."""
        return self._request_bound

    def propagation(self) -> Propagation | None:
        """Returns the object that bounds how errors of the state propagate along a sequence. Returns None if a layer is
        not contractive, or if nothing bounds the rounding."""
        architecture, certificate = self.manifest.architecture, self.manifest.certificate
        if not certificate.has_rounding:
            return None
        return Propagation(architecture, self._weights, self._layers, certificate.states_apart)

    def finite_rounding(self) -> float | None:
        """Returns the bound of the rounding of a model of layers with finite memory alone, None for other models, and
        for graphs of another precision than float32. See `Certificate.of_finite`."""
        manifest = self.manifest
        if manifest.imported or manifest.precision != "float32" or manifest.architecture.fading:
            return None
        return of_finite(manifest.architecture, self._weights, manifest.certificate.head_diameter)

    def graph_path(self, role: Role) -> Path:
        """Returns the path of the ONNX file of one of the graphs."""
        return self.path / self.manifest.graphs[role]

    @cached_property
    def _weights(self) -> dict[str, NDArray[np.float32]]:
        path = self.path / self.manifest.weights
        try:
            weights = decode_weights(path.read_bytes())
            check_weights(self.manifest.architecture, weights)
        except WeightsError as error:
            raise BundleError(f"{path}: {error}") from error
        return weights

    @cached_property
    def _transitions(self) -> Transitions | None:
        cache = self.manifest.cache
        if cache is None or cache.transitions is None:
            return None
        path = self.path / cache.transitions.file
        if (size := path.stat().st_size) > LARGEST_TRANSITIONS:
            raise BundleError(f"{path}: {size} bytes of transition tables, at most {LARGEST_TRANSITIONS} are allowed")
        try:
            tensors = decode_weights(path.read_bytes())
            return Transitions.read(cache.transitions.weights, tensors, self.manifest.vocabulary.size)
        except (WeightsError, TransitionsError) as error:
            raise BundleError(f"{path}: {error}") from error

    @cached_property
    def _layers(self) -> list[Layer]:
        return build_layers(self.manifest.architecture, self._weights)

    @cached_property
    def _request_bound(self) -> RequestBound:
        return RequestBound(self.manifest.architecture, self._weights, self._layers)


def _check_imported(path: Path, manifest: Manifest) -> None:
    """Checks the graphs of an imported model before onnxruntime opens them. Raises BundleError."""
    if find_spec("onnx") is None:
        raise BundleError(
            f"{path}: its graphs are imported. Their operators are checked with the package onnx, which is not "
            "installed: in the checkout of Wane, run pip install '.[onnx]'"
        )
    from wane.models.imported.roles import check_roles

    check_roles(path, manifest)


def verify_graphs(bundle: Bundle, run: Run) -> float:
    """Compares every graph's outputs with those of the numpy oracle, on random tokens, from the zero state and from
    random states. An imported graph has no oracle: its graphs are compared with its `step` graph.

    `run(role, feeds)` runs one graph. Returns the largest difference. Raises BundleError if the difference exceeds the
    tolerance. Raises CertificateError if the difference is within the tolerance but exceeds the rounding that the
    certificate states.
    """
    generator = np.random.default_rng(0)
    imported = bundle.manifest.imported
    architecture = bundle.manifest.architecture
    reference = StepGraph(architecture, run) if imported else Reference(architecture, bundle.weights())
    lengths = np.array(PROBE_LENGTHS, dtype=np.int64)
    if reach := architecture.reach:
        lengths[0] = max(lengths[0], reach + BEYOND_FRONT)
    tokens = generator.integers(bundle.vocabulary.size, size=(len(lengths), lengths.max()), dtype=np.int64)
    zeros = reference.zero_state(len(lengths))
    start: State = {name: generator.uniform(-1, 1, value.shape) for name, value in zeros.items()}
    try:
        if imported:  # some states of a graph can not be reached, and need not be finite one step later
            start = reference.advance(tokens[:, 1], reference.advance(tokens[:, 0], zeros)[1])[1]
        manifest = bundle.manifest
        bound = None if imported else bundle.request_bound
        return check_graphs(reference, run, tokens, lengths, start, manifest.certificate, bound, manifest.precision)
    except RoundingError as error:
        raise CertificateError(f"{bundle.path}: {error}") from error
    except ParityError as error:
        raise BundleError(f"{bundle.path}: {error}") from error


def check_place(path: Path, version: str, quality: Quality | None, replace: bool) -> None:
    """Raises BundleExistsError if a bundle of this version and quality may not be written to `path`.

    A bundle of a lower version may be replaced. Any other bundle may be replaced only if `replace` is true. A file or
    folder that is not a bundle is never replaced.
    """
    path = path.resolve()
    if not path.exists():
        return
    if not (path / MANIFEST).exists():
        raise BundleExistsError(f"the existing file or folder is not a bundle: it has no {MANIFEST}", replaceable=False)
    if replace:
        return
    try:
        existing = read_manifest(path)
    except BundleError as error:
        raise BundleExistsError(f"the existing bundle cannot be read: {error}") from error
    if int(existing.version) < int(version):
        return
    raise BundleExistsError(
        f"a bundle already exists: version {existing.version}, {_describe(existing.quality)}; "
        f"the new bundle: version {version}, {_describe(quality)}"
    )


def _describe(quality: Quality | None) -> str:
    """Returns a text with the recurrent perplexity per token of the validation split, or of the first split if there is
    no validation split."""
    if quality is None or not quality.recurrent:
        return "not evaluated"
    if (valid := quality.recurrent.get("valid")) is not None:
        return f"validation perplexity {valid.per_token:.3f}"
    split, perplexity = next(iter(quality.recurrent.items()))
    return f"perplexity {perplexity.per_token:.3f} ({split})"


def write_bundle(
    path: Path,
    manifest: Manifest,
    files: Mapping[str, bytes],
    check: Callable[[Bundle], None],
    *,
    replace: bool = False,
) -> Manifest:
    """Writes and checks a bundle atomically. Returns the manifest as written.

    `files` maps the names of the manifest's files to their contents. The files' hashes are added to the manifest. The
    new bundle is read back and passed to `check`, whose exceptions are not caught. It is then moved to `path`. If
    `path` is a symbolic link, the bundle that it points to is replaced.

    Raises BundleExistsError if the bundle at `path` may not be replaced (`replace`: see `check_place`). If writing
    fails, the bundle at `path` stays unchanged.
    """
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    manifest = manifest.model_copy(update={"files": hashes})
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        building = Path(temporary) / path.name
        building.mkdir()
        for name, data in files.items():
            (building / name).write_bytes(data)
        text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
        (building / MANIFEST).write_text(text + "\n", encoding="utf-8")
        check(Bundle.read(building))
        check_place(path, manifest.version, manifest.quality, replace)
        _replace(path, building, Path(temporary) / "replaced")
    return manifest


def _replace(path: Path, building: Path, replaced: Path) -> None:
    """Moves the bundle at `path` to `replaced`, then moves `building` to `path`. If the second move fails, moves the
    old bundle back to `path`."""
    try:
        if path.exists():
            path.rename(replaced)
        building.rename(path)
    except BaseException:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise
