"""Tests the directional theorem. A lead is the difference between the logits of two tokens. For any tokens before the
window, a lead differs from its value after the window alone by at most its bound, and a proved top-1 token stays the
most probable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from research.adversary import Adversary
from tests.models.certificate.test_request import after, run, worst_pasts
from tests.models.random_models import architecture, random_weights
from wane.models.architecture import Architecture
from wane.models.certificate.logit_margins import NEGLIGIBLE
from wane.models.certificate.request import RequestBound
from wane.models.certificate.top1 import Top1
from wane.models.certificate.total_variation import head_diameter
from wane.models.layer_registry import FADING, Kind
from wane.models.reference import Array, Reference

FRONT = {"blocks": 2, "kernel_size": 3, "feed_forward": 4}
WINDOWS = 2
PUSHED = 6
FLIPS = 2
FLOAT64 = 1e-14


def ends(
    reference: Reference,
    adversary: Adversary,
    window: NDArray[np.int64],
    gaps: Array,
    generator: np.random.Generator,
) -> Array:
    """Returns `hidden` after N past token sequences and then the window, (N, H). The past sequences are those of
    `worst_pasts`, and sequences that an adversary changes to move `hidden` along the directions `gaps`."""
    pasts, _ = worst_pasts(reference, window, generator)
    pushed = [adversary.flipped(pasts[-PUSHED:], pasts.shape[1], FLIPS, window, gap) for gap in gaps[:2]]
    return run(reference, after(np.concatenate([pasts, *pushed]), window))


def shares_of(logits: Array) -> Array:
    """Returns the probabilities of logits, (..., V)."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return shares


def leads(model: Architecture, weights: dict[str, np.ndarray], generator: np.random.Generator) -> Array:
    """Returns the directions of four leads, (4, H). Two are the leads of one token over another, and two are random."""
    head = Reference(model, weights).head
    random = generator.normal(size=(2, model.hidden)) * 10 ** generator.uniform(-2, 2, (2, 1))
    return np.concatenate([head[:2] - head[2:4], random])


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    recurrent=st.floats(0.02, 1.0),
    driven=st.floats(0.05, 3.0),
    between=st.floats(0.1, 2.0),
    layers=st.integers(1, 3),
    hidden=st.integers(2, 8),
    feed_forward=st.sampled_from((0, 5)),
    epsilon=st.sampled_from((1e-5, 0.25)),
    front=st.sampled_from((None, FRONT)),
    length=st.integers(1, 16),
)
@pytest.mark.parametrize("cell", FADING)
def test_every_past_changes_a_lead_within_its_directional_bound(
    cell: Kind,
    seed: int,
    recurrent: float,
    driven: float,
    between: float,
    layers: int,
    hidden: int,
    feed_forward: int,
    epsilon: float,
    front: dict[str, int] | None,
    length: int,
) -> None:
    """Checks the bounds twice: as computed for a batch of windows, and as computed for each window alone."""
    fields = {"feed_forward": feed_forward, "norm_epsilon": epsilon, "front": front, "units": hidden + seed % 3}
    model = architecture(cell, "residual", layers, hidden=hidden, embedding=hidden, **fields)
    weights, generator = random_weights(model, seed, recurrent, driven), np.random.default_rng(seed)
    for name in weights:
        if "mix" in name or "feed_forward_out" in name:
            weights[name] *= np.float32(between)
    windows = generator.integers(model.vocabulary_size, size=(WINDOWS, length))
    request, gaps = RequestBound(model, weights), leads(model, weights, generator)
    top1, reference, adversary = Top1(model, weights, request), Reference(model, weights), Adversary(model, weights)
    together = top1.moved(request(windows), np.tile(gaps, (WINDOWS, 1)), np.repeat(np.arange(WINDOWS), len(gaps)))
    together = together.reshape(WINDOWS, len(gaps))
    for window, of_window in zip(windows, together, strict=True):
        alone = top1.moved(request(window[None]), gaps, np.zeros(len(gaps), np.intp))
        found = ends(reference, adversary, window, gaps, generator)
        exact = run(reference, window[None])
        assert (np.abs((found - exact) @ gaps.T).max(axis=0) <= np.minimum(alone, of_window)).all()
        bound = request(window[None])
        shares = shares_of(reference.logits(found)), shares_of(reference.logits(bound.hidden))
        variations = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
        assert variations.max() <= top1.variation(bound)[0] + FLOAT64
        told = alone > 1e-3 * np.linalg.norm(gaps, axis=1)
        np.testing.assert_allclose(alone[told], of_window[told], rtol=1e-4)


