"""Tests the theorem: every token multiplies the distance of any two states by at most the certified factor, if both
states are in the box of reachable states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.models.random_models import BLOCKS, architecture, random_weights
from wane.models.architecture import Architecture
from wane.models.certificate import certify
from wane.models.certificate.layer_bound import LayerBound
from wane.models.certificate.layers import build_layers
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.manifest import Certificate
from wane.models.reference import Reference, State
from wane.models.reference.functions import sigmoid

PAIRS = 64
CLIMBS = 12
HISTORY = 20
CLOSEST = 1e-5
FLOAT64 = 1e-13
ROUNDING = 1e-9


def layer_bounds(model: Architecture, weights: dict[str, np.ndarray]) -> list[LayerBound]:
    return [layer.bound for layer in build_layers(model, weights)]


def contraction(model: Architecture, weights: dict[str, np.ndarray]) -> Certificate:
    return certify(model, weights, 8, None)


class TopLayer:
    """The map from the top layer's state before a token to the state of the same layer after the token, in a random
    model. The states of the layers below are those after a random history."""

    def __init__(self, model: Architecture, weights: dict[str, np.ndarray], generator: np.random.Generator) -> None:
        self._reference = Reference(model, weights)
        self._generator = generator
        self._names = model.layer_states(len(model.layers) - 1)
        self._vocabulary = model.vocabulary_size
        self.bound: LayerBound = layer_bounds(model, weights)[-1]
        self.proof = self.bound.best
        below = self._reference.zero_state(PAIRS)
        for _ in range(HISTORY):
            _, _, below = self._reference.step(self.tokens(), below)
        self._below = below

    def tokens(self) -> NDArray[np.int64]:
        return self._generator.integers(self._vocabulary, size=PAIRS)

    def states(self) -> list[np.ndarray]:
        """Returns states in the box, half of them at its corners. For a state without a bound, the box extends from -3
        to 3."""
        states = []
        for reach in self.bound.reach:
            values = self._generator.uniform(-1, 1, (PAIRS, len(reach)))
            values[::2] = np.sign(values[::2])
            states.append(values * np.where(np.isfinite(reach), reach, 3.0))
        return states

    def inside(self, states: list[np.ndarray]) -> list[np.ndarray]:
        return [np.clip(state, -reach, reach) for state, reach in zip(states, self.bound.reach, strict=True)]

    def ratio(
        self, first: list[np.ndarray], second: list[np.ndarray], tokens: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns, for each pair of states, the distance after the token divided by the distance before the token,
        (PAIRS). The distance after the token is first reduced by the float64 rounding. The ratio of a pair of nearly
        equal states is 0."""
        ends = self._step(first, tokens), self._step(second, tokens)
        before, after = (
            self.proof.norm.distance(*(a - b for a, b in zip(one, other, strict=True)))
            for one, other in ((first, second), ends)
        )
        rounding = FLOAT64 * self.proof.norm.distance(*(np.abs(a) + np.abs(b) for a, b in zip(*ends, strict=True)))
        return np.where(before > CLOSEST, np.maximum(after - rounding, 0) / np.maximum(before, CLOSEST), 0.0)

    def _step(self, states: list[np.ndarray], tokens: NDArray[np.int64]) -> list[np.ndarray]:
        state: State = {**self._below, **dict(zip(self._names, states, strict=True))}
        _, _, after = self._reference.step(tokens, state)
        return [after[name] for name in self._names]


def worst_ratio(layer: TopLayer, generator: np.random.Generator) -> float:
    """Returns the largest ratio (see `TopLayer.ratio`) that hill climbing finds. The climb starts from random pairs of
    distant states and from random pairs of close states, and changes each pair randomly."""
    worst = 0.0
    for spread in (1.0, 1e-3):
        first, tokens = layer.states(), layer.tokens()
        second = (
            layer.states()
            if spread == 1
            else layer.inside([s + spread * generator.normal(size=s.shape) for s in first])
        )
        ratios = layer.ratio(first, second, tokens)
        for _ in range(CLIMBS):
            one, other = (
                layer.inside([s + 0.3 * spread * generator.normal(size=s.shape) for s in states])
                for states in (first, second)
            )
            found = layer.ratio(one, other, tokens)
            better = (found > ratios)[:, None]
            first, second = (
                [np.where(better, new, old) for new, old in zip(news, olds, strict=True)]
                for news, olds in ((one, first), (other, second))
            )
            ratios = np.maximum(ratios, found)
        worst = max(worst, float(ratios.max()))
    return worst


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    recurrent=st.floats(0.02, 2.0),
    driven=st.floats(0.05, 3.0),
    recalled=st.floats(0.1, 10.0),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 8),
)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_every_token_reduces_the_distance_of_every_pair_of_states_by_the_factor(
    cell: Kind, block: str, seed: int, recurrent: float, driven: float, recalled: float, layers: int, hidden: int
) -> None:
    caps = (0.9,) * layers if cell == "gated" and seed % 2 else ()
    model = architecture(cell, block, layers, hidden=hidden, embedding=hidden, gate_caps=caps)
    generator = np.random.default_rng(seed)
    weights = random_weights(model, seed, recurrent, driven)
    for name in weights:
        if "bias_hh" in name:
            weights[name] *= np.float32(recalled)
    layer = TopLayer(model, weights, generator)
    applying = [proof for proof in layer.bound.proofs if proof.factor is not None]
    layer.proof = applying[seed % len(applying)]
    assert layer.proof.factor is not None
    assert worst_ratio(layer, generator) <= layer.proof.factor * (1 + ROUNDING) + ROUNDING, layer.proof.rule


