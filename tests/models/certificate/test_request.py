"""Tests the theorem of the radius. Let `hidden` be the network's output vector after some past tokens and then the
window. For any past tokens, `hidden` differs from its value after the window alone by at most the radius."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from research.adversary import Adversary
from tests.models.random_models import BLOCKS, architecture, random_weights
from wane.models.certificate.request import RequestBound
from wane.models.certificate.top1 import Top1
from wane.models.layer_registry import FADING, Kind
from wane.models.reference import Array, Reference

PASTS = 48
LONGEST_PAST = 24
CLIMBS = 6
PUSHED, FLIPS = 6, 2


def run(reference: Reference, tokens: NDArray[np.int64]) -> Array:
    """Returns `hidden` (B, H) after tokens (B, T), from the zero state."""
    state = reference.zero_state(len(tokens))
    for column in tokens.T:
        hidden, state = reference.advance(column, state)
    return hidden


def after(pasts: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns token sequences, (B, P + k): each of the past sequences (B, P) followed by the window (k)."""
    return np.concatenate([pasts, np.broadcast_to(window, (len(pasts), len(window)))], axis=1)


def distances(reference: Reference, pasts: NDArray[np.int64], window: NDArray[np.int64]) -> Array:
    """Returns, for each past sequence, the distance between two values of `hidden`: after the past and the window, and
    after the window alone. The result has the shape (B)."""
    apart: Array = np.linalg.norm(run(reference, after(pasts, window)) - run(reference, window[None]), axis=1)
    return apart


def worst_pasts(
    reference: Reference, window: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.int64], Array]:
    """Searches for past token sequences after which `hidden` differs most from its value after the window alone. The
    hill climbing starts from random sequences and from sequences of one repeated token. Returns the found sequences,
    and the result of `distances` for them."""
    vocabulary = reference.architecture.vocabulary_size
    pasts = generator.integers(vocabulary, size=(PASTS, LONGEST_PAST))
    pasts[:vocabulary] = np.arange(vocabulary)[:, None]
    found = distances(reference, pasts, window)
    for _ in range(CLIMBS):
        changed = np.where(generator.random(pasts.shape) < 0.1, generator.integers(vocabulary, size=pasts.shape), pasts)
        moved = distances(reference, changed, window)
        better = moved > found
        pasts[better], found[better] = changed[better], moved[better]
    return pasts, found


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    recurrent=st.floats(0.02, 1.5),
    driven=st.floats(0.05, 3.0),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 8),
    feed_forward=st.sampled_from((0, 5)),
    epsilon=st.sampled_from((1e-5, 0.25)),
    front=st.sampled_from((None, {"blocks": 2, "kernel_size": 3, "feed_forward": 4})),
    length=st.integers(1, 30),
)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_every_past_is_within_the_radius(
    cell: Kind,
    block: str,
    seed: int,
    recurrent: float,
    driven: float,
    layers: int,
    hidden: int,
    feed_forward: int,
    epsilon: float,
    front: dict[str, int] | None,
    length: int,
) -> None:
    fields: dict[str, object] = {"hidden": hidden, "embedding": hidden}
    if block == "residual":
        fields |= {"feed_forward": feed_forward, "norm_epsilon": epsilon, "front": front, "units": hidden + seed % 3}
    if cell == "gated" and seed % 2:
        fields["gate_caps"] = (0.7,) * layers
    model = architecture(cell, block, layers, **fields)
    weights, generator = random_weights(model, seed, recurrent, driven), np.random.default_rng(seed)
    window = generator.integers(model.vocabulary_size, size=length)
    request = RequestBound(model, weights)
    bound = request(window[None])
    reference = Reference(model, weights)
    np.testing.assert_allclose(bound.hidden, run(reference, window[None]), rtol=0, atol=1e-9)
    pasts, found = worst_pasts(reference, window, generator)
    assert found.max() <= bound.radius[0]
    pushed = Adversary(model, weights).flipped(pasts[-PUSHED:], LONGEST_PAST, FLIPS, window)
    assert distances(reference, pushed, window).max() <= bound.radius[0]
    pasts = np.concatenate([pasts, pushed])
    if Top1(model, weights, request).proved(bound)[0]:
        logits = reference.logits(run(reference, after(pasts, window)))
        assert (logits.argmax(axis=1) == reference.logits(bound.hidden[0]).argmax()).all()


@pytest.mark.parametrize("cap", [0.8, 0.98])
def test_long_windows_stay_within_their_radius_with_a_cap_that_float32_rounds_up(cap: float) -> None:
    """Uses windows so long that the past tokens have no effect. So `hidden` could change by more than the radius only
    if the bound were computed with another cap than the run uses."""
    assert float(np.float32(cap)) > cap
    model = architecture("gated", "residual", gate_caps=(cap,), hidden=8, embedding=8, vocabulary_size=12)
    weights = random_weights(model, seed=0)
    past, window = np.split(np.random.default_rng(0).integers(12, size=(4, 600)), 2, axis=1)
    reference, bound = Reference(model, weights), RequestBound(model, weights)(window)
    apart = np.linalg.norm(run(reference, np.concatenate([past, window], axis=1)) - bound.hidden, axis=1)
    assert np.all(apart <= bound.radius)
    assert bound.radius.max() < 1e-9


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", ["linear", "rnn_relu"])
def test_states_that_may_grow_without_limit_are_unbounded(cell: Kind, block: str) -> None:
    """Uses cells whose states grow without limit, before the window and within the window, so they have no finite
    bound.

    After a LayerNorm there is still a bound, because the length of its output is limited.
    """
    model = architecture(cell, block)
    weights = random_weights(model, seed=0, recurrent=3)
    if cell == "rnn_relu":
        weights["layers.0.cell.weight_hh_l0"] = np.abs(weights["layers.0.cell.weight_hh_l0"])
    generator, request = np.random.default_rng(0), RequestBound(model, weights)
    reference, top1 = Reference(model, weights), Top1(model, weights, request)
    window = generator.integers(model.vocabulary_size, size=120)
    bound = request(window[None])
    ends = run(reference, after(generator.integers(model.vocabulary_size, size=(PASTS, LONGEST_PAST)), window))
    assert np.abs(bound.steps[0].state[0]).max() > 1e30
    apart = ends - bound.hidden
    assert np.linalg.norm(apart, axis=1).max() <= bound.radius[0]
    gaps = reference.head[:1] - reference.head[1:]
    assert (np.abs(apart @ gaps.T).max(axis=0) <= top1.moved(bound, gaps, np.zeros(len(gaps), np.intp))).all()
    assert not top1.proved(bound)[0]
    assert np.isinf(bound.radius[0]) == (block == "plain")
    assert top1.variation(bound)[0] == 1 or block == "residual"
