"""Distillation: a trained network, the teacher, whose predictions are targets too (Hinton et al. 2015, arXiv
1503.02531).

With the share w of the teacher and the temperature T, the loss of a target y is

    (1 - w) * -log p_y  +  w * T**2 * KL(softmax(teacher's logits / T) || softmax(logits / T))

T**2 keeps the size of the gradient for every T. The teacher reads the same batches as the network, with its own states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from wane.training.errors import RunError
from wane.training.lanes import Batch
from wane.training.losses.sampled_softmax import token_losses
from wane.training.run_folder import RunFolder

if TYPE_CHECKING:
    from wane.training.config import TeacherConfig
    from wane.training.data import Corpus


class Teacher:
    """A teacher on a device, its states, one tensor (lanes, *shape) each, and the SHA-256 of its weights, `digest`."""

    def __init__(self, config: TeacherConfig, corpus: Corpus, lanes: int, device: torch.device) -> None:
        """Raises RunError if the teacher's vocabulary is not that of `corpus`, or if its run folder has no weights."""
        folder = RunFolder(config.run)
        if folder.tokenizer_json() != corpus.tokenizer_json:
            raise RunError(f"training.teacher.run: {config.run} has another vocabulary")
        self._config = config
        self._network = folder.network(corpus.vocabulary.size)[0].requires_grad_(False).to(device)
        self.state = self._network.zero_state(lanes)
        self.digest = self._network.digest()

    def losses(self, batch: Batch, logits: Tensor, carried: bool) -> Tensor:
        """Returns the loss of each target. Advances the teacher's states by the batch. logits: (..., V), those of the
        targets that are not padding. carried: whether the batch continues the batch before."""
        temperature, share = self._config.temperature, self._config.weight
        with torch.no_grad():
            hidden, self.state = self._network(batch.inputs, self.state if carried else None)
            taught = functional.log_softmax(self._network.logits(batch.chosen(hidden)).float() / temperature, -1)
        learned = functional.log_softmax(logits.float() / temperature, -1)
        apart = functional.kl_div(learned, taught, reduction="none", log_target=True).sum(-1)
        return (1 - share) * token_losses(logits, batch.chosen(batch.targets)) + share * temperature**2 * apart
