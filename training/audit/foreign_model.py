"""A model that another program wrote, as an architecture and weights of Wane."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture
from wane.training.errors import ForeignError

Array = NDArray[np.float32]

IMPOSSIBLE = 104.0
"""A token whose logit is lower than another token's by at least this many nats has the probability 0 in float32."""


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """The architecture and the weights, named as in `models/weights.py`. `tensors`: each weight's name in the file.
    `assumptions`: what the file does not record (see `TensorMap`)."""

    architecture: Architecture
    weights: dict[str, Array]
    tensors: dict[str, str]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]


def add_unused_tokens(model: ForeignModel, count: int) -> ForeignModel:
    """Adds `count` tokens after the last token. The model never reads them and predicts them with probability 0. The
    probabilities of the other tokens do not change.

    The logit of a token v with the bias b_v and the row w_v of the head's matrix is at least b_v - |w_v|_1, because the
    output of every unit is in [-1, 1]. (This does not hold for ReLU units, whose outputs have no upper limit.) An added
    token has a row of zeros, and a bias that is lower than the largest of these lower bounds by `IMPOSSIBLE`.
    """
    if not count:
        return model
    if model.architecture.layers[-1].kind in ("gated", "lru"):
        raise ForeignError(
            "the vocabulary has no token with a usual name of <eos>, and none can be added to a model whose top layer "
            f"is {model.architecture.layers[-1].kind}: nothing limits its outputs. Name a token with --eos TOKEN"
        )
    weights = dict(model.weights)
    head = weights.get("head.weight", weights["embedding.weight"])
    bias = (weights["head.bias"] - np.abs(head).sum(axis=1)).max() - IMPOSSIBLE
    for name in {"embedding.weight", "head.weight"} & weights.keys():
        weights[name] = np.pad(weights[name], ((0, count), (0, 0)))
    weights["head.bias"] = np.append(weights["head.bias"], np.full(count, bias, np.float32))
    size = model.architecture.vocabulary_size + count
    return replace(model, weights=weights, architecture=model.architecture.model_copy(update={"vocabulary_size": size}))


def read_one_hot(weights: dict[str, Array]) -> None:
    """Adds the embedding of a bottom layer that reads one-hot input. For a vocabulary of V tokens, the layer's input
    matrix has the shape (gates * H, V). If V <= gates * H, the embedding is the identity matrix (V, V). Otherwise, the
    embedding is the transpose of the input matrix, and an identity matrix replaces the input matrix."""
    name = "layers.0.cell.weight_ih_l0"
    gates, vocabulary = weights[name].shape
    if vocabulary <= gates:
        weights["embedding.weight"] = np.eye(vocabulary, dtype=np.float32)
    else:
        weights["embedding.weight"] = np.ascontiguousarray(weights[name].T)
        weights[name] = np.eye(gates, dtype=np.float32)
