"""Exports trained weights as a bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from pydantic import ValidationError

from wane.models.architecture import Architecture
from wane.models.bundle import QUANTISED, Bundle, write_bundle
from wane.models.certificate import certify
from wane.models.certificate.layers import build_layers
from wane.models.certificate.request import RequestBound
from wane.models.certificate.total_variation import head_diameter
from wane.models.export.graph import OPSET
from wane.models.export.parity import ExportError, OnnxGraphs, check_bundle
from wane.models.export.radius import has_radius
from wane.models.export.roles import build_graphs
from wane.models.export.rounding import measure_rounding
from wane.models.manifest import (
    SCHEMA_VERSION,
    CacheModel,
    Manifest,
    Precision,
    Provenance,
    Quality,
    Role,
    Start,
    Unknown,
    VocabularyInfo,
    VocabularyKind,
)
from wane.models.networks import Network
from wane.models.parity import RADIUS, Run
from wane.models.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, tokenizer_config, with_decoder
from wane.models.transitions import Transitions
from wane.models.vocabulary import Vocabulary
from wane.models.weights import Weights, WeightsError, check_weights, encode_weights, head_weight, tensor_extents

WEIGHTS = "weights.safetensors"

RANDOM_SAMPLE = 512
"""The number of random tokens with which a bundle that is exported again is checked."""


def export_bundle(
    directory: Path,
    *,
    architecture: Architecture,
    weights: Weights,
    vocabulary_kind: VocabularyKind,
    tokenizer_json: str,
    name: str,
    version: str,
    description: str,
    window: int,
    max_window: int,
    quality: Quality | None,
    provenance: Provenance,
    sample_tokens: list[int],
    torch_network: Network | None = None,
    precision: Precision = "float32",
    replace: bool = False,
    cache: CacheModel | None = None,
    transitions: Transitions | None = None,
    unknown: Unknown = "refuse",
    start: Start = "token",
    reserved: Iterable[int] | None = None,
) -> Manifest:
    """Writes the bundle `directory` after checking that its graphs, the oracle and `torch_network` agree.

    `weights` maps the names of `models/weights.py` to float32 tensors. `sample_tokens` is real text for the parity
    check. `precision` is the number format of the products with weights. int8 graphs are faster, but their results
    differ slightly, and they have no certificate. `cache` is the cache language model that the server mixes with the
    network, and `transitions` the tables of a cache that has them. `unknown` is what the server does with a word or an
    event that the vocabulary lacks. `start` is what the model reads first: `<eos>`, or the first token of the sequence
    (see `Start`). `reserved`: see `Vocabulary`. `replace` allows the replacement of a bundle of the same or a higher
    version.

    Raises BundleExistsError if an existing bundle may not be replaced. Raises ExportError if the arguments do not fit
    together, or if the graphs, the oracle and `torch_network` differ. On an error nothing is written.
    """
    tokenizer_json = with_decoder(vocabulary_kind, tokenizer_json)
    vocabulary = Vocabulary(vocabulary_kind, tokenizer_json, reserved)
    try:
        check_weights(architecture, weights)
    except WeightsError as error:
        raise ExportError(str(error)) from error
    _check_sample(sample_tokens, vocabulary.size)
    weights_data = encode_weights(weights)
    exact = precision == "float32"
    request = _request_bound(architecture, weights, sample_tokens, max_window) if exact else None
    graphs = build_graphs(architecture, WEIGHTS, tensor_extents(weights_data), request, precision)
    certificate = QUANTISED
    if exact:
        layers = build_layers(architecture, weights)
        diameter = head_diameter(head_weight(weights).astype(np.float64))
        with opened_step(graphs["step"], weights_data) as run:
            rounding = measure_rounding(architecture, weights, layers, run, diameter, sample_tokens)
        certificate = certify(architecture, weights, max_window, rounding, layers)
    try:
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            name=name,
            version=version,
            description=description,
            architecture=architecture,
            vocabulary=_vocabulary_info(vocabulary),
            unknown=unknown,
            start=start,
            state=architecture.state_tensors(),
            window=window,
            max_window=max_window,
            opset=OPSET,
            precision=precision,
            graphs=_file_names(graphs),
            weights=WEIGHTS,
            tokenizer=TOKENIZER,
            files={},
            certificate=certificate,
            cache=cache,
            quality=quality,
            provenance=provenance,
        )
    except ValidationError as error:
        raise ExportError(f"the manifest would be invalid: {error}") from error
    files = _files(graphs, weights_data, vocabulary, tokenizer_json)
    if cache is not None and cache.transitions is not None:
        assert transitions is not None, "the tables of the cache are missing: this is a bug"
        files[cache.transitions.file] = encode_weights(transitions.tensors())

    def check(bundle: Bundle) -> None:
        check_bundle(bundle, sample_tokens, torch_network)

    return write_bundle(directory, manifest, files, check, replace=replace)


def export_again(
    directory: Path,
    source: Bundle,
    *,
    version: str,
    precision: Precision | None = None,
    cache: CacheModel | None = None,
    quality: Quality | None = None,
    replace: bool = False,
) -> Manifest:
    """Writes the bundle `directory` with the weights of `source`. The graphs and all other files are built by this
    version of Wane.

    The certificate is computed again, with the measured errors of one step of `source`. They are measured if `source`
    does not have them. The provenance stays that of `source`. `precision`, `cache` and `quality`: None means the value
    of `source`. If a float32 bundle is exported in int8, the new bundle has no certificate, its name is that of
    `directory`, and None for `quality` means no quality. `replace` and the errors are those of `export_bundle`.
    """
    before = source.manifest
    precision = precision or before.precision
    if precision != before.precision and precision == "float32":
        raise ExportError(
            f"{source.path} is an int8 bundle. It cannot be exported in float32, because it has no certificate of its "
            "float32 weights: export the run folder instead"
        )
    quantised = precision != before.precision
    tokenizer_json = with_decoder(before.vocabulary.kind, (source.path / before.tokenizer).read_text(encoding="utf-8"))
    vocabulary = Vocabulary(before.vocabulary.kind, tokenizer_json, before.vocabulary.reserved)
    weights_data = encode_weights(source.weights())
    architecture, weights = before.architecture, source.weights()
    bounded = precision == "float32" and _has_radius(source) and _may_have_radius(architecture)
    request = source.request_bound() if bounded else None
    graphs = build_graphs(before.architecture, WEIGHTS, tensor_extents(weights_data), request, precision)
    sample = np.random.default_rng(0).integers(vocabulary.size, size=RANDOM_SAMPLE)
    certificate = QUANTISED
    if precision == "float32":
        layers = build_layers(architecture, weights)
        rounding = before.certificate.rounding
        if rounding is None or rounding.sequences != "all":
            diameter = head_diameter(head_weight(weights).astype(np.float64))
            with opened_step(graphs["step"], weights_data) as run:
                rounding = measure_rounding(architecture, weights, layers, run, diameter, sample.tolist())
        certificate = certify(architecture, weights, before.max_window, rounding, layers)
    manifest = before.model_copy(
        update={
            "schema_version": SCHEMA_VERSION,
            "name": directory.name if quantised else before.name,
            "version": version,
            "vocabulary": _vocabulary_info(vocabulary),
            "opset": OPSET,
            "precision": precision,
            "graphs": _file_names(graphs),
            "weights": WEIGHTS,
            "tokenizer": TOKENIZER,
            "certificate": certificate,
            "cache": cache or before.cache,
            "quality": quality or (None if quantised else before.quality),
        }
    )

    def check(bundle: Bundle) -> None:
        check_bundle(bundle, sample.tolist(), None)

    files = _files(graphs, weights_data, vocabulary, tokenizer_json)
    if manifest.cache is not None and manifest.cache.transitions is not None:
        name = manifest.cache.transitions.file
        files[name] = (source.path / name).read_bytes()
    return write_bundle(directory, manifest, files, check, replace=replace)


def _has_radius(bundle: Bundle) -> bool:
    graph = onnx.load(bundle.graph_path("window"), load_external_data=False).graph
    return any(output.name == RADIUS for output in graph.output)


def _may_have_radius(architecture: Architecture) -> bool:
    """Returns whether a `window` graph of the architecture can have a radius that also bounds the rounding. In a
    residual network with several layers, rounding changes the gates of the higher layers."""
    if architecture.residual and len(architecture.fading) > 1:
        return False
    return has_radius(architecture)


def _vocabulary_info(vocabulary: Vocabulary) -> VocabularyInfo:
    """Returns the manifest's part on the vocabulary. It lists the reserved tokens, unless there are none and none would
    be reserved by their names."""
    return VocabularyInfo(
        kind=vocabulary.kind,
        size=vocabulary.size,
        eos_id=vocabulary.eos_id,
        sha256=vocabulary.sha256,
        reserved=tuple(sorted(vocabulary.reserved)) if vocabulary.reserved or vocabulary.has_special else None,
    )


def _file_names(graphs: Mapping[Role, bytes]) -> dict[Role, str]:
    return {role: f"{role}.onnx" for role in graphs}


def _files(
    graphs: Mapping[Role, bytes], weights_data: bytes, vocabulary: Vocabulary, tokenizer_json: str
) -> dict[str, bytes]:
    """Returns every file of a bundle except the manifest, by name."""
    names = _file_names(graphs)
    files = {names[role]: data for role, data in graphs.items()}
    files |= {WEIGHTS: weights_data, TOKENIZER: tokenizer_json.encode()}
    files[TOKENIZER_CONFIG] = tokenizer_config(vocabulary).encode()
    return files


def _request_bound(
    architecture: Architecture, weights: Weights, tokens: list[int], max_window: int
) -> RequestBound | None:
    """Returns the bound from which the window graph's radius is built, or None if the graph is to have no radius.

    A radius exists only for input-gated cells, and in residual networks only for one layer. It is not worth its
    computing time if the radius of a window of `max_window` tokens is at least half the radius of a window of one
    token.
    """
    if not _may_have_radius(architecture):
        return None
    request, window = RequestBound(architecture, weights), np.array([tokens[-max_window:]])
    return request if request(window).radius[0] < request(window[:, -1:]).radius[0] / 2 else None


@contextmanager
def opened_step(step: bytes, weights_data: bytes) -> Iterator[Run]:
    """Opens the `step` graph in a temporary directory, because the bundle's directory does not exist yet. Yields the
    function that runs the graph."""
    with tempfile.TemporaryDirectory() as directory:
        graph = Path(directory) / "step.onnx"
        graph.write_bytes(step)
        graph.with_name(WEIGHTS).write_bytes(weights_data)
        yield OnnxGraphs.at({"step": graph}).run


def _check_sample(tokens: list[int], size: int) -> None:
    if not tokens:
        raise ExportError("sample_tokens is empty: the parity check needs real tokens")
    for position, token in enumerate(tokens):
        if not 0 <= token < size:
            raise ExportError(f"sample_tokens[{position}] is {token}, but the vocabulary has {size} tokens")