def one_unit(
    cell: Kind, driven: list[float], recurrent: list[float], bias: list[float], recalled: list[float] | None = None
) -> TopLayer:
    """Returns a layer with one unit and a vocabulary of two tokens, whose inputs are -1 and 1. `driven`, `recurrent`,
    `bias` and `recalled` are the values of weight_ih, weight_hh, bias_ih and bias_hh, one for each gate."""
    model = architecture(cell, hidden=1, embedding=1, vocabulary_size=2)
    weights = random_weights(model, seed=0)
    weights["embedding.weight"][:, 0] = (-1, 1)
    biases = (("bias_ih", bias), ("bias_hh", recalled or [0.0] * len(bias)))
    for name, values in (("weight_ih", driven), ("weight_hh", recurrent), *biases):
        tensor = weights[f"layers.0.cell.{name}_l0"]
        tensor[:] = np.array(values, dtype=np.float32).reshape(tensor.shape)
    return TopLayer(model, weights, np.random.default_rng(0))


def largest_ratio(layer: TopLayer, first: list[float], second: list[float]) -> float:
    """Returns the larger one of `layer.ratio` at the two tokens, for one pair of states of a layer with one unit."""
    tokens = np.arange(PAIRS) % 2
    one, other = ([np.full((PAIRS, 1), value) for value in state] for state in (first, second))
    return float(layer.ratio(one, other, tokens).max())


def test_the_output_gate_alone_can_attain_an_lstm_s_factor() -> None:
    """Uses an LSTM with one unit whose state is (h, c). Only the output gate o depends noticeably on h, and c is at the
    edge of the box. Because h' = o tanh(c') and the slope of the sigmoid at 0 is 1/4, |dh'| = tanh(c') W_o / 4 |dh|
    near h = 0."""
    layer = one_unit("lstm", [0, 0, 0, 0], [0, 1e-3, 0, 8], [40, 0, 40, 0])
    edge = float(layer.bound.reach[1][0])
    # The edge of the box for c is i g / (1 - f), with i = g = 1 and f = 1/2.
    assert edge == pytest.approx(2, rel=1e-3)
    ratio = largest_ratio(layer, [0.001, edge], [-0.001, edge])
    assert 0.99 * layer.bound.factor < ratio <= layer.bound.factor


@pytest.mark.parametrize("recalled", [0.5, 3.0], ids=["the candidate contracts", "the candidate expands"])
def test_the_extreme_of_the_update_gate_attains_a_gru_s_factor(recalled: float) -> None:
    """Uses the state's map h' = (1 - z) tanh(r W_n h) + z h near h = 0, with the reset gate r = 1. Its slope is (1 - z)
    W_n + z, with the update gate z. The slope is largest at one end of the range of z."""
    layer = one_unit("gru", [0, 1, 0], [0, 0, recalled], [40, 0, 0])
    ratio = largest_ratio(layer, [0.001], [-0.001])
    ends = (1 / (1 + np.exp(-token)) for token in (-1.0, 1.0))
    assert ratio == pytest.approx(max((1 - z) * recalled + z for z in ends), rel=1e-4)
    assert 0.99 * layer.bound.factor < ratio <= layer.bound.factor


def test_the_reset_gate_alone_can_attain_a_gru_s_factor() -> None:
    """Only the reset gate r depends on the state h. Near h = 0, the slope of r is r (1 - r) = 1/4. The candidate is
    tanh(8 r - 4), so its slope near h = 0 is 8 times the slope of r, which is 2."""
    layer = one_unit("gru", [0, 0, 0], [1, 0, 0], [0, -6, -4], recalled=[0, 0, 8])
    ratio = largest_ratio(layer, [0.001], [-0.001])
    z = 1 / (1 + np.exp(6))
    assert ratio == pytest.approx((1 - z) * 2 + z, rel=1e-5)
    assert 0.99 * layer.bound.factor < ratio <= layer.bound.factor


