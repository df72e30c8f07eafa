"""The average of the weights over the last training steps (Polyak and Juditsky 1992; Merity et al. 2017, arXiv
1708.02182, section 3).

A constant learning rate leaves the weights in motion around a minimum. Their average is nearer to it, so no learning
rate has to be lowered at a step that must be known beforehand, and a finished run may be continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """The mean of a network's parameters after each of `count` steps. Parameters that are shared are averaged once."""

    def __init__(self, network: nn.Module) -> None:
        self._parameters: list[Tensor] = list(network.parameters())
        self._mean: list[Tensor] = []
        self.count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Adds the present parameters to the mean."""
        self.count += 1
        if self.count == 1:
            self._mean = [parameter.detach().clone() for parameter in self._parameters]
        else:
            torch._foreach_lerp_(self._mean, self._parameters, 1 / self.count)

    def clear(self) -> None:
        """Forgets all parameters that were added."""
        self._mean, self.count = [], 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the network the averaged parameters, and afterwards its own again. Does nothing if none were added."""
        own = [parameter.detach().clone() for parameter in self._parameters] if self.count else []
        self._load(self._mean)
        try:
            yield
        finally:
            self._load(own)

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs."""
        return {"mean": self._mean, "count": self.count}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores an average that `state` returned."""
        device = self._parameters[0].device
        self._mean, self.count = [tensor.to(device) for tensor in saved["mean"]], saved["count"]

    @torch.no_grad()
    def _load(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters if values else (), values, strict=True):
            parameter.copy_(value)
