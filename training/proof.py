"""A pressure, while training, towards answers that a window can prove.

A window's first token is proved to be the never-interrupted model's when its lead over every other exceeds what the
cut-off past can still change (`models/certificate/request.py`). For a network of one Gated layer, with or without a
front, all that the past still holds after a window is each unit's state, times the product of the gates since:

    e = 2 * prod_(t > reach) f_t              (H): how far the state may be off, as |s|, |s~| < 1

and what that can change of the lead of a over b is, to first order, `sum_i |d(logit_a - logit_b) / d s_i| e_i`. The
pressure is the logarithm of that over the lead, at the rival where it is largest, where it is above `-slack`; above
`ceiling` it presses no more, for a lead of next to nothing is not to be proved by anything. The lead itself is not
pressed: a model has no reason to be surer than it is. Units are then free to remember for as long as the gates' caps
let them wherever what they hold is no threat to the first place: by a small weight, in rare contexts, on rare tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wane.models.cells.gated import GatedCell
from wane.models.networks import Network, ResidualLayer
from wane.training.config import ProofConfig

LEAST_LEAD = 1e-3
"""Nats: leads are taken as at least this."""

TINY = 1e-9


class ProofPressure:
    """Watches a network run, and says how far its latest chunk's last answers are from being proved."""

    def __init__(self, network: Network, config: ProofConfig) -> None:
        self._network, self._config = network, config
        layer = network.layers[-1]
        assert isinstance(layer, ResidualLayer), "checked with the configuration: this is a bug"
        self._layer, self._cell = layer, layer.cell
        assert isinstance(self._cell, GatedCell), "checked with the configuration: this is a bug"
        front = network.architecture.front
        self._reach = 0 if front is None else front.reach
        self._cell.remember = True
        self._below = torch.empty(0)
        layer.register_forward_hook(self._watch)

    def _watch(self, _: nn.Module, inputs: tuple[Tensor, Any], output: tuple[Tensor, tuple[Tensor, ...]]) -> None:
        self._below, (self._state,) = inputs[0][-1], output[1]

    def __call__(self, step: int) -> tuple[Tensor, float]:
        """The pressure at the end of the chunk that the network has just run, to be added to the loss; and the share
        of its rows whose first token is proved, to first order.
        """
        gates = self._cell.gates
        assert isinstance(gates, Tensor), "a network that has not run: this is a bug"
        config, below, state = self._config, self._below.float(), self._state.float()
        seen = len(gates) - self._reach
        longer = 1.0 if config.window is None else (config.window - self._reach) / seen
        error = 2 * torch.exp(longer * torch.log(gates[self._reach :] + TINY).sum(0))
        self._network.eval()
        with torch.autocast(below.device.type, enabled=False):
            hidden = self._network.norm(self._layer.above(below, state))
            logits = self._network.logits(hidden)
            first, *rivals = logits.detach().topk(1 + config.rivals).indices.unsqueeze(2).unbind(1)
            excess = torch.full((len(logits),), -torch.inf, device=logits.device)
            for rival in rivals:
                lead = (logits.gather(1, first) - logits.gather(1, rival)).squeeze(1)
                (slope,) = torch.autograd.grad(lead.sum(), state, create_graph=True)
                change = (slope.abs() * error).sum(1)
                ratio = torch.log(change + TINY) - torch.log(lead.detach().clamp(min=LEAST_LEAD))
                excess = torch.maximum(excess, ratio)
        self._network.train()
        pressed = torch.relu(excess + config.slack).clamp(max=config.ceiling).mean()
        return config.weight * min(1.0, (step + 1) / config.ramp) * pressed, (excess < 0).float().mean().item()
