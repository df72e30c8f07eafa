"""Imports a foreign language model: torch.nn.RNN, GRU or LSTM between an embedding and a head.

The recurrent tensors are recognised by torch's names, and the cell by its row count (H, 3H, 4H). The embedding and the
head are recognised by their usual names. Without such a name, a matrix is recognised by its shape if it is the only one
that fits. `notes` lists every assumption and conversion. An unassigned tensor is an error, because the imported model
would compute a different function without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from wane.models.manifest import Architecture
from wane.training.audit.checkpoint import Checkpoint
from wane.training.audit.embedding_and_head import find_embedding_and_head
from wane.training.audit.layers import find_layers, layer_weights
from wane.training.audit.tensor_map import Array, TensorMap


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """The architecture and the weights, named as in `models/weights.py`. `tensors`: each weight's name in the file."""

    architecture: Architecture
    weights: dict[str, Array]
    tensors: dict[str, str]
    notes: tuple[str, ...]


def import_model(
    checkpoint: Checkpoint,
    mapping: dict[str, str] | None = None,
    ignore: Sequence[str] = (),
    nonlinearity: str | None = None,
) -> ForeignModel:
    """Imports the model of a checkpoint.

    `mapping`: the result of `tensor_names.parse_mapping`. `ignore`: patterns for the names of tensors that do not
    belong to the model. `nonlinearity`: "tanh" or "relu" for an RNN, None for the default. Raises ForeignError, which
    names the tensor and the expected shape or name.
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
    hidden = max(layers.sizes)
    if outer.embedding is None:
        weights["embedding.weight"] = np.eye(layers.inputs, dtype=np.float32)
    else:
        weights["embedding.weight"] = tensors.take("embedding.weight", outer.embedding)
    vocabulary = len(weights["embedding.weight"])
    tied = outer.head is None and layers.inputs == hidden
    if not tied:
        name = outer.head or outer.embedding
        assert name is not None, "neither a head nor an embedding was found: this is a bug"
        matrix = np.pad(tensors.take("head.weight", name), ((0, 0), (0, hidden - layers.sizes[-1])))
        if layers.inputs == hidden and np.array_equal(matrix, weights["embedding.weight"]):
            tensors.notes.append("the head's matrix equals the embedding's: the two are tied")
            tied = True
        else:
            weights["head.weight"] = matrix
    bias = None if outer.bias is None else tensors.take("head.bias", outer.bias)
    weights["head.bias"] = np.zeros(vocabulary, np.float32) if bias is None else bias
    tensors.note_conversions()
    try:
        architecture = Architecture(
            cell=layers.cell,
            vocabulary_size=vocabulary,
            embedding=layers.inputs,
            hidden=hidden,
            layers=len(layers.names),
            tied=tied,
        )
    except ValidationError as error:
        raise tensors.error(f"Wane cannot serve this model: {error.errors()[0]['msg']}") from error
    return ForeignModel(architecture, weights, tensors.names, tuple(tensors.notes))
