"""A training loss that rewards predictions that a window can prove.

A window's top-1 token is proved to equal the uninterrupted run's if its lead (the difference of two logits) over every
other token exceeds the change that the truncated past can still cause (`models/certificate/request.py`). In a network
of one gated layer, with or without convolution blocks, the tokens before a window affect the prediction at its end
through each unit's state. With convolution blocks they also affect the gates of the window's first `reach` tokens.
After these tokens, the uninterrupted run's state s and the window's state s~ both lie between -1 and 1, so they differ
by at most 2. Each later token multiplies the difference by its gate f_t, which is equal in both runs. At the window's
end each unit's states differ by at most:

    e = 2 * prod_(t > reach) f_t     shape (H)

To first order, such a difference changes the lead of token a over token b by at most `sum_i |d(logit_a - logit_b) / d
s_i| e_i`. The competing token b with the largest ratio of this change to the lead determines the loss. The loss is
`log(ratio) + slack`, limited to the range from 0 to `ceiling`. It has an upper limit because a lead near zero cannot be
proved. The lead in the ratio gets no gradient, because the loss should not make the model more confident.

The loss does not limit the memory of units whose states cannot change the top-1 token: units with small weights, or
units that matter only in rare contexts or for rare tokens. Only the caps of the gates limit the memory of these units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cells.gated import GatedCell
from wane.models.networks import Network, ResidualLayer

if TYPE_CHECKING:
    from wane.training.config import ProofConfig

LEAST_LEAD = 1e-3
"""The lower limit, in nats, of the lead in the ratio's denominator. Smaller leads are replaced by this limit."""

LEAST_ADDED = 1e-30
"""The lower limit of the probability that the cache adds to a token. Smaller probabilities are replaced by this limit,
because the logarithm of 0 is not finite."""

TINY = 1e-9


class ProofPressure:
    """The loss term for the predictions at the end of each chunk. A forward hook records the network's latest run."""

    def __init__(self, network: Network, config: ProofConfig) -> None:
        self._network, self._config = network, config
        layer = network.layers[-1]
        assert isinstance(layer, ResidualLayer), "the configuration allows only residual layers: this is a bug"
        self._layer, self._cell = layer, layer.cell
        assert isinstance(self._cell, GatedCell), "the configuration allows only gated cells: this is a bug"
        self._reach = network.architecture.reach
        self._cell.remember = True
        self._below = torch.empty(0)
        layer.register_forward_hook(self._watch)

    def _watch(self, _: nn.Module, inputs: tuple[Tensor, Any], output: tuple[Tensor, tuple[Tensor, ...]]) -> None:
        self._below, (self._state,) = inputs[0][-1], output[1]

    def __call__(self, step: int, shares: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, float]:
        """Returns the loss term for the predictions at the end of the network's latest chunk, and the share of lanes
        (the batch's parallel streams) whose top-1 token is proved, to first order.

        step: the training step, counted from 0. In the first `ramp` steps, the factor of the loss rises to `weight`.
        shares: None for the network alone. For a mixture with a cache: the network's weight, (lanes), and the
        probability that the cache adds to each token, (lanes, V). With `shares`, the leads are computed from the
        mixture's probabilities.
        """
        gates = self._cell.gates
        assert isinstance(gates, Tensor), "the network has not run: this is a bug"
        config, below, state = self._config, self._below.float(), self._state.float()
        seen = len(gates) - self._reach
        longer = 1.0 if config.window is None else (config.window - self._reach) / seen
        error = 2 * torch.exp(longer * torch.log(gates[self._reach :] + TINY).sum(0))
        self._network.eval()
        with torch.autocast(below.device.type, enabled=False):
            hidden = self._network.norm(self._layer.above(below, state))
            logits = self._network.logits(hidden)
            if shares is not None:
                weight, added = shares
                network = functional.log_softmax(logits, -1) + torch.log(weight)[:, None]
                logits = torch.logaddexp(network, torch.log(added.clamp(min=LEAST_ADDED)))
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
