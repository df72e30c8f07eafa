"""Tests that the adversary never reduces the distance between the `hidden` of two runs, that this distance stays within
the bounds, and that the distance attains the bounds in cases where this is possible."""

from __future__ import annotations

import numpy as np
import pytest

from research.adversary import Adversary
from research.bound_check import reachable
from research.histories import distances, distances_from, random_histories
from tests.models.random_models import architecture, random_weights
from wane.models.certificate.layers import build_layers
from wane.models.certificate.stack import Stack, state_error_curve
from wane.models.layer_registry import FADING, Kind
from wane.models.reference import Reference

PAST, LAST, COUNT = 12, 6, 8
FRONT = {"blocks": 1, "kernel_size": 3, "feed_forward": 5}
FLOAT32 = 1e-5  # the relative error of the gates and convolutions, which the adversary computes in float32


@pytest.mark.parametrize("cell", FADING)
def test_the_adversary_s_changes_increase_the_distance(cell: Kind) -> None:
    model = architecture(cell, "residual", layers=2, feed_forward=5, norm_epsilon=0.25)
    weights = random_weights(model, seed=0, recurrent=0.3)
    reference, adversary = Reference(model, weights), Adversary(model, weights)
    start = random_histories(np.random.default_rng(0), model.vocabulary_size, COUNT, PAST, LAST)

    def ends(histories: np.ndarray) -> np.ndarray:
        return distances(reference, histories[:, :PAST], histories[:, PAST:])[:, -1]

    flipped = adversary.flipped(start, PAST, 6)
    assert (ends(flipped) >= ends(start) * (1 - FLOAT32)).all()
    # The gates of leaky units are constant, so no token after the cut slows the forgetting.
    least, least_softened = (1.02, 1.1) if cell == "leaky" else (2, 1.2)
    assert np.median(ends(flipped) / ends(start)) > least
    assert np.median(ends(adversary.softened(start, PAST, 8)) / ends(start)) > least_softened


def test_the_adversary_changes_only_the_past_of_a_fixed_window() -> None:
    model = architecture("gated", gate_caps=(0.9,))
    weights = random_weights(model, seed=1)
    reference, adversary = Reference(model, weights), Adversary(model, weights)
    generator = np.random.default_rng(1)
    pasts = generator.integers(model.vocabulary_size, size=(COUNT, PAST))
    window, direction = generator.integers(model.vocabulary_size, size=LAST), np.eye(model.hidden)[2]
    flipped = adversary.flipped(pasts, PAST, 6, window, direction)
    assert flipped.shape == pasts.shape

    def unit(rows: np.ndarray) -> np.ndarray:
        state = reference.zero_state(len(rows))
        for tokens in np.concatenate([rows, np.tile(window, (len(rows), 1))], axis=1).T:
            hidden, state = reference.advance(tokens, state)
        return np.asarray(hidden @ direction)

    without = unit(np.zeros((1, 0), dtype=np.int64))
    assert (np.abs(unit(flipped) - without) >= np.abs(unit(pasts) - without) * (1 - FLOAT32)).all()
    best = max(np.abs(unit(np.full((1, PAST), token)) - without)[0] for token in range(model.vocabulary_size))
    assert np.abs(unit(flipped) - without).max() >= 0.9 * best


def test_the_adversary_attains_the_curve_of_one_gated_layer() -> None:
    model = architecture("gated", hidden=3, embedding=3, vocabulary_size=4)
    weights = random_weights(model, seed=2)
    layers = build_layers(model, weights)
    reach = reachable(model, layers)
    assert reach is not None
    last = np.random.default_rng(2).integers(4, size=(COUNT, LAST))
    states, last = Adversary(model, weights).states(reach, last, 2 * LAST, np.random.default_rng(2))
    low, high = reach["layers.0.s"]
    assert ((low <= states["layers.0.s"]) & (states["layers.0.s"] <= high)).all()
    found = distances_from(Reference(model, weights), states, last)[:, -1].max()
    curve = state_error_curve(Stack(model, weights, layers), LAST)
    assert 0.999 * curve[-1] < found <= curve[-1]


def test_a_convolution_starts_from_outputs_of_a_layer_norm() -> None:
    model = architecture("gated", "residual", front=FRONT, gate_caps=(0.8,))
    weights = random_weights(model, seed=3)
    reach = reachable(model, build_layers(model, weights))
    assert reach is not None
    last = np.zeros((COUNT, LAST), dtype=np.int64)
    states, _ = Adversary(model, weights).states(reach, last, 3, np.random.default_rng(3))
    gain, shift = (weights[f"front.0.norm.{name}"].astype(np.float64) for name in ("weight", "bias"))
    normalised = (states["front.0.inputs"] - shift) / gain
    np.testing.assert_allclose(normalised.sum(axis=-1), 0, atol=1e-9)
    assert (np.linalg.norm(normalised, axis=-1) <= np.sqrt(model.hidden)).all()


@pytest.mark.parametrize("cell", ["linear", "rnn_relu"])
def test_cells_without_a_box_have_no_reachable_states(cell: Kind) -> None:
    model = architecture(cell)
    assert reachable(model, build_layers(model, random_weights(model, seed=0, recurrent=0.1))) is None
