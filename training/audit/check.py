"""Compares an imported model with the logits that its own program computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wane.models.networks import Network
from wane.training.audit.foreign_model import ForeignModel
from wane.training.errors import ForeignError

LARGEST_DIFFERENCE = 1e-3
"""The largest difference of a log-probability, in nats, that is attributed to rounding."""

NOT_CHECKED = "these assumptions were not checked: --check compares with the model's own logits (docs/audit.md)"


def check_logits(path: Path, model: ForeignModel) -> str:
    """Compares the log-probabilities of the imported model with those of a safetensors file. Returns a note.

    The file has the tensors `tokens`, the ids of one sequence of n tokens, which the model reads from the zero state,
    and `logits`, the model's own logits (n, V) after each token, or (1, V) after the last one. Axes of length 1 are
    ignored. Log-probabilities instead of logits are the same. Raises ForeignError if the file cannot be read, or if the
    models differ by more than rounding.
    """
    tokens, own = _read(path, model.architecture.vocabulary_size)
    network = Network(model.architecture).eval()
    network.load_weights({name: torch.from_numpy(np.array(tensor)) for name, tensor in model.weights.items()})
    with torch.no_grad():
        found = network.logits(network(tokens[:, None])[0])[-len(own) :, 0]
    differences = (found.double().log_softmax(-1) - own.double().log_softmax(-1)).abs()
    largest = float(differences.max())
    if not largest <= LARGEST_DIFFERENCE:
        place, token = divmod(int(differences.argmax()), differences.shape[1])
        place += len(tokens) - len(own)
        raise ForeignError(
            f"{path}: the imported model is another than the one that wrote these logits: after token {place}, a "
            f"log-probability (of id {token}) differs by {largest:.3g} nats. One of these does not hold: "
            + "; ".join(model.assumptions)
        )
    return f"checked with {path.name}: log-probabilities differ by at most {largest:.1e} nats over {len(own)} positions"


def _read(path: Path, size: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens (n) and the logits (n, V) or (1, V). Raises ForeignError."""
    try:
        found = load_file(path)
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror or 'cannot be read'}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise ForeignError(f"{path}: not a safetensors file") from error
    if set(found) != {"tokens", "logits"}:
        raise ForeignError(f"{path}: expected the tensors tokens and logits, found {', '.join(sorted(found))}")
    tokens, logits = found["tokens"], found["logits"]
    if tokens.is_floating_point() or max(tokens.shape, default=1) != tokens.numel() or not tokens.numel():
        raise ForeignError(
            f"{path}: tokens has shape {list(tokens.shape)} and type {tokens.dtype}, expected the ids of one sequence"
        )
    tokens = tokens.reshape(-1).long()
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise ForeignError(f"{path}: tokens has an id outside of the vocabulary, 0 to {size - 1}")
    if not logits.shape or logits.shape[-1] != size or logits.numel() not in (size, size * len(tokens)):
        raise ForeignError(
            f"{path}: logits has shape {list(logits.shape)}, expected [{len(tokens)}, {size}] or [1, {size}]"
        )
    if not bool(logits.isfinite().all()):
        raise ForeignError(f"{path}: logits has a value that is not finite")
    return tokens, logits.reshape(-1, size)
