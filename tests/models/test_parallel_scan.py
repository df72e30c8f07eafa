from __future__ import annotations

import pytest
import torch

from wane.models.parallel_scan import linear_recurrence


def inputs(time: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(time)
    gate = torch.rand(time, 3, 4, dtype=torch.float64)
    inflow, initial = torch.randn(time, 3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    return gate.requires_grad_(), inflow.requires_grad_(), initial.requires_grad_()


@pytest.mark.parametrize("time", [1, 2, 3, 5, 8, 13, 64])
def test_the_scan_matches_single_steps(time: int) -> None:
    gate, inflow, initial = inputs(time)
    state, states = initial, []
    for index in range(time):
        state = gate[index] * state + inflow[index]
        states.append(state)
    assert torch.allclose(linear_recurrence(gate, inflow, initial), torch.stack(states), rtol=1e-12)


@pytest.mark.parametrize("time", [1, 2, 3, 5, 8, 13])
def test_the_gradient_matches_finite_differences(time: int) -> None:
    assert torch.autograd.gradcheck(linear_recurrence, inputs(time))


def test_gates_that_underflow_result_in_zero_and_not_nan() -> None:
    gate, inflow = torch.full((4096, 1), 1e-8), torch.full((4096, 1), 0.5)
    states = linear_recurrence(gate, inflow, torch.ones(1))
    assert torch.equal(states[1:], torch.full((4095, 1), 0.5))