@pytest.mark.parametrize("cell", FADING)
def test_states_stay_in_their_box(cell: Kind) -> None:
    model = architecture(cell, "plain", layers=2)
    weights = random_weights(model, seed=5, recurrent=0.4)
    reference, generator = Reference(model, weights), np.random.default_rng(5)
    bounds, state = layer_bounds(model, weights), reference.zero_state(500)
    largest = {name: np.zeros(model.hidden) for name in state}
    for _ in range(60):
        _, _, state = reference.step(generator.integers(model.vocabulary_size, size=500), state)
        largest = {name: np.maximum(largest[name], np.abs(value).max(axis=0)) for name, value in state.items()}
    for layer, bound in enumerate(bounds):
        for name, reach in zip(KINDS[cell].states, bound.reach, strict=True):
            assert np.all(largest[f"layers.{layer}.{name}"] <= reach)


def test_the_factor_of_a_linear_layer_is_its_largest_singular_value() -> None:
    model = architecture("linear")
    weights = random_weights(model, seed=1)
    weights["layers.0.cell.weight_hh_l0"] = np.diag(np.array([0.5, -0.75, 0, 0, 0, 0], dtype=np.float32))
    certificate = contraction(model, weights)
    assert certificate.layers[0].factor == pytest.approx(0.75, rel=1e-9)
    assert certificate.layers[0].factor > 0.75, "the factor was not rounded up"
    assert certificate.contractive


def test_an_unstable_model_is_not_contractive() -> None:
    model = architecture("rnn_relu", layers=2)
    weights = random_weights(model, seed=2, recurrent=0.3)
    assert contraction(model, weights).contractive
    weights["layers.1.cell.weight_hh_l0"] = 1.02 * np.eye(model.hidden, dtype=np.float32)
    weights["layers.1.cell.bias_hh_l0"] += 3  # The bias keeps the input of every ReLU positive.
    certificate = contraction(model, weights)
    assert [layer.factor < 1 for layer in certificate.layers] == [True, False]
    assert not certificate.contractive

    reference = Reference(model, weights)
    first, second = reference.zero_state(1), reference.zero_state(1)
    second["layers.1.h"] = second["layers.1.h"] + 1
    token = np.array([3])
    for _ in range(50):
        (_, _, first), (_, _, second) = reference.step(token, first), reference.step(token, second)
    parted = np.abs(first["layers.1.h"] - second["layers.1.h"])
    assert parted.min() > 2, "two states that differ by 1 in each unit must differ by more than 2 after 50 tokens"


def test_a_gate_cap_is_a_sufficient_proof() -> None:
    model = architecture("gated", "residual", layers=2, gate_caps=(0.875, 0.75))
    certificate = contraction(model, random_weights(model, seed=3, driven=1e4))
    assert [(layer.factor, layer.rule) for layer in certificate.layers] == [(0.875, "gate_cap"), (0.75, "gate_cap")]
    assert certificate.contractive


def test_a_cap_that_float32_rounds_to_one_is_not_a_proof() -> None:
    model = architecture("gated", gate_caps=(1 - 1e-9,))
    weights = random_weights(model, seed=3)
    weights["layers.0.cell.bias"][:] = 60
    certificate = contraction(model, weights)
    assert (certificate.layers[0].factor, certificate.layers[0].rule) == (1.0, "gate_cap")
    assert not certificate.contractive


@pytest.mark.parametrize("cap", [0.8, 0.9, 0.98])
def test_a_cap_is_rounded_to_float32(cap: float) -> None:
    multiplies = float(np.float32(cap))
    assert multiplies != cap
    model = architecture("gated", gate_caps=(cap,))
    weights = random_weights(model, seed=3, driven=1e4)
    assert contraction(model, weights).layers[0].factor == multiplies

    weights["layers.0.cell.weight"][:], weights["layers.0.cell.bias"][:] = 0, 40
    # The gates are at their cap and the candidates are 0, so each state is only multiplied by the cap.
    weights["layers.0.cell.bias"][model.hidden :] = 0
    _, after = Reference(model, weights).advance(np.array([1]), {"layers.0.s": np.ones((1, model.hidden))})
    assert np.all(after["layers.0.s"] == multiplies)


def test_cancelling_terms_do_not_hide_an_open_gate() -> None:
    """Uses a gate whose input is the sum 1e20 + 30 - 1e20. The exact value of this sum is 30, so the gate is nearly
    open. Floating-point arithmetic gives 0 for the sum."""
    model = architecture("gated", hidden=3, embedding=3, vocabulary_size=2)
    weights = {name: np.zeros_like(tensor) for name, tensor in random_weights(model, seed=0).items()}
    weights["embedding.weight"][1] = (1e10, 30, 1e10)
    weights["layers.0.cell.weight"][0] = (1e10, 1, -1e10)
    assert contraction(model, weights).layers[0].factor >= sigmoid(np.array(30.0))


