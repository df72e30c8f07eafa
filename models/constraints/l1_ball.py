"""The projection of a matrix's rows onto weighted l1 balls. A contraction rule in the maximum norm limits each row's
weighted l1 norm."""

from __future__ import annotations

import torch
from torch import Tensor


def project_rows(rows: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """Returns the nearest rows (R, N) with `sum_j weights_ij |x_ij| <= limits_i`. weights: (R, N), >= 0. limits: (R).

    For each row i there is a number t_i by which its entries shrink: entry j by t_i weights_ij, but not past zero
    (Duchi et al. 2008 for weights of 1). No entry grows, and entries of zero weight do not change. If the limit is zero
    or less, all entries of positive weight become zero.
    """
    size = rows.abs()
    total = (weights * size).sum(1)
    # Entry j is zero for t >= |x_ij| / weights_ij. Between two such values of t, the sum is linear in t.
    ends, order = torch.where(weights > 0, size / weights, 0.0).sort(1, descending=True)
    ordered = weights.gather(1, order)
    sums, squares = (ordered * size.gather(1, order)).cumsum(1), (ordered**2).cumsum(1)
    tried = (sums - limits.clamp(min=0)[:, None]) / squares.clamp(min=torch.finfo(rows.dtype).tiny)
    alive = (ends > tried).sum(1, keepdim=True).clamp(min=1) - 1
    threshold = tried.gather(1, alive)
    threshold = torch.where(limits[:, None] > 0, threshold, ends[:, :1]).clamp(min=0)
    shrunk = rows.sign() * (size - threshold * weights).clamp(min=0)
    return torch.where((total > limits)[:, None], shrunk, rows)
