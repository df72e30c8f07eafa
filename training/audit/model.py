"""Imports a foreign language model: torch.nn.RNN, GRU or LSTM, or layers in the layouts of `published_layers.py`,
between an embedding and a head.

The recurrent tensors are recognised by torch's names. The kind of cell is recognised by the number of rows of the
recurrent matrix: for H units, an RNN has H rows, a GRU 3H and an LSTM 4H. The embedding and the head are recognised by
their usual names. Without such a name, a matrix is recognised by its shape if it is the only one that fits.
`ForeignModel.notes` lists every assumption and conversion. A tensor without a place in the imported model is an error,
because the model might compute a different function without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from wane.models.architecture import Architecture
from wane.models.layer_registry import read_layer
from wane.training.audit.checkpoint import Checkpoint
from wane.training.audit.embedding_and_head import find_embedding_and_head, outer_weights
from wane.training.audit.foreign_model import ForeignModel
from wane.training.audit.layers import find_layers, layer_weights
from wane.training.audit.published_layers import PublishedLayers, find_published_layers
from wane.training.audit.tensor_map import TensorMap


def import_model(
    checkpoint: Checkpoint,
    mapping: dict[str, str] | None = None,
    ignore: Sequence[str] = (),
    nonlinearity: str | None = None,
) -> ForeignModel:
    """Imports the model of a checkpoint.

    `mapping`: the result of `tensor_names.parse_mapping`. `ignore`: patterns for the names of tensors that do not
    belong to the model. `nonlinearity`: "tanh" or "relu" for an RNN, "identity" or "positive" for
    a minGRU. If it is None, an RNN is assumed to have tanh.
    Raises ForeignError, which names the tensor and the expected shape or name.
    """
    tensors = TensorMap(checkpoint, mapping or {}, ignore)
    layers = find_published_layers(tensors, nonlinearity) or find_layers(tensors, nonlinearity)
    outer = find_embedding_and_head(tensors, layers)
    if tensors.unassigned:
        left = tensors.describe(sorted(tensors.unassigned))
        raise tensors.error(
            f"tensors that are not part of the embedding, recurrent layers or head: {left}. If they do not "
            "change what the model computes (an optimiser's, another head's), skip them with "
            "--ignore PATTERN; if they do, Wane cannot express this model"
        )
    weights = layers.weights if isinstance(layers, PublishedLayers) else layer_weights(tensors, layers)
    outer_weights(tensors, outer, layers, weights)
    tensors.note_conversions()
    try:
        if isinstance(layers, PublishedLayers):
            layers.move_after(weights, tensors.names)
            specs = layers.specs
        else:
            specs = (read_layer({"kind": layers.cell, "units": max(layers.sizes)}),) * len(layers.names)
        architecture = Architecture(
            vocabulary_size=len(weights["embedding.weight"]),
            embedding=weights["embedding.weight"].shape[1],
            layers=specs,
            tied="head.weight" not in weights,
        )
    except ValidationError as error:
        raise tensors.error(f"Wane cannot serve this model: {error.errors()[0]['msg']}") from error
    return ForeignModel(architecture, weights, tensors.names, tuple(tensors.notes), tuple(tensors.assumptions))
