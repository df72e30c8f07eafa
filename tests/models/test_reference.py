"""Compares the oracle with the equations of one unit, computed with plain floats."""

from __future__ import annotations

from math import exp, sqrt, tanh

import numpy as np
import pytest

from tests.models.random_models import BLOCKS, architecture, random_weights
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.reference import Reference
from wane.models.reference.functions import sigmoid

TOKEN = 1


def sigma(x: float) -> float:
    return 1 / (1 + exp(-x))


def one_unit_step(cell: Kind, x: float, state: list[float], weights: dict[str, np.ndarray], cap: float) -> list[float]:
    """Computes one step of one unit with plain floats."""
    if cell == "leaky":
        (u_z,), (b_f, b_z) = weights["layers.0.cell.weight"][:, 0].tolist(), weights["layers.0.cell.bias"].tolist()
        f = cap * sigma(b_f)
        return [f * state[0] + (1 - f) * tanh(u_z * x + b_z)]
    if cell == "gated":
        (u_f, u_z), (b_f, b_z) = weights["layers.0.cell.weight"][:, 0].tolist(), weights["layers.0.cell.bias"].tolist()
        f = cap * sigma(u_f * x + b_f)
        return [f * state[0] + (1 - f) * tanh(u_z * x + b_z)]
    u, w, b, d = (
        weights[f"layers.0.cell.{name}_l0"].flatten().tolist()
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = state[0]
    if cell == "gru":
        r = sigma(u[0] * x + b[0] + w[0] * h + d[0])
        z = sigma(u[1] * x + b[1] + w[1] * h + d[1])
        n = tanh(u[2] * x + b[2] + r * (w[2] * h + d[2]))
        return [(1 - z) * n + z * h]
    if cell == "lstm":
        i, f, g, o = (u[k] * x + b[k] + w[k] * h + d[k] for k in range(4))
        c = sigma(f) * state[1] + sigma(i) * tanh(g)
        return [sigma(o) * tanh(c), c]
    pre = u[0] * x + b[0] + w[0] * h + d[0]
    return [{"linear": pre, "rnn_tanh": tanh(pre), "rnn_relu": max(pre, 0.0)}[cell]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cell", [cell for cell in FADING if cell != "lru"])
def test_one_unit_matches_the_equations(cell: Kind, seed: int) -> None:
    caps = (0.8,) if KINDS[cell].input_gated else ()
    model = architecture(cell, hidden=1, embedding=1, gate_caps=caps)
    weights = random_weights(model, seed)
    reference = Reference(model, weights)
    names = list(reference.zero_state(1))
    state = [0.3, -0.6][: len(names)]
    expected = one_unit_step(cell, float(weights["embedding.weight"][TOKEN, 0]), state, weights, float(np.float32(0.8)))
    fed = {name: np.array([[value]]) for name, value in zip(names, state, strict=True)}
    logits, hidden, after = reference.step(np.array([TOKEN]), fed)
    assert [after[name].item() for name in names] == pytest.approx(expected, rel=1e-12)
    assert hidden.item() == pytest.approx(expected[0], rel=1e-12)
    for token, logit in enumerate(logits[0]):
        tied, bias = float(weights["embedding.weight"][token, 0]), float(weights["head.bias"][token])
        assert logit == pytest.approx(expected[0] * tied + bias, rel=1e-12)


def test_a_residual_block_matches_its_equations() -> None:
    model = architecture("rnn_tanh", "residual", hidden=2, embedding=2, feed_forward=3)
    weights = random_weights(model, seed=9)
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}

    def norm(x: list[float], name: str) -> list[float]:
        mean = (x[0] + x[1]) / 2
        deviation = sqrt(((x[0] - mean) ** 2 + (x[1] - mean) ** 2) / 2 + 1e-5)
        return [float(w[f"{name}.weight"][k] * (x[k] - mean) / deviation + w[f"{name}.bias"][k]) for k in range(2)]

    def times(matrix: np.ndarray, x: list[float]) -> list[float]:
        return [sum(float(entry) * value for entry, value in zip(row, x, strict=True)) for row in matrix]

    x, h, p = w["embedding.weight"][TOKEN].tolist(), [0.5, -0.25], "layers.0."
    driven = times(w[p + "cell.weight_ih_l0"], norm(x, p + "norm"))
    recalled = times(w[p + "cell.weight_hh_l0"], h)
    biases = w[p + "cell.bias_ih_l0"] + w[p + "cell.bias_hh_l0"]
    y = [tanh(driven[k] + recalled[k] + biases[k]) for k in range(2)]
    x = [x[k] + times(w[p + "mix.weight"], y)[k] for k in range(2)]
    inner = times(w[p + "feed_forward_in.weight"], norm(x, p + "feed_forward_norm"))
    inner = [max(0.0, inner[k] + float(w[p + "feed_forward_in.bias"][k])) for k in range(3)]
    outer = times(w[p + "feed_forward_out.weight"], inner)
    x = [x[k] + outer[k] + float(w[p + "feed_forward_out.bias"][k]) for k in range(2)]

    _, hidden, after = Reference(model, weights).step(np.array([TOKEN]), {"layers.0.h": np.array([h])})
    assert after["layers.0.h"][0].tolist() == pytest.approx(y, rel=1e-12)
    assert hidden[0].tolist() == pytest.approx(norm(x, "norm"), rel=1e-12)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_a_row_of_a_batch_equals_the_row_alone(cell: Kind, block: str) -> None:
    model = architecture(cell, block, layers=2, tied=False)
    reference = Reference(model, random_weights(model, seed=0))
    tokens, generator = np.array([3, 0, 10]), np.random.default_rng(0)
    state = {name: generator.normal(size=value.shape) for name, value in reference.zero_state(3).items()}
    logits, hidden, after = reference.step(tokens, state)
    for row in range(3):
        alone = reference.step(tokens[row : row + 1], {name: value[row : row + 1] for name, value in state.items()})
        np.testing.assert_allclose(logits[row], alone[0][0], rtol=1e-12)
        np.testing.assert_allclose(hidden[row], alone[1][0], rtol=1e-12)
        for name, value in after.items():
            np.testing.assert_allclose(value[row], alone[2][name][0], rtol=1e-12)


def test_the_sigmoid_is_accurate_at_both_ends() -> None:
    x = np.array([-800.0, -40.0, 0.0, 40.0, 800.0])
    np.testing.assert_allclose(sigmoid(x), [0.0, exp(-40.0), 0.5, 1.0, 1.0], rtol=1e-12)
