from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wane.models.architecture import Architecture
from wane.models.constraints import project
from wane.models.constraints.spectral_limit import clip_singular_values
from wane.models.layer_registry import FADING, Kind, read_layer
from wane.models.networks import Network

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))
SEEDS = st.integers(0, 2**32 - 1)


def ill_conditioned(seed: int, shape: tuple[int, ...], decades: float) -> torch.Tensor:
    """Returns a matrix whose entries span many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (decades * (2 * torch.rand(shape, generator=generator) - 1))
    return torch.randn(shape, generator=generator) * spread


def spectral_norm(matrix: torch.Tensor) -> float:
    return float(np.linalg.norm(matrix.double().numpy(), 2))


@settings(deadline=None)
@given(SHAPES, SEEDS, st.floats(0, 6), st.floats(1e-2, 1e2), st.booleans())
def test_clipping_meets_the_limit_and_no_column_grows(
    shape: tuple[int, int], seed: int, decades: float, limit: float, has_gain: bool
) -> None:
    matrix = ill_conditioned(seed, shape, decades)
    gain = ill_conditioned(seed + 1, shape[1:], decades) if has_gain else torch.ones(shape[1])
    clipped = matrix.clone()
    clip_singular_values(clipped, limit, gain if has_gain else None)
    assert spectral_norm(clipped.double() * gain) <= limit * (1 + 1e-5)
    columns = clipped.norm(dim=0), matrix.norm(dim=0)
    assert torch.all(columns[0] <= columns[1] * (1 + 1e-5))
    again = clipped.clone()
    clip_singular_values(again, limit, gain if has_gain else None)
    torch.testing.assert_close(again, clipped, rtol=1e-5, atol=1e-5 * float(clipped.abs().max()))


@settings(deadline=None)
@given(SHAPES, SEEDS, st.floats(0.1, 10), st.booleans())
def test_clipping_gives_the_nearest_matrix_of_the_ball(
    shape: tuple[int, int], seed: int, limit: float, has_gain: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    gain = torch.randn(shape[1], generator=generator, dtype=torch.float64) if has_gain else torch.ones(shape[1])
    clipped = matrix.clone()
    clip_singular_values(clipped, limit, gain if has_gain else None)
    moved = (matrix - clipped) * gain
    for _ in range(20):
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
        other *= limit / torch.linalg.matrix_norm(other, ord=2)
        # If a point is projected onto a convex set, the plane through the projected point, perpendicular to the line
        # between the two points, separates the original point from the set.
        assert torch.sum(moved * (other - clipped * gain)) <= 1e-4 * (1 + moved.norm())


def test_a_matrix_within_the_limit_is_not_changed() -> None:
    matrix = torch.randn(6, 4)
    clipped = matrix.clone()
    clip_singular_values(clipped, spectral_norm(matrix) * (1 + 1e-6))
    assert torch.equal(clipped, matrix)


@pytest.mark.parametrize("feed_forward", [0, 5, 20])
@pytest.mark.parametrize("cell", FADING)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, limit=st.floats(0.1, 10))
def test_project_meets_the_spectral_limit_and_the_contraction(
    cell: Kind, feed_forward: int, seed: int, limit: float
) -> None:
    torch.manual_seed(seed)
    hidden = 8
    spec = read_layer({"kind": cell, "units": hidden, "block": "residual", "feed_forward": feed_forward})
    network = Network(Architecture(vocabulary_size=20, embedding=hidden, layers=(spec, spec)))
    with torch.no_grad():
        for number, tensor in enumerate(network.parameters()):
            tensor.copy_(ill_conditioned(seed + number, tuple(tensor.shape), 1.0))
    project(network, (0.7, 0.9), limit)
    weights = network.weights()
    parameter, _ = spec.input_tensors
    gates = {"gru": 3, "lstm": 4, "gated": 2}.get(cell, 1)
    for layer in range(2):
        prefix = f"layers.{layer}."
        held = [weights[prefix + "mix.weight"]]
        held += (weights[f"{prefix}cell.{parameter}"] * weights[prefix + "norm.weight"]).split(hidden)
        assert len(held) == 1 + gates
        if feed_forward:
            held.append(weights[prefix + "feed_forward_out.weight"])
            held.append(weights[prefix + "feed_forward_in.weight"] * weights[prefix + "feed_forward_norm.weight"])
        assert max(spectral_norm(matrix) for matrix in held) <= limit
