"""Tests the theorem of the curve: the tokens before the last k tokens change a prediction by at most the curve's bound
for k."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.adversary import Adversary
from research.bound_check import reachable
from research.histories import climbed_histories, distances, distances_from, greedy_histories, random_histories
from tests.models.random_models import BLOCKS, architecture, random_weights
from tests.models.rounding import rounding
from wane.models.architecture import Architecture
from wane.models.certificate import certify
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.layer_norm import normalised_apart
from wane.models.certificate.layers import build_layers
from wane.models.certificate.rounding import worst_case
from wane.models.certificate.stack import Stack, state_error_curve
from wane.models.certificate.total_variation import head_diameter, total_variation
from wane.models.layer_registry import FADING, Kind
from wane.models.parity import log_softmax
from wane.models.reference import Reference, State
from wane.models.reference.functions import layer_norm
from wane.models.weights import Weights

PAST, LAST = 24, 24
SOFTENING, FLIPS, STATES = 4, 2, 4
FRONT = {"blocks": 2, "kernel_size": 3, "feed_forward": 5}


def bad_histories(model: Architecture, weights: Weights, seed: int, past: int = PAST, last: int = LAST) -> np.ndarray:
    """Returns token histories of `past` + `last` tokens. Some are random. The others are chosen so that a run over all
    tokens differs much from a run over the last tokens alone. They are chosen greedily, or by hill climbing without and
    with gradients."""
    generator, reference, adversary = np.random.default_rng(seed), Reference(model, weights), Adversary(model, weights)
    random = random_histories(generator, model.vocabulary_size, 8, past, last)
    greedy = greedy_histories(reference, model.vocabulary_size, past, last)
    climbed = climbed_histories(reference, generator, random[:4], past, 4)
    start = np.concatenate([random[4:6], adversary.softened(random[6:], past, SOFTENING)])
    return np.concatenate([random, greedy, climbed, adversary.flipped(start, past, FLIPS)])


def bad_states(
    model: Architecture, weights: Weights, layers: list[Layer], histories: np.ndarray
) -> tuple[State, np.ndarray]:
    """Returns reachable initial states that an adversary finds with the gradient, and the tokens that follow each
    state, (N, LAST).

    Returns no states for linear and ReLU cells, whose states have no bound.
    """
    last = histories[-STATES:, PAST:]
    reach = reachable(model, layers)
    if reach is None:
        return {}, last[:0]
    return Adversary(model, weights).states(reach, last, FLIPS, np.random.default_rng(0))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    recurrent=st.floats(0.02, 2.0),
    driven=st.floats(0.05, 3.0),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 7),
    epsilon=st.sampled_from([1e-5, 0.25]),
    feed_forward=st.sampled_from([0, 5]),
)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_every_history_stays_below_the_curve_with_rounding(
    cell: Kind,
    block: str,
    seed: int,
    recurrent: float,
    driven: float,
    layers: int,
    hidden: int,
    epsilon: float,
    feed_forward: int,
) -> None:
    caps = (0.8,) * layers if cell == "gated" and seed % 2 else ()
    fields = {"norm_epsilon": epsilon, "feed_forward": feed_forward} if block == "residual" else {}
    model = architecture(
        cell, block, layers, hidden=hidden, embedding=hidden, vocabulary_size=5, gate_caps=caps, **fields
    )
    weights = random_weights(model, seed, recurrent, driven)
    built = build_layers(model, weights)
    if not all(np.isfinite(reach).all() for layer in built for reach in layer.bound.reach):
        assert not certify(model, weights, 4, None).contractive
        return
    stack, exact = Stack(model, weights, built), Reference(model, weights)
    curve, histories = state_error_curve(stack, LAST), bad_histories(model, weights, seed)
    rounding = worst_case(model, weights, stack, "float64")
    assert rounding is not None
    apart = distances(exact, histories[:, :PAST], histories[:, PAST:])
    assert np.all(apart <= curve + rounding)
    states, last = bad_states(model, weights, built, histories)
    if states:
        assert np.all(distances_from(exact, states, last) <= curve + rounding)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_every_float32_history_stays_below_the_curve_with_the_worst_case_rounding(
    cell: Kind, block: str, seed: int
) -> None:
    fields: dict[str, Any] = {"norm_epsilon": 0.25, "feed_forward": 5} if block == "residual" else {}
    model = architecture(cell, block, hidden=4, embedding=4, vocabulary_size=5, **fields)
    weights = random_weights(model, seed, recurrent=0.1, driven=0.3)
    stack, exact = Stack(model, weights, build_layers(model, weights)), Reference(model, weights)
    rounded = Reference(model, weights, np.float32)
    curve, histories = state_error_curve(stack, LAST), bad_histories(model, weights, seed)
    rounding = worst_case(model, weights, stack, "float32")
    assert rounding is not None and np.all(rounding < curve[:3] / 10)
    apart = distances(rounded, histories[:, :PAST], histories[:, PAST:])
    assert np.all(apart <= curve + rounding)

    states, worst = [reference.zero_state(len(histories)) for reference in (exact, rounded)], 0.0
    for column in histories.T:
        hidden, states[0] = exact.advance(column, states[0])
        found, states[1] = rounded.advance(column, states[1])
        worst = max(worst, float(np.linalg.norm(found - hidden, axis=1).max()))
    assert rounding / 2 / 10_000 < worst <= rounding / 2, (
        "half of the worst-case rounding must be at least the rounding of one run, and less than 10,000 times as large"
    )


@pytest.mark.parametrize("cell", FADING)
def test_every_history_over_a_front_stays_below_the_curve(cell: Kind) -> None:
    model = architecture(cell, "residual", layers=2, front=FRONT, units=4, feed_forward=5, norm_epsilon=0.25)
    weights = random_weights(model, seed=1, recurrent=0.1, driven=0.2)
    certificate, exact = certify(model, weights, LAST, None), Reference(model, weights)
    assert certificate.contractive
    histories = bad_histories(model, weights, seed=1)
    apart = distances(exact, histories[:, :PAST], histories[:, PAST:])
    assert np.all(apart <= np.array(certificate.state_error) + 1e-9)
    assert apart[:, 0].max() > 0
    states, last = bad_states(model, weights, build_layers(model, weights), histories)
    if states:
        assert np.all(distances_from(exact, states, last) <= np.array(certificate.state_error) + 1e-9)


def test_without_rounding_a_tanh_rnn_in_float64_exceeds_its_curve() -> None:
    model = architecture("rnn_tanh", hidden=16, embedding=16)
    weights = random_weights(model, seed=0, recurrent=0.3)
    last, exact = 80, Reference(model, weights)
    stack = Stack(model, weights, build_layers(model, weights))
    curve, histories = state_error_curve(stack, last), bad_histories(model, weights, 0, last=last)
    apart = distances(exact, histories[:, :PAST], histories[:, PAST:]).max(axis=0)
    assert np.any(apart > curve)
    rounding = worst_case(model, weights, stack, "float64")
    assert rounding is not None and np.all(apart <= curve + rounding)


def test_a_repeated_token_attains_the_first_gated_layer_s_curve() -> None:
    """Uses one gated unit and one repeated token. Before the window, the token moves the unit's state to the edge of
    the box. In the window, the difference between this state and the state of a run from the zero state decays as
    slowly as possible. So this difference attains the bound."""
    model = architecture("gated", hidden=1, embedding=1, vocabulary_size=2)
    weights = random_weights(model, seed=0)
    weights["embedding.weight"][:, 0] = (-1, 1)
    weights["layers.0.cell.weight"][:, 0] = (2, 5)
    # The candidates are tanh(0) and tanh(10), and the gates are sigmoid(-2) and sigmoid(2).
    weights["layers.0.cell.bias"][:] = (0, 5)
    exact = Reference(model, weights)
    ones = np.ones((1, 400), dtype=np.int64)
    apart = distances(exact, ones, ones[:, :30])[0]
    curve = np.array(certify(model, weights, 30, None).state_error)
    np.testing.assert_allclose(apart, curve, rtol=1e-8)


def test_the_first_layer_is_bounded_by_the_gates_of_single_tokens() -> None:
    """Uses two units whose gates open for different tokens. So the bound must be smaller than a bound that assumes, at
    every token, the largest gate value of each unit."""
    model = architecture("gated", hidden=2, embedding=2, vocabulary_size=2)
    weights = random_weights(model, seed=0)
    weights["embedding.weight"][:] = ((-1, 1), (1, -1))
    weights["layers.0.cell.weight"][:2] = 2 * np.eye(2, dtype=np.float32)
    weights["layers.0.cell.bias"][:2] = 0
    (layer,) = build_layers(model, weights)
    reach = layer.bound.reach[0]
    low, high = 1 / (1 + np.exp(2)), 1 / (1 + np.exp(-2))
    expected = max(np.hypot(low**9 * reach[0], high**9 * reach[1]), np.hypot(high**9 * reach[0], low**9 * reach[1]))
    assert certify(model, weights, 9, None).state_error[-1] == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_a_curve_never_rises_and_bounds_every_longer_window(cell: Kind, block: str) -> None:
    model = architecture(cell, block, layers=2)
    weights = random_weights(model, seed=3, recurrent=0.05, driven=0.1)
    short, long = (certify(model, weights, window, None) for window in (8, 300))
    assert long.contractive
    assert all(later <= earlier for earlier, later in zip(long.state_error, long.state_error[1:], strict=False))
    assert short.state_error_at(300) == short.state_error[7]
    np.testing.assert_allclose(short.state_error, long.state_error[:8], rtol=1e-9)
    assert long.error_bound_at(5) == long.error_bound[4]
    k = long.smallest_window(0.5)
    assert k is not None and long.error_bound[k - 1] <= 0.5 and (k == 1 or long.error_bound[k - 2] > 0.5)
    with pytest.raises(ValueError, match="at least one token"):
        long.state_error_at(0)


def test_the_curve_of_a_stable_model_does_not_contain_its_rounding() -> None:
    model = architecture("rnn_tanh")
    weights = random_weights(model, seed=2, recurrent=0.1)
    certificate = certify(model, weights, 64, None)
    assert certificate.certified and certificate.reason is None
    rounded = certify(model, weights, 64, rounding(0.0, states=["layers.0.h"], state=1e-7))
    assert rounded.state_error == certificate.state_error
    assert rounded.rounding is not None and rounded.rounding.worst_case is not None
    assert 1e-7 < rounded.rounding.carried < 1e-6, (
        "the carried rounding must be above the rounding error of one step, and below ten times this error"
    )
    assert rounded.error_bound == certificate.error_bound
    assert rounded.between_runs() == 2 * rounded.rounding.carried


def test_the_reason_names_the_layer_that_may_not_forget() -> None:
    model = architecture("rnn_tanh", layers=2)
    weights = random_weights(model, seed=2, recurrent=0.1)
    weights["layers.1.cell.weight_hh_l0"] = 1.5 * np.eye(model.hidden, dtype=np.float32)
    certificate = certify(model, weights, 64, None)
    assert not certificate.certified and not certificate.contractive
    assert certificate.reason is not None and certificate.reason.startswith("layer 1 is not proved to forget")
    assert "1.5 (spectral_norm)" in certificate.reason
    assert certificate.state_error == () and certificate.state_error_at(3) is None
    assert certify(model, weights, 64, rounding(1e-6)).rounding is None, (
        "a certificate must not have a rounding without a bound"
    )
    assert certificate.smallest_window(0.5) is None


def test_a_model_that_forgets_too_slowly_is_not_certified_and_the_reason_has_its_bound() -> None:
    model = architecture("rnn_tanh")
    certificate = certify(model, random_weights(model, seed=2, recurrent=0.3), 4, None)
    assert certificate.contractive and not certificate.certified
    assert certificate.reason is not None and "at k = 4, the largest window" in certificate.reason


def test_the_lyapunov_equation_proves_a_highly_non_normal_linear_layer() -> None:
    model = architecture("linear", hidden=4, embedding=4)
    weights = random_weights(model, seed=0)
    matrix = np.diag(np.full(4, 0.5)) + np.diag(np.full(3, 2.0), 1)
    weights["layers.0.cell.weight_hh_l0"] = matrix.astype(np.float32)
    certificate = certify(model, weights, 64, None)
    factors = {condition.rule: condition.factor for condition in certificate.layers[0].conditions}
    assert factors["spectral_norm"] is not None and factors["spectral_norm"] > 2
    assert factors["lyapunov"] is not None and 0.5 < factors["lyapunov"] < 1
    assert certificate.contractive
    exact = Reference(model, weights)
    histories = bad_histories(model, weights, 0, last=64)
    apart = distances(exact, histories[:, :PAST], histories[:, PAST:])
    assert np.all(apart <= np.array(certificate.state_error) + 1e-9)


def test_the_head_diameter_is_the_largest_distance_of_two_rows() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(3000, 5)) + 100
    exact = max(float(np.linalg.norm(rows - row, axis=1).max()) for row in rows)
    assert exact <= head_diameter(rows) <= exact * (1 + 1e-6)
    outlier = np.concatenate([rows, rows[:1] * 2])
    exact_outlier = float(np.linalg.norm(rows - outlier[-1], axis=1).max())
    assert exact_outlier <= head_diameter(outlier) <= exact_outlier * (1 + 1e-6), (
        "for a small vocabulary, the result must be the exact maximum over all pairs of rows"
    )
    many = np.tile(rows, (6, 1))
    assert exact <= head_diameter(many) <= 2 * exact, (
        "for a large vocabulary, the result must be at most twice the largest distance"
    )


def test_two_tokens_attain_the_bound_of_total_variation() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2000, 6)) * 4
    moves = generator.normal(size=(2000, 6)) * 2
    first, second = (np.exp(log_softmax(each)) for each in (logits, logits + moves))
    apart = np.abs(first - second).sum(axis=1) / 2
    assert np.all(apart <= total_variation(1.0, np.ptp(moves, axis=1)))
    pair = np.exp(log_softmax(np.array([[0.5, -0.5], [-0.5, 0.5]])))
    assert np.abs(pair[0] - pair[1]).sum() / 2 == pytest.approx(total_variation(1.0, np.array(2.0)), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.floats(1e-3, 1e3),
    apart=st.floats(1e-4, 1e3),
    epsilon=st.sampled_from([1e-5, 0.25]),
)
def test_the_distance_of_two_layer_norm_outputs_is_within_its_bound(
    seed: int, size: float, apart: float, epsilon: float
) -> None:
    generator = np.random.default_rng(seed)
    first = size * generator.normal(size=(50, 6))
    moved = generator.normal(size=(50, 6))
    second = first + apart * moved / np.linalg.norm(moved, axis=1, keepdims=True)
    # In every second pair, the line through the two points passes through the origin.
    second[::2] = first[::2] * (1 - apart / np.linalg.norm(first[::2], axis=1, keepdims=True))
    centred = [each - each.mean(axis=1, keepdims=True) for each in (first, second)]
    outputs = [layer_norm(each, np.ones(6), np.zeros(6), epsilon) for each in (first, second)]
    found = np.linalg.norm(outputs[0] - outputs[1], axis=1)
    for row in range(50):
        distance = float(np.linalg.norm(centred[0][row] - centred[1][row]))
        least = float(min(np.linalg.norm(each[row]) for each in centred))
        assert found[row] <= normalised_apart(distance, 6, epsilon) + 1e-9
        assert found[row] <= normalised_apart(distance, 6, epsilon, least) + 1e-9


def test_two_points_on_opposite_sides_of_the_centre_attain_the_bound_of_a_layer_norm() -> None:
    vector = np.array([[1.0, -1.0, 0.0, 0.0]])
    found = 2 * np.linalg.norm(layer_norm(vector, np.ones(4), np.zeros(4), 0.25))
    assert normalised_apart(2 * np.sqrt(2), 4, 0.25) == pytest.approx(found, rel=1e-9)


def test_the_certificate_covers_units_and_front() -> None:
    model = Architecture.model_validate(
        {"cell": "gated", "vocabulary_size": 7, "embedding": 6, "hidden": 6, "layers": 1, "block": "residual"}
        | {"front": FRONT, "units": 9, "gate_caps": (0.5,)}
    )
    certificate = certify(model, random_weights(model, seed=0), 12, None)
    reach = FRONT["blocks"] * (FRONT["kernel_size"] - 1)
    assert len(set(certificate.state_error[:reach])) == 1, (
        "the curve must be constant while the convolution blocks still read tokens before the window"
    )
    assert certificate.state_error[-1] < certificate.state_error[0]
