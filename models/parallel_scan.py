"""The linear recurrence `s_t = f_t * s_(t-1) + b_t`, for all t in parallel, with its gradient.

The algorithm is odd-even reduction. It combines each pair of adjacent steps into one step, solves the resulting
recurrence of half the length in the same way, and computes the remaining states from its solution. It needs 2 T
multiply-adds and 2 log2(T) dependent steps. For long sequences, products of gates underflow to zero and never give NaN,
because only products of gates are formed, never `exp(cumsum(log f))`.

Blelloch, "Prefix sums and their applications" (1990); Martin and Cundy, arXiv 1709.04057.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


def _solve(gate: Tensor, inflow: Tensor) -> Tensor:
    """Returns the states (T, ...) of the recurrence from the zero state. The first axis is time."""
    time = gate.shape[0]
    if time == 1:
        return inflow
    even, odd = gate[0 : time - 1 : 2], gate[1::2]
    pair_inflow = torch.addcmul(inflow[1::2], odd, inflow[0 : time - 1 : 2])
    after_pairs = _solve(odd * even, pair_inflow)
    states = torch.empty_like(inflow)
    states[0] = inflow[0]
    states[1::2] = after_pairs
    between = (time - 1) // 2
    torch.addcmul(inflow[2::2], gate[2::2], after_pairs[:between], out=states[2::2])
    return states


class _LinearRecurrence(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, inflow: Tensor, initial: Tensor) -> Tensor:
        first = torch.addcmul(inflow[:1], gate[:1], initial.unsqueeze(0))
        states = _solve(gate, torch.cat([first, inflow[1:]]))
        ctx.save_for_backward(gate, states, initial)
        return states

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients. Let g_t be the given gradient with respect to the output s_t, and d_t the gradient
        that also includes the effect of s_t on all later states. Then `d_t = g_t + f_(t+1) d_(t+1)`, which is the same
        recurrence backwards in time."""
        gate, states, initial = ctx.saved_tensors  # type: ignore[attr-defined]
        later_gate = torch.cat([gate[1:], torch.zeros_like(gate[:1])])
        inflow_gradient = _solve(later_gate.flip(0), gradients[0].flip(0)).flip(0)
        before = torch.cat([initial.unsqueeze(0), states[:-1]])
        return inflow_gradient * before, inflow_gradient, inflow_gradient[0] * gate[0]


def linear_recurrence(gate: Tensor, inflow: Tensor, initial: Tensor) -> Tensor:
    """Computes the states `s_t = gate_t * s_(t-1) + inflow_t`. The result can be differentiated once.

    gate, inflow: (T, ...). initial: (...), the state before the first step. Returns (T, ...).
    """
    result: Tensor = _LinearRecurrence.apply(gate, inflow, initial)  # type: ignore[no-untyped-call]
    return result
