"""The causal convolution in torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cells import State

if TYPE_CHECKING:
    from wane.models.architecture import Placed
    from wane.models.layer_registry import Convolution


class CausalConvolution(nn.Module):
    """`y_t = activation(sum_j weight_j x_(t - (K - 1 - j) d) + bias)`; weight: (K, rows), or (K, rows, I) if every unit
    reads all inputs. A depthwise convolution without activation is initialised near the identity."""

    def __init__(self, spec: Convolution, inputs: int) -> None:
        super().__init__()
        self.spec = spec
        shapes = spec.tensors(inputs)
        read = spec.kernel_size * (inputs if spec.channels == "full" else 1)
        self.weight = nn.Parameter(torch.randn(shapes["weight"]) / math.sqrt(read))
        if spec.channels == "depthwise" and spec.activation == "none":
            with torch.no_grad():
                self.weight[-1] += 0.5
        self.bias = nn.Parameter(torch.zeros(shapes["bias"])) if "bias" in shapes else None

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x: (T, B, I). state: the inputs before x, (B, (K - 1) d, I), oldest first. Returns the outputs (T, B, units)
        and the state after them."""
        spec, time = self.spec, len(x)
        seen = torch.cat([state[0].transpose(0, 1), x.float()])
        if spec.channels == "full":
            kernel = self.weight.permute(1, 2, 0)
            y = functional.conv1d(seen.permute(1, 2, 0), kernel, dilation=spec.dilation).permute(2, 0, 1)
        else:
            wide = seen if spec.rows == spec.units else torch.cat([seen, seen], dim=-1)
            y = self.weight[0] * wide[:time]
            for j in range(1, spec.kernel_size):
                y = torch.addcmul(y, self.weight[j], wide[j * spec.dilation : j * spec.dilation + time])
        if self.bias is not None:
            y = y + self.bias
        return _activated(y, spec.activation), (seen[time:].transpose(0, 1),)


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(y)
    if activation == "tanh":
        return torch.tanh(y)
    if activation == "none":
        return y
    value, gate = y.chunk(2, dim=-1)
    return (torch.tanh(value) if activation == "wavenet" else value) * torch.sigmoid(gate)


def build(placed: Placed) -> CausalConvolution:
    """Builds the cell of one layer."""
    return CausalConvolution(cast("Convolution", placed.layer), placed.inputs)
