"""Tests that a graph's output `radius` is never below the radius that the oracle (`RequestBound`) computes, and only
little above it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from tests.models.random_models import architecture, random_weights
from wane.models.architecture import Architecture
from wane.models.certificate.request import RequestBound
from wane.models.certificate.top1 import Top1
from wane.models.export.roles import build_graph
from wane.models.reference import Reference
from wane.models.weights import Weights, encode_weights, tensor_extents

FRONT = {"blocks": 2, "kernel_size": 3, "feed_forward": 5}
LENGTHS = np.array([40, 1, 4, 5, 17, 40, 26])
PASTS = 24
CALM = 0.2


def model(front: bool, layers: int, block: str = "residual", feed_forward: int = 7) -> Architecture:
    """Returns the architecture of a gated model that forgets fast."""
    fields: dict[str, object] = {"gate_caps": tuple(0.5 + 0.1 * layer for layer in range(layers))}
    if block == "residual":
        fields |= {"norm_epsilon": 0.25, "feed_forward": feed_forward, "units": 9}
        fields |= {"front": FRONT} if front else {}
    return architecture("gated", block, layers, **fields)


def calm_weights(model: Architecture, seed: int) -> dict[str, NDArray[np.float32]]:
    """Returns random weights with small matrices in the layers, so that each layer amplifies little."""
    weights = random_weights(model, seed)
    for name in weights:
        if name.startswith("layers.") and weights[name].ndim == 2:
            weights[name] *= np.float32(CALM)
    return weights


def run_window(
    path: Path, model: Architecture, weights: Weights, tokens: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, NDArray[np.float32]]:
    data = encode_weights(weights)
    (path / "weights.safetensors").write_bytes(data)
    request = RequestBound(model, weights)
    graph = build_graph("window", model, "weights.safetensors", tensor_extents(data), request)
    (path / "window.onnx").write_bytes(graph)
    session = onnxruntime.InferenceSession(str(path / "window.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"tokens": tokens, "lengths": lengths}), strict=True))


CASES = pytest.mark.parametrize(
    ("front", "layers", "block"),
    [(True, 1, "residual"), (False, 1, "residual"), (True, 3, "residual"), (False, 3, "residual"), (False, 2, "plain")],
)


@CASES
def test_every_radius_is_at_least_the_oracle_s_radius_and_close_to_it(
    tmp_path: Path, front: bool, layers: int, block: str
) -> None:
    net = model(front, layers, block)
    for seed in range(4):
        weights, generator = calm_weights(net, seed), np.random.default_rng(seed)
        tokens = generator.integers(net.vocabulary_size, size=(len(LENGTHS), LENGTHS.max()))
        radii = run_window(tmp_path, net, weights, tokens, LENGTHS)["radius"]
        request = RequestBound(net, weights)
        proved = np.array([request(row[None, :length]).radius[0] for row, length in zip(tokens, LENGTHS, strict=True)])
        assert radii.shape == LENGTHS.shape
        assert (radii >= proved).all()
        assert (radii[LENGTHS.max() == LENGTHS] < radii[1] / 10).all()
        # The graph's bound is close only for windows of more than 4 tokens: for the first 4 tokens, the front also
        # reads tokens before the window. The last term is the rounding of two runs.
        begun = LENGTHS > 4
        assert (radii[begun] <= 100 * proved[begun] + 1e-4).all()


def test_without_blocks_the_radius_equals_the_oracle_s_radius(tmp_path: Path) -> None:
    net = architecture("gated", gate_caps=(0.8,))
    weights = random_weights(net, seed=0)
    tokens = np.random.default_rng(0).integers(net.vocabulary_size, size=(len(LENGTHS), LENGTHS.max()))
    outputs = run_window(tmp_path, net, weights, tokens, LENGTHS)
    request = RequestBound(net, weights)
    for row, length in enumerate(LENGTHS):
        bound = request(tokens[row : row + 1, :length])
        np.testing.assert_allclose(outputs["radius"][row], bound.radius[0], rtol=2e-3, atol=2e-6)
        np.testing.assert_allclose(
            outputs["error.layers.0.s"][row], bound.steps[0].error[0].box[0], rtol=2e-3, atol=2e-6
        )


@CASES
def test_every_past_is_within_the_radius_and_keeps_the_proved_top1(
    tmp_path: Path, front: bool, layers: int, block: str
) -> None:
    net = model(front, layers, block)
    weights, generator = calm_weights(net, seed=1), np.random.default_rng(1)
    tokens = generator.integers(net.vocabulary_size, size=(len(LENGTHS), LENGTHS.max()))
    outputs = run_window(tmp_path, net, weights, tokens, LENGTHS)
    request, reference = RequestBound(net, weights), Reference(net, weights)
    names = [tensor.name for tensor in net.state_tensors()[-layers:]]
    states, errors = ([outputs[prefix + name].astype(np.float64) for name in names] for prefix in ("next.", "error."))
    bound = request.resume(outputs["stream"].astype(np.float64), LENGTHS, states, errors)
    np.testing.assert_allclose(bound.hidden, outputs["hidden"], atol=1e-5)
    assert (bound.radius <= outputs["radius"] * (1 + 1e-6)).all()
    proved = Top1(net, weights, request).proved(bound)
    assert proved[LENGTHS.max() == LENGTHS].all()
    assert not (front and proved[LENGTHS <= 4].any())
    first = reference.logits(bound.hidden).argmax(axis=1)
    for row, length in enumerate(LENGTHS):
        state = reference.zero_state(PASTS)
        for column in generator.integers(net.vocabulary_size, size=(30, PASTS)):
            _, state = reference.advance(column, state)
        for token in tokens[row, :length]:
            hidden, state = reference.advance(np.full(PASTS, token), state)
        distance = np.linalg.norm(hidden - outputs["hidden"][row], axis=1)
        assert distance.max() <= outputs["radius"][row] + 1e-5
        assert distance.max() <= bound.radius[row] + 1e-5
        assert not proved[row] or (reference.logits(hidden).argmax(axis=1) == first[row]).all()
