"""Tests of certified models in which rounding opens a gate that is closed in exact arithmetic.

The gates read the sum of the outputs of a LayerNorm. This sum is 0 in exact arithmetic. After a token whose embedding
has a large mean, rounding makes it large enough for weights of 4e6 to open the gates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.bundles import export_words
from wane.models.architecture import Architecture
from wane.models.bundle import Bundle
from wane.models.export.parity import OnnxGraphs
from wane.models.weights import weight_shapes
from wane.service.engine.bounds import bound
from wane.service.engine.top1_proof import MarginProof

SIZE, HIDDEN = 3000, 8
BEFORE, OPENING = SIZE - 1, SIZE - 2
"""The token whose state the cut removes, and the token that opens the gates."""

GATED = {"kind": "gated", "block": "residual", "units": 4, "gate_cap": 0.97}
LEAKY = {"kind": "leaky", "block": "residual", "units": 2, "gate_cap": 0.5}


def probabilities(logits: NDArray[Any]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(values / values.sum(), np.float64)


def opened(layers: list[dict[str, object]]) -> tuple[Architecture, dict[str, NDArray[np.float32]]]:
    architecture = Architecture.model_validate(
        {"vocabulary_size": SIZE, "embedding": HIDDEN, "tied": False, "norm_epsilon": 1.0, "layers": layers}
    )
    weights = {name: np.zeros(shape, np.float32) for name, shape in weight_shapes(architecture).items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name][:] = 1
    signs = np.array([[(-1) ** bin(row & column).count("1") for column in range(8)] for row in range(8)]) / np.sqrt(8)
    _, apart, first, second, read, third = signs[:6]
    random = np.random.default_rng(0)
    embedding = sum(random.normal(size=(SIZE, 1)) * each for each in (first, third, second)).astype(np.float32)
    embedding[BEFORE] = 6 * read
    embedding[OPENING] = 70 + 3 * apart
    embedding[OPENING, 0] += 3 * np.spacing(np.float32(70))
    weights["embedding.weight"] = embedding
    layer = f"layers.{len(layers) - 1}."
    weights[layer + "cell.weight"][:4] = 4e6
    weights[layer + "cell.bias"][:4] = -20
    weights[layer + "cell.weight"][4:] = read
    weights[layer + "mix.weight"][:] = (0.5 * read)[:, None]
    weights["head.weight"][5], weights["head.weight"][6] = 2 * read, -2 * read
    weights["head.bias"][:] = -20
    weights["head.bias"][5:7] = 0, 0.3
    return architecture, weights


@pytest.mark.parametrize(
    "layers", [[GATED | {"candidate": "identity"}], [LEAKY, GATED], [GATED]], ids=["identity", "two layers", "tanh"]
)
def test_the_bound_holds_when_rounding_opens_a_gate(tmp_path: Path, layers: list[dict[str, object]]) -> None:
    architecture, weights = opened(layers)
    sample = np.random.default_rng(0).integers(20, OPENING, size=400).tolist()
    export_words(tmp_path / "m", architecture, weights, window=64, max_window=256, sample_tokens=sample)
    bundle = Bundle.read(tmp_path / "m")
    run, certificate, margin = OnnxGraphs(bundle).run, bundle.manifest.certificate, MarginProof(weights)
    assert certificate.contractive
    for k in (20, 40):
        tail = [OPENING] * k
        whole, window = (
            run("window", {"tokens": np.array([tokens]), "lengths": np.array([len(tokens)])})
            for tokens in ([30] * 5 + [BEFORE] * 3 + tail, tail)
        )
        norms = window["norms"][0].tolist() if "norms" in window else None
        found = bound(certificate, k, k + 8, None, norms)
        assert found is not None
        apart = np.abs(probabilities(whole["logits"][0]) - probabilities(window["logits"][0])).sum() / 2
        assert apart > 0.2, "rounding opens no gate, so this test checks nothing"
        assert apart <= found.variation
        first, hidden = int(window["logits"][0].argmax()), window["hidden"][0]
        proved = found.runs is not None and margin.has_no_rival(window["logits"][0], hidden, found.runs, first)
        assert not proved or whole["logits"][0].argmax() == first