@pytest.mark.parametrize("front", [None, FRONT], ids=["tokens", "front"])
def test_the_bound_is_near_the_adversary_s_result(front: dict[str, int] | None) -> None:
    """Uses one gated layer whose block amplifies little.

    The bound of every lead is below ten times the largest change that the adversary finds, and below 0.7 times the
    bound from the radius.
    """
    model = architecture("gated", "residual", gate_caps=(0.9,), front=front, feed_forward=5, units=8, norm_epsilon=0.25)
    for seed in range(3):
        weights, generator = random_weights(model, seed), np.random.default_rng(seed)
        for name in weights:
            if "mix" in name or "feed_forward_out" in name:
                weights[name] *= np.float32(0.3)
        window = generator.integers(model.vocabulary_size, size=24)
        request, gaps = RequestBound(model, weights), leads(model, weights, generator)
        bound = request(window[None])
        said = Top1(model, weights, request).moved(bound, gaps, np.zeros(len(gaps), np.intp))
        found = ends(Reference(model, weights), Adversary(model, weights), window, gaps, generator)
        seen = np.abs((found - bound.hidden) @ gaps.T).max(axis=0)
        assert (seen <= said).all()
        assert (said < 10 * seen).all()
        assert (said < 0.7 * np.linalg.norm(gaps, axis=1) * bound.radius[0]).all()


def test_no_leads_give_an_empty_result() -> None:
    model = architecture("gated", "residual", layers=2, feed_forward=5)
    weights = random_weights(model, seed=0)
    request = RequestBound(model, weights)
    for count in (1, 2):
        bound = request(np.ones((count, 4), dtype=np.int64))
        assert Top1(model, weights, request).moved(bound, np.zeros((0, 6)), np.zeros(0, np.intp)).shape == (0,)


def test_the_bound_counts_an_error_of_the_hidden_stream_exactly_once() -> None:
    """Moves the hidden stream (the input of the last LayerNorm) by the distance `off` along the gradient of a lead. The
    window is so long that the tokens before it have no effect. So the lead's bound contains only this error, and the
    change of the lead is at least half of the bound. If the bound counted the error twice, the change would be less
    than half of the bound.
    """
    model = architecture("gated", "residual", gate_caps=(0.5,), norm_epsilon=0.25)
    weights, off = random_weights(model, seed=0), 1e-3
    request, gaps = RequestBound(model, weights), leads(model, weights, np.random.default_rng(0))
    exact = request(np.random.default_rng(0).integers(model.vocabulary_size, size=(1, 80)))
    states, errors = [step.state[0] for step in exact.steps], [step.error[0].box for step in exact.steps]
    for gap in gaps:
        aim = np.ones(model.hidden)
        for _ in range(8):  # searches for the stream at the distance `off` that changes the lead most
            bound = request.resume(exact.stream + off * aim / np.linalg.norm(aim), np.array([80]), states, errors, off)
            assert bound.norm is not None
            aim = bound.norm.pull((gap * weights["norm.weight"])[None], np.zeros(1, np.intp))[0][0]
        seen = abs(gap @ (exact.hidden - bound.hidden)[0])
        said = Top1(model, weights, request).moved(bound, gap[None], np.zeros(1, np.intp))[0]
        assert 0.5 * said < seen <= said


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("front", [None, FRONT], ids=["tokens", "front"])
def test_bounds_computed_for_all_tokens_together_are_close_to_single_bounds(
    front: dict[str, int] | None, layers: int
) -> None:
    """Also checks that the bounds are never below the measured changes, and that the bound of the total variation is
    not far above the measured total variation."""
    fields = {"feed_forward": 5, "units": 8, "norm_epsilon": 0.25, "front": front}
    model = architecture("gated", "residual", layers, gate_caps=(0.9,) * layers, **fields)
    for seed in range(3):
        weights, generator = random_weights(model, seed), np.random.default_rng(seed)
        for name in weights:
            if name.startswith("layers.") and weights[name].ndim == 2:
                weights[name] *= np.float32(0.3)
        request, reference = RequestBound(model, weights), Reference(model, weights)
        top1, window = Top1(model, weights, request), generator.integers(model.vocabulary_size, size=(2, 14))
        bound = request(window)
        assert bound.norm is not None
        for row in range(2):
            shares = shares_of(reference.logits(bound.hidden[row]))
            gaps = reference.head - shares @ reference.head
            along = top1.stream(bound, bound.norm.along(np.array([row])), np.array([row]))[0]
            together, of_mean = top1.margins.moved(bound, row, shares, along)
            alone = top1.moved(bound, gaps, np.full(len(gaps), row))
            by_radius = shares * np.expm1(together) <= NEGLIGIBLE
            assert (by_radius | (together <= 1.2 * alone + 0.01 * np.median(alone))).all()
            found = ends(reference, Adversary(model, weights), window[row], gaps, generator)
            assert (np.abs((found - bound.hidden[row]) @ gaps.T).max(axis=0) <= together + of_mean).all()
            variation = np.abs(shares_of(reference.logits(found)) - shares).sum(axis=1).max() / 2
            assert variation <= top1.variation(bound)[row] < 40 * variation
            assert top1.variation(bound)[row] < np.tanh(head_diameter(reference.head) * bound.radius[row] / 4)
