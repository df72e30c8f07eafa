"""A language model from elsewhere, expressed in Wane: torch.nn.RNN, GRU or LSTM between an embedding and a head.

The recurrent tensors are known by torch's names, the cell by their rows (H, 3H, 4H), the embedding and the head by
the usual names or, where only one matrix fits, by their shapes. Nothing is guessed silently: what was assumed or
converted is in `notes`. A tensor without a place is an error, because what it changes would be another model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from wane.models.manifest import Architecture
from wane.training.foreign.checkpoint import Checkpoint
from wane.training.foreign.ends import find_ends
from wane.training.foreign.layers import find_layers, stacked
from wane.training.foreign.shelf import Array, Shelf


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """Architecture and weights as `models/weights.py` names them; `tensors`: what each was called in the file."""

    architecture: Architecture
    weights: dict[str, Array]
    tensors: dict[str, str]
    notes: tuple[str, ...]


def understand(
    checkpoint: Checkpoint,
    mapping: dict[str, str] | None = None,
    ignore: Sequence[str] = (),
    nonlinearity: str | None = None,
) -> ForeignModel:
    """The model of a checkpoint.

    `mapping`: names that are told (`names.parse_mapping`). `ignore`: patterns of tensors that do not belong to it.
    `nonlinearity` of an RNN: "tanh" or "relu". Raises ForeignError naming the tensor, what was expected and found.
    """
    shelf = Shelf(checkpoint, mapping or {}, ignore)
    layers = find_layers(shelf, nonlinearity)
    ends = find_ends(shelf, layers)
    if shelf.left:
        raise shelf.error(
            f"no place in embedding, recurrent layers and head for {shelf.told(sorted(shelf.left))}. Where they do "
            "not change what the model computes (an optimiser's, another head's), leave them out with "
            "--ignore PATTERN; where they do, Wane cannot express this model"
        )
    weights = stacked(shelf, layers)
    hidden = max(layers.sizes)
    if ends.embedding is None:
        weights["embedding.weight"] = np.eye(layers.inputs, dtype=np.float32)
    else:
        weights["embedding.weight"] = shelf.take("embedding.weight", ends.embedding)
    vocabulary = len(weights["embedding.weight"])
    tied = ends.head is None and layers.inputs == hidden
    if not tied:
        name = ends.head or ends.embedding
        assert name is not None, "this is a bug"
        matrix = np.pad(shelf.take("head.weight", name), ((0, 0), (0, hidden - layers.sizes[-1])))
        if layers.inputs == hidden and np.array_equal(matrix, weights["embedding.weight"]):
            shelf.notes.append("the head's matrix is the embedding's: the two are tied")
            tied = True
        else:
            weights["head.weight"] = matrix
    bias = None if ends.bias is None else shelf.take("head.bias", ends.bias)
    weights["head.bias"] = np.zeros(vocabulary, np.float32) if bias is None else bias
    shelf.tell_of_dtypes()
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
        raise shelf.error(f"not a model that can be served: {error.errors()[0]['msg']}") from error
    return ForeignModel(architecture, weights, shelf.names, tuple(shelf.notes))
