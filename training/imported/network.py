"""An imported graph in the place of a torch network, for the measurements of an audit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from wane.models.bundle import Bundle
from wane.models.export.parity import OnnxGraphs
from wane.models.networks import Network


class GraphNetwork(Network):
    """Runs the graphs of a bundle on the CPU. It has no gradients."""

    def __init__(self, bundle: Bundle) -> None:
        nn.Module.__init__(self)
        self.architecture = bundle.manifest.architecture
        self.embedding = nn.Embedding(1, 1)  # says on which device the tokens are
        self._run = OnnxGraphs(bundle).run

    def zero_state(self, batch: int) -> list[Tensor]:
        """See `Network`."""
        return [torch.zeros(batch, *tensor.shape) for tensor in self.architecture.state_tensors()]

    def forward(self, tokens: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """See `Network`."""
        rows = np.ascontiguousarray(tokens.T.numpy())
        names = [tensor.name for tensor in self.architecture.state_tensors()]
        before = self.zero_state(len(rows)) if state is None else state
        feeds = {name: value.numpy() for name, value in zip(names, before, strict=True)}
        feeds |= {"tokens": rows, "targets": rows, "lengths": np.full(len(rows), rows.shape[1], np.int64)}
        outputs = self._run("scan", feeds)
        hidden = torch.from_numpy(outputs["hiddens"]).transpose(0, 1)
        return hidden, [torch.from_numpy(outputs[f"next.{name}"]) for name in names]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Network`."""
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous().numpy()
        return torch.from_numpy(self._run("head", {"hidden": flat})["logits"]).view(*hidden.shape[:-1], -1)
