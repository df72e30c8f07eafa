"""The loss of a network over a large vocabulary: the full softmax, in pieces, or the sampled softmax.

The loss of a target y is `log Z - s_y` with the logits s and `Z = sum_j exp(s_j)`. The sampled softmax (Bengio and
Senecal 2008; Jean et al. 2015, arXiv 1412.2007) draws N tokens S from a distribution q, once for a whole batch, and
estimates

    Z ~ exp(s_y) + sum_(j in S, j != y) exp(s_j - log(N q_j))

The correction log(N q_j) makes the estimate of Z unbiased for every q > 0. The logarithm of the estimate is biased low
by about half of the estimate's relative variance, so the loss approaches the full softmax's as N grows. As in GRU4Rec
(Hidasi and Karatzoglou 2018, arXiv 1706.03847), all targets of a batch share the drawn tokens, and q is proportional to
a power of the counts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wane.models.networks import Network

POWER = 0.75
"""q is proportional to (count + 1) ** POWER of each token in the training split."""

LOGITS_AT_ONCE = 1 << 24
"""The largest number of logits that a piece of an evaluation holds, 64 MiB."""


def token_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns -log p of each target, in nats: float32 of the shape of `targets`. logits: (..., V). smoothing: the share
    of each target that is spread evenly over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""
    flat = functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    return flat.view_as(targets)


@torch.no_grad()
def full_losses(network: Network, hidden: Tensor, targets: Tensor) -> Tensor:
    """Returns the `token_losses` of the network's logits, without gradients. Computes the logits in pieces, to limit
    the memory. hidden: (n, H). targets: int64 (n,)."""
    rows = max(1, LOGITS_AT_ONCE // network.architecture.vocabulary_size)
    pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([token_losses(network.logits(part), some) for part, some in pieces])


class SampledSoftmax:
    """Draws N tokens per batch and computes the sampled loss.

    counts: (V,), the number of occurrences of each token in the training split. The random numbers come from torch's
    global CPU generator, whose state is in the checkpoints. A resumed run therefore draws the same tokens.
    """

    def __init__(self, counts: Tensor, negatives: int) -> None:
        self._weights = (counts.double() + 1) ** POWER
        self._log_q = torch.log(self._weights / self._weights.sum())
        self._negatives = negatives

    def losses(self, network: Network, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns an estimate of -log p of each target, in nats: float32 (n,). hidden: (n, H). targets: int64 (n,)."""
        drawn = torch.multinomial(self._weights, self._negatives, replacement=True)
        correction = (self._log_q[drawn] + torch.log(torch.tensor(float(self._negatives)))).float().to(targets.device)
        drawn = drawn.to(targets.device)
        weight, bias = network.head.weight, network.head.bias
        hidden = network.dropped(hidden)
        # One read of the rows of both, because the gradient of each read fills a matrix of the whole vocabulary.
        rows, biases = weight[torch.cat([targets, drawn])], bias[torch.cat([targets, drawn])]
        split = [len(targets), len(drawn)]
        (target_rows, drawn_rows), (target_biases, drawn_biases) = rows.split(split), biases.split(split)
        of_target = (hidden * target_rows).sum(-1).float() + target_biases.float()
        of_drawn = functional.linear(hidden, drawn_rows, drawn_biases).float() - correction
        of_drawn = of_drawn.masked_fill(drawn == targets[:, None], -torch.inf)
        losses: Tensor = torch.logsumexp(torch.cat([of_target[:, None], of_drawn], 1), 1) - of_target
        return losses
