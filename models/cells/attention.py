"""Causal attention over the last tokens in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.architecture import Placed
from wane.models.cells import State
from wane.models.layer_registry import Attention

EMPTY = -1e9
"""The score of a token before the first one. Its exponential is 0."""


class CausalAttention(nn.Module):
    """Each token reads the last `window` tokens (`models/layer_registry.py` has the equation). The weight's rows are
    queries, keys and values, `units` each."""

    def __init__(self, spec: Attention, inputs: int) -> None:
        super().__init__()
        self.spec = spec
        shapes = spec.tensors(inputs)
        self.weight = nn.Parameter(torch.randn(shapes["weight"]) / math.sqrt(inputs))
        self.positions = nn.Parameter(torch.zeros(shapes["positions"]))
        self.bias = nn.Parameter(torch.zeros(shapes["bias"]))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x: (T, B, I). state: the keys and values of the last tokens before x, (B, window - 1, units) each, oldest
        first, and whether there is such a token, (B, window - 1). Returns the outputs (T, B, units) and the state
        after them."""
        spec, time = self.spec, len(x)
        query, key, value = functional.linear(x, self.weight, self.bias).float().transpose(0, 1).chunk(3, dim=-1)
        keys, values = torch.cat([state[0], key], dim=1), torch.cat([state[1], value], dim=1)
        filled = torch.cat([state[2], state[2].new_ones(len(key), time)], dim=1)

        def heads(rows: Tensor) -> Tensor:
            split: Tensor = rows.reshape(*rows.shape[:2], spec.heads, -1).transpose(1, 2)
            return split  # (B, heads, rows, units / heads)

        scores = heads(query) @ heads(keys).transpose(-1, -2) / math.sqrt(spec.units / spec.heads)
        back = torch.arange(time, device=x.device)[:, None] + spec.reach - torch.arange(keys.shape[1], device=x.device)
        inside = (back >= 0) & (back < spec.window)
        scores = scores + self.positions[:, back.clamp(0, spec.window - 1)]
        scores = scores.masked_fill(~inside, -torch.inf) + (1 - filled[:, None, None]) * EMPTY
        y = (scores.softmax(-1) @ heads(values)).transpose(1, 2).flatten(2)
        return y.transpose(0, 1), (keys[:, time:], values[:, time:], filled[:, time:])


def build(placed: Placed) -> CausalAttention:
    """Builds the cell of one layer."""
    assert isinstance(placed.layer, Attention)
    return CausalAttention(placed.layer, placed.inputs)
