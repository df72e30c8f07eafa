"""Exports trained weights as a bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from wane.models.bundle import QUANTISED, Bundle, write_bundle
from wane.models.cell_registry import CELLS
from wane.models.certificate import certify
from wane.models.certificate.layers import build_layers
from wane.models.certificate.request import RequestBound
from wane.models.certificate.total_variation import head_diameter
from wane.models.export.graph import OPSET
from wane.models.export.parity import ExportError, OnnxGraphs, check_bundle
from wane.models.export.roles import build_graphs
from wane.models.export.rounding import measure_rounding
from wane.models.manifest import (
    SCHEMA_VERSION,
    Architecture,
    CacheModel,
    Manifest,
    Precision,
    Provenance,
    Quality,
    Role,
    VocabularyInfo,
    VocabularyKind,
)
from wane.models.networks import Network
from wane.models.parity import Run
from wane.models.vocabulary import Vocabulary
from wane.models.weights import Weights, WeightsError, check_weights, encode_weights, head_weight, tensor_extents

WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer.json"


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
) -> Manifest:
    """Writes the bundle `directory` after checking that its graphs, the oracle and `torch_network` agree.

    `weights` maps the names of `models/weights.py` to float32 tensors. `sample_tokens` is real text for the parity
    check. `precision` is the number format of the products. int8 graphs are faster, slightly different and not
    certified. `cache` is the cache language model that the server mixes with the network. `replace` allows the
    replacement of a bundle of the same or a higher version.

    Raises BundleExistsError if an existing bundle may not be replaced. Raises ExportError if the arguments do not fit
    together, or if the graphs, the oracle and `torch_network` differ. On an error nothing is written.
    """
    vocabulary = Vocabulary(vocabulary_kind, tokenizer_json)
    try:
        check_weights(architecture, weights)
    except WeightsError as error:
        raise ExportError(str(error)) from error
    _check_sample(sample_tokens, vocabulary.size)
    weights_data = encode_weights(weights)
    exact = precision == "float32"
    request = _request_bound(architecture, weights, sample_tokens, max_window) if exact else None
    graphs = build_graphs(architecture, WEIGHTS, tensor_extents(weights_data), request, precision)
    graph_names: dict[Role, str] = {role: f"{role}.onnx" for role in graphs}
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
            vocabulary=VocabularyInfo(
                kind=vocabulary_kind, size=vocabulary.size, eos_id=vocabulary.eos_id, sha256=vocabulary.sha256
            ),
            state=architecture.state_tensors(),
            window=window,
            max_window=max_window,
            opset=OPSET,
            precision=precision,
            graphs=graph_names,
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
    files = {graph_names[role]: data for role, data in graphs.items()}
    files |= {WEIGHTS: weights_data, TOKENIZER: tokenizer_json.encode()}

    def check(bundle: Bundle) -> None:
        check_bundle(bundle, sample_tokens, torch_network)

    return write_bundle(directory, manifest, files, check, replace=replace)


def _request_bound(
    architecture: Architecture, weights: Weights, tokens: list[int], max_window: int
) -> RequestBound | None:
    """Returns the bound for the window graph's radius, or None if a radius is not worth its cost.

    Cells without a radius have no bound. The radius is not worth its cost if the radius of a window of `max_window`
    tokens is hardly smaller than that of the last token alone.
    """
    if not CELLS[architecture.cell].input_gated:
        return None
    request, window = RequestBound(architecture, weights), np.array([tokens[-max_window:]])
    return request if request(window).radius[0] < request(window[:, -1:]).radius[0] / 2 else None


@contextmanager
def opened_step(step: bytes, weights_data: bytes) -> Iterator[Run]:
    """Opens the `step` graph in a temporary directory. The bundle does not exist yet."""
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
            raise ExportError(f"sample_tokens[{position}] is {token}, the vocabulary has {size} tokens")
