from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wane.models.constraints.l1_ball import project_rows


def problem(seed: int, rows: int, columns: int, weightless: float, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weights = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    weights[torch.rand(rows, columns, generator=generator) < weightless] = 0
    return points, weights, limit * torch.rand(rows, generator=generator, dtype=torch.float64)


PROBLEMS = {
    "seed": st.integers(0, 2**32 - 1),
    "rows": st.integers(1, 5),
    "columns": st.integers(1, 12),
    "weightless": st.floats(0, 1),
    "limit": st.floats(0, 5),
}


@settings(deadline=None)
@given(**PROBLEMS)
def test_rows_are_within_their_limits_and_no_entry_grows(
    seed: int, rows: int, columns: int, weightless: float, limit: float
) -> None:
    points, weights, limits = problem(seed, rows, columns, weightless, limit)
    found = project_rows(points, weights, limits)
    assert torch.all((weights * found.abs()).sum(1) <= limits + 1e-12)
    assert torch.all(found.abs() <= points.abs())
    assert torch.all(found * points >= 0)
    assert torch.equal(found[weights == 0], points[weights == 0])
    torch.testing.assert_close(project_rows(found, weights, limits), found, rtol=0, atol=1e-12)
    within = (weights * points.abs()).sum(1) <= limits
    assert torch.equal(found[within], points[within])


@settings(deadline=None)
@given(**PROBLEMS)
def test_the_projection_is_the_nearest_point_of_the_ball(
    seed: int, rows: int, columns: int, weightless: float, limit: float
) -> None:
    points, weights, limits = problem(seed, rows, columns, weightless, limit)
    found = project_rows(points, weights, limits)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(20):
        other = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        total = (weights * other.abs()).sum(1)
        other = torch.where((total > limits)[:, None], other * (limits / total.clamp(min=1e-300))[:, None], other)
        # If a point is projected onto a convex set, the plane through the projected point, perpendicular to the line
        # between the two points, separates the original point from the set.
        assert torch.all(((points - found) * (other - found)).sum(1) <= 1e-9)


def test_a_limit_of_zero_zeroes_all_weighted_entries() -> None:
    points, weights = torch.tensor([[1.0, -2.0, 3.0]] * 2), torch.tensor([[1.0, 0.0, 0.5]] * 2)
    found = project_rows(points, weights, torch.tensor([0.0, -1.0]))
    assert torch.equal(found, torch.tensor([[0.0, -2.0, 0.0]] * 2))
