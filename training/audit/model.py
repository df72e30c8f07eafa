"""Imports a foreign language model: torch.nn.RNN, GRU or LSTM between an embedding and a head.

The recurrent tensors are recognised by torch's names. The kind of cell is recognised by the number of rows of the
recurrent matrix: for H units, an RNN has H rows, a GRU 3H and an LSTM 4H. The embedding and the head are recognised by
their usual names. Without such a name, a matrix is recognised by its shape if it is the only one that fits.
`ForeignModel.notes` lists every assumption and conversion. A tensor without a place in the imported model is an error,
because the model might compute a different function without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ValidationError

from wane.models.architecture import Architecture
from wane.models.layer_registry import read_layer
from wane.training.audit.checkpoint import Checkpoint
from wane.training.audit.embedding_and_head import find_embedding_and_head, outer_weights
from wane.training.audit.layers import find_layers, layer_weights
from wane.training.audit.tensor_map import Array, TensorMap

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


def import_model(
    checkpoint: Checkpoint,
    mapping: dict[str, str] | None = None,
    ignore: Sequence[str] = (),
    nonlinearity: str | None = None,
) -> ForeignModel:
    """Imports the model of a checkpoint.

    `mapping`: the result of `tensor_names.parse_mapping`. `ignore`: patterns for the names of tensors that do not
    belong to the model. `nonlinearity`: "tanh" or "relu" for an RNN. If it is None, an RNN is assumed to have tanh.
    Raises ForeignError, which names the tensor and the expected shape or name.
    """
    tensors = TensorMap(checkpoint, mapping or {}, ignore)
    layers = find_layers(tensors, nonlinearity)
    outer = find_embedding_and_head(tensors, layers)
    if tensors.unassigned:
        left = tensors.describe(sorted(tensors.unassigned))
        raise tensors.error(
            f"tensors that are not part of the embedding, recurrent layers or head: {left}. If they do not "
            "change what the model computes (an optimiser's, another head's), skip them with "
            "--ignore PATTERN; if they do, Wane cannot express this model"
        )
    weights = layer_weights(tensors, layers)
    outer_weights(tensors, outer, layers, weights)
    tensors.note_conversions()
    try:
        layer = {"kind": layers.cell, "units": max(layers.sizes)}
        architecture = Architecture(
            vocabulary_size=len(weights["embedding.weight"]),
            embedding=weights["embedding.weight"].shape[1],
            layers=(read_layer(layer),) * len(layers.names),
            tied="head.weight" not in weights,
        )
    except ValidationError as error:
        raise tensors.error(f"Wane cannot serve this model: {error.errors()[0]['msg']}") from error
    return ForeignModel(architecture, weights, tensors.names, tuple(tensors.notes), tuple(tensors.assumptions))


def add_unused_tokens(model: ForeignModel, count: int) -> ForeignModel:
    """Adds `count` tokens after the last token. The model never reads them and predicts them with probability 0. The
    probabilities of the other tokens do not change.

    The logit of a token v with the bias b_v and the row w_v of the head's matrix is at least b_v - |w_v|_1, because the
    output of every unit is in [-1, 1]. (This does not hold for ReLU units, whose outputs have no upper limit.) An added
    token has a row of zeros, and a bias that is lower than the largest of these lower bounds by `IMPOSSIBLE`.
    """
    if not count:
        return model
    weights = dict(model.weights)
    head = weights.get("head.weight", weights["embedding.weight"])
    bias = (weights["head.bias"] - np.abs(head).sum(axis=1)).max() - IMPOSSIBLE
    for name in {"embedding.weight", "head.weight"} & weights.keys():
        weights[name] = np.pad(weights[name], ((0, count), (0, 0)))
    weights["head.bias"] = np.append(weights["head.bias"], np.full(count, bias, np.float32))
    size = model.architecture.vocabulary_size + count
    return replace(model, weights=weights, architecture=model.architecture.model_copy(update={"vocabulary_size": size}))
