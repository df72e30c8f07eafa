"""Tests the bounds of the changes of all tokens' logits against the same formulas in float64, without a margin for
float32's rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.random_models import architecture, random_weights
from wane.models.certificate.logit_margins import BLOCK, Beside
from wane.models.certificate.request import RequestBound, WindowBound
from wane.models.certificate.top1 import Top1
from wane.models.reference import Array

FRONT = {"blocks": 2, "kernel_size": 3, "feed_forward": 4}
FLOAT64 = 1e-9


def bounded(
    size: int, layers: int = 1, feed_forward: int = 5, front: dict[str, int] | None = None, scale: float = 1.0
) -> tuple[Top1, WindowBound, Array]:
    """Returns the proofs of a random model with `size` tokens, the bound of one window, and the window's distribution.
    The output matrix is multiplied by `scale`."""
    fields = {"feed_forward": feed_forward, "units": 8, "norm_epsilon": 0.25, "front": front, "tied": False}
    model = architecture("gated", "residual", layers, gate_caps=(0.9,) * layers, vocabulary_size=size, **fields)
    weights, generator = random_weights(model, seed=size), np.random.default_rng(size)
    for name in weights:
        if name.startswith("layers.") and weights[name].ndim == 2:
            weights[name] *= np.float32(0.3)
    weights["head.weight"] *= np.float32(scale)
    request = RequestBound(model, weights)
    top1, bound = Top1(model, weights, request), request(generator.integers(size, size=(1, 14)))
    shares = np.exp(generator.normal(size=size))
    return top1, bound, shares / shares.sum()


def exact(top1: Top1, bound: WindowBound, mixes: list[Array], gain: Array, shares: Array, along: float) -> Array:
    """Returns the bound of each logit's change, (V), computed in float64 with explicit matrices."""
    assert bound.norm is not None
    read = top1.rows * gain
    read -= read.mean(axis=1, keepdims=True)
    read -= shares @ read
    length = np.linalg.norm(read, axis=1)
    unit, factor = bound.norm.derivative(0)
    passed, size, left = factor * (np.eye(len(unit)) - np.outer(unit, unit)), factor, np.zeros(len(read))
    for step, mix in zip(reversed(bound.steps), reversed(mixes), strict=True):
        if step.fed is not None and step.norm is not None:
            live = step.fed.live(0)
            outer = passed @ live.outer
            left += np.abs(read @ outer) @ live.slack + length * size * live.off
            left += np.linalg.norm(((read @ outer) * live.slope) @ live.inner, axis=1) * step.norm.remainder[0]
            inner_unit, inner_factor = step.norm.derivative(0)
            centred = live.inner - live.inner.mean(axis=1, keepdims=True)
            through = (outer * live.slope) @ (inner_factor * (centred - np.outer(centred @ inner_unit, inner_unit)))
            passed, size = passed + through, size + float(np.linalg.norm(through))
        left += np.abs(read @ (passed @ mix)) @ step.error[0].box[0]
    left += length * size * bound.below[0]
    lead = np.abs(read @ unit)
    first = left + length * bound.norm.remainder[0]
    result: Array = np.minimum(first, bound.norm.turned_by(length, lead, 0, left, along))
    np.minimum(result, length * bound.norm.ball[0], out=result)
    return result


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 68])
@pytest.mark.parametrize("feed_forward", [0, 5])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("front", [None, FRONT], ids=["tokens", "front"])
def test_the_bounds_are_close_above_those_of_float64(
    size: int, feed_forward: int, layers: int, front: dict[str, int] | None
) -> None:
    top1, bound, shares = bounded(size, layers, feed_forward, front)
    assert bound.norm is not None
    along = float(top1.stream(bound, bound.norm.along(np.zeros(1, np.intp)), np.zeros(1, np.intp))[0])
    mixes = [mix.weight for mix in top1.mixes]
    expected = exact(top1, bound, mixes, top1.gain, shares, along)
    found, of_mean = top1.margins.moved(bound, 0, shares, along)
    assert (found >= expected * (1 - FLOAT64)).all()
    assert np.median(found / expected) < 1.001
    assert 0 < of_mean < 1e-3 * np.median(found)


@pytest.mark.parametrize("size", [3, BLOCK, 40 * BLOCK + 7])
def test_the_mean_of_all_rows_is_within_its_error(size: int) -> None:
    top1, _, shares = bounded(size)
    read = top1.rows * top1.gain
    mean, off = top1.margins.mean(shares)
    error = float(np.linalg.norm(mean - shares @ (read - read.mean(axis=1, keepdims=True))))
    assert 0 < error <= off < 1e-4 * np.linalg.norm(read, axis=1).max()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e6])
def test_products_that_cancel_are_within_their_rounding(scale: float) -> None:
    generator = np.random.default_rng(0)
    mean = scale * generator.normal(size=256)
    rows = mean + 1e-6 * scale * generator.normal(size=(40, 256))
    columns = generator.normal(size=(256, 5))
    beside = Beside(rows.astype(np.float32), np.linalg.norm(rows, axis=1), mean)
    with np.errstate(under="ignore"):
        errors = np.abs(beside.products(columns) - (rows - mean) @ columns)
    lengths = np.linalg.norm(columns, axis=0)
    for column, length in enumerate(lengths):
        assert (errors[:, column] <= beside.off(float(length))).all()
    assert (errors.sum(axis=1) <= beside.off(float(lengths.sum()), 5.0)).all()
    assert errors.max() > 0


@pytest.mark.parametrize("scale", [1e9, 1e20, 1e30])
def test_rows_that_are_too_large_for_float32_products_have_no_bound(scale: float) -> None:
    top1, bound, shares = bounded(BLOCK, scale=scale)
    found, of_mean = top1.margins.moved(bound, 0, shares, 1.0)
    assert np.isinf(found).all() and np.isinf(of_mean)
    assert top1.variation(bound).tolist() == [1.0]