def test_a_model_with_gates_that_may_stay_open_is_not_contractive() -> None:
    model = architecture("gated")
    weights = random_weights(model, seed=3)
    weights["layers.0.cell.bias"][:] = 60
    assert not contraction(model, weights).contractive


def test_an_lstm_s_certificate_contains_the_weights_of_its_norm() -> None:
    """Checks that the text and the weights of the norm in the manifest describe the norm in which the factor was
    proved."""
    model = architecture("lstm", hidden=48, embedding=48)
    weights = random_weights(model, seed=4, recurrent=0.2)
    (stated,), (bound,) = contraction(model, weights).layers, layer_bounds(model, weights)
    norm = bound.best.norm
    assert stated.weights == norm.scales
    assert stated.norm == f"max(|h|_{norm.order} / p, |c|_{norm.order} / q)"
    p, q = stated.weights
    h, c = np.random.default_rng(0).normal(size=(2, 5, model.hidden))
    order = {"2": 2, "inf": np.inf}[norm.order]
    expected = np.maximum(np.linalg.norm(h, order, axis=1) / p, np.linalg.norm(c, order, axis=1) / q)
    np.testing.assert_allclose(norm.distance(h, c), expected)


@pytest.mark.parametrize("cell", [cell for cell in FADING if cell != "lstm"])
def test_the_norm_of_a_single_state_tensor_has_no_weights(cell: Kind) -> None:
    model = architecture(cell)
    assert contraction(model, random_weights(model, seed=4)).layers[0].weights == ()


def test_a_saturated_lstm_has_a_finite_factor_that_is_not_contractive() -> None:
    model = architecture("lstm", layers=2)
    weights = random_weights(model, seed=4, recurrent=0.0)
    weights["layers.0.cell.bias_ih_l0"][:] = 80
    certificate = contraction(model, weights)
    assert [np.isfinite(layer.factor) for layer in certificate.layers] == [True, True]
    assert certificate.layers[0].factor >= 1
    assert not certificate.contractive


def test_an_lstm_without_recurrence_forgets_at_its_forget_gate() -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=6, recurrent=0.0)
    hidden = slice(model.hidden, 2 * model.hidden)
    inputs = weights["embedding.weight"].astype(np.float64) @ weights["layers.0.cell.weight_ih_l0"][hidden].T
    gate = inputs + weights["layers.0.cell.bias_ih_l0"][hidden] + weights["layers.0.cell.bias_hh_l0"][hidden]
    expected = (1 / (1 + np.exp(-gate))).max()
    assert contraction(model, weights).layers[0].factor == pytest.approx(expected, rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), forget=st.floats(0.1, 0.9))
def test_lstms_that_meet_miller_and_hardt_s_condition_are_contractive(seed: int, forget: float) -> None:
    """Uses weights that meet Miller and Hardt's condition in the maximum norm: |W_i| < 1 - f, |W_o| < 1 - f, |W_g| <=
    (1 - f) / 4 and |W_f| < (1 - f)^2. The norms are those of the gates' recurrent matrices, and f is the largest value
    of the forget gate."""
    model = architecture("lstm")
    weights = random_weights(model, seed, driven=0.0)
    room = 1 - forget
    matrix = weights["layers.0.cell.weight_hh_l0"]
    limits = np.repeat([room, room**2, room / 4, room], model.hidden)
    matrix *= (0.999 * limits / np.abs(matrix).sum(axis=1))[:, None]
    weights["layers.0.cell.bias_hh_l0"][:] = 0
    bias = weights["layers.0.cell.bias_ih_l0"]
    recalled = np.abs(matrix[model.hidden : 2 * model.hidden]).sum(axis=1)
    # With this bias, no forget gate exceeds `forget`.
    bias[model.hidden : 2 * model.hidden] = np.log(forget / room) - recalled
    (bound,) = layer_bounds(model, weights)
    factors = {proof.rule: proof.factor for proof in bound.proofs}
    theirs, ours = factors["miller_hardt_inf"], factors["lstm_comparison_inf"]
    assert theirs is not None and ours is not None
    assert ours <= theirs + 1e-8 < 1
    assert bound.factor <= ours


def test_no_rule_certifies_an_lstm_with_a_nearly_open_forget_gate() -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0, recurrent=0.0, driven=0.0)
    weights["layers.0.cell.bias_hh_l0"][:] = 0
    # This bias makes the forget gate about 1 - 8e-10.
    weights["layers.0.cell.bias_ih_l0"][model.hidden : 2 * model.hidden] = 21
    (bound,) = layer_bounds(model, weights)
    assert {proof.rule for proof in bound.proofs} >= {"miller_hardt_inf", "lstm_elementwise"}
    assert all(proof.factor is not None and proof.factor >= 1 for proof in bound.proofs)
