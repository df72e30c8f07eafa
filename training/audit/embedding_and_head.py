"""Finds the embedding and the head of a checkpoint, the matrices before and after its recurrent layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from wane.training.audit.layers import Layers
from wane.training.audit.tensor_map import TensorMap
from wane.training.audit.tensor_names import EMBEDDINGS, HEADS, kind

LARGEST_ONE_HOT = 4096
"""The largest vocabulary for which a missing embedding is replaced by the identity."""


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """The file's names of the tensors. If `embedding` is None, inputs are one-hot. If `head` is None, the head is tied
    to the embedding. If `bias` is None, the head's bias is zero."""

    embedding: str | None
    head: str | None
    bias: str | None


def find_embedding_and_head(tensors: TensorMap, layers: Layers) -> EmbeddingAndHead:
    """Finds the embedding and the head by the option --map, by their usual names, or by their shapes. Raises
    ForeignError."""
    inputs, top = layers.inputs, layers.sizes[-1]
    embedding, head, bias = (tensors.mapped(name) for name in ("embedding", "head", "head.bias"))
    embedding = embedding or _find(tensors, "embedding", EMBEDDINGS, lambda width: width == inputs)
    head = head or _find(tensors, "head", HEADS, lambda width: width == top)
    either = embedding or head
    vocabulary = tensors.matrix(either)[0] if either else 0
    if embedding is None:
        embedding, head = _without_embedding(tensors, head, inputs, top)
    elif head is None:
        if inputs != top:
            raise tensors.error(
                f"no head: expected a matrix of shape [{vocabulary}, {top}] for the embedding "
                f"{tensors.describe([embedding])}; name it with --map head=NAME"
            )
        tensors.notes.append("there is no head: assumed to be tied to the embedding")
    if embedding is not None:
        tensors.expect(embedding, (vocabulary, inputs))
    if head is not None:
        tensors.expect(head, (vocabulary, top))
    bias = bias or _bias(tensors, head or embedding or "", vocabulary)
    if bias is None:
        tensors.notes.append("the head has no bias: assumed to be zeros")
    else:
        tensors.expect(bias, (vocabulary,))
    return EmbeddingAndHead(embedding, head, bias)


def _find(tensors: TensorMap, what: str, usual: frozenset[str], fits: Callable[[int], bool]) -> str | None:
    """Returns the name of the matrix that has a usual name, preferably of one whose shape fits. If there is none,
    returns the name of the only matrix whose shape fits."""
    matrices = [name for name in sorted(tensors.unassigned) if len(tensors.shape(name)) == 2]
    fitting = [name for name in matrices if fits(tensors.shape(name)[1])]
    called = [name for name in matrices if kind(name) is usual]
    candidates = [name for name in called if name in fitting] or called
    if not candidates:
        candidates = [name for name in fitting if kind(name) is None]
        if len(candidates) == 1:
            tensors.notes.append(f"{candidates[0]} is assumed to be the {what}, by its shape")
    if len(candidates) > 1:
        raise tensors.error(
            f"several matrices may be the {what}: {tensors.describe(candidates)}; choose one with --map {what}=NAME"
        )
    tensors.unassigned -= set(candidates)
    return candidates[0] if candidates else None


def _without_embedding(tensors: TensorMap, head: str | None, inputs: int, top: int) -> tuple[str | None, str | None]:
    """Returns the embedding's and the head's names for a file without an embedding matrix. Either embedding and head
    are tied and saved as the head, or the inputs are one-hot."""
    if head is None:
        raise tensors.error(f"no embedding [V, {inputs}] and no head [V, {top}]; name them with --map")
    vocabulary = tensors.matrix(head)[0]
    if inputs == top:
        tensors.notes.append(f"there is no embedding: assumed to be tied to {head}")
        return head, None
    if inputs == vocabulary <= LARGEST_ONE_HOT:
        tensors.notes.append(
            f"there is no embedding: the {inputs} inputs are assumed to be one-hot, and the embedding the identity"
        )
        return None, head
    raise tensors.error(
        f"no embedding: expected a matrix of shape [{vocabulary}, {inputs}] for the head "
        f"{tensors.describe([head])}; name it with --map embedding=NAME"
    )


def _bias(tensors: TensorMap, matrix: str, vocabulary: int) -> str | None:
    """Returns the bias that belongs to the output matrix by its name, or else the only vector with a usual name of a
    head."""
    name: str | None = re.sub(r"weight$", "bias", matrix)
    if name not in tensors.unassigned:
        vectors = [name for name in tensors.unassigned if tensors.shape(name) == (vocabulary,) and kind(name) is HEADS]
        name = vectors[0] if len(vectors) == 1 else None
    tensors.unassigned -= {name} if name else set()
    return name
