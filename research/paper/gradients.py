"""Figure 2 of the source: the norm of a loss's gradient with respect to an earlier input, against the lag."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.summary import digits
from research.paper.corpora import Corpus
from research.paper.network import PaperNetwork

LAGS = 48
POSITIONS = 128


def gradient_norms(network: PaperNetwork, corpus: Corpus, lags: int = LAGS, positions: int = POSITIONS) -> list[float]:
    """Returns the mean 2-norm of the gradient of the loss at position t + i with respect to the embedding at position
    t, for i = 0, 1, ..., lags - 1.

    The positions are spread evenly over the test split of a stream. The state before each position is that after the
    `lags` inputs before it.
    """
    network.eval()
    ((inputs, targets),) = corpus.splits["test"]
    lags = min(lags, (len(inputs) - 1) // 3)
    begins = torch.from_numpy(np.linspace(lags, len(inputs) - lags, positions).astype(np.int64)).unique()
    before = inputs[begins - torch.arange(lags, 0, -1)[:, None]]
    with torch.no_grad():
        _, state = network.forwards(network.embedded(before))
    places = begins + torch.arange(lags)[:, None]
    x = network.embedded(inputs[places]).detach().requires_grad_()
    y, _ = network.forwards(x, state)
    norms = []
    for lag in range(lags):
        loss = network.losses(y[lag], targets[places[lag]]).sum()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=lag + 1 < lags)
        norms.append(digits(float(gradient[0].norm(dim=1).mean())))
    return norms
