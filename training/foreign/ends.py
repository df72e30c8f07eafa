"""What stands below and above the recurrent layers of a checkpoint: the embedding and the head."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from wane.training.foreign.layers import Layers
from wane.training.foreign.names import EMBEDDINGS, HEADS, kind
from wane.training.foreign.shelf import Shelf

LARGEST_ONE_HOT = 4096
"""Tokens up to which a model without an embedding is given the identity for one."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Names of tensors. No embedding: the inputs are one-hot; no head: it is the embedding; no bias: zeros."""

    embedding: str | None
    head: str | None
    bias: str | None


def find_ends(shelf: Shelf, layers: Layers) -> Ends:
    """Embedding and head by --map, by the usual names, or by their shapes. Raises ForeignError."""
    inputs, top = layers.inputs, layers.sizes[-1]
    embedding, head, bias = (shelf.mapped(name) for name in ("embedding", "head", "head.bias"))
    embedding = embedding or _find(shelf, "embedding", EMBEDDINGS, lambda width: width == inputs)
    head = head or _find(shelf, "head", HEADS, lambda width: width == top)
    either = embedding or head
    vocabulary = shelf.matrix(either)[0] if either else 0
    if embedding is None:
        embedding, head = _without_embedding(shelf, head, inputs, top)
    elif head is None:
        if inputs != top:
            raise shelf.error(
                f"no head: expected a matrix of shape [{vocabulary}, {top}] beside the embedding "
                f"{shelf.told([embedding])}; name it with --map head=NAME"
            )
        shelf.notes.append("there is no head: it is taken to be tied to the embedding")
    if embedding is not None:
        shelf.expect(embedding, (vocabulary, inputs))
    if head is not None:
        shelf.expect(head, (vocabulary, top))
    bias = bias or _bias(shelf, head or embedding or "", vocabulary)
    if bias is None:
        shelf.notes.append("the head has no bias: zeros")
    else:
        shelf.expect(bias, (vocabulary,))
    return Ends(embedding, head, bias)


def _find(shelf: Shelf, what: str, usual: frozenset[str], fits: Callable[[int], bool]) -> str | None:
    """The matrix that is called as usual, of several the one that fits; or else the only one that fits."""
    matrices = [name for name in sorted(shelf.left) if len(shelf.shape(name)) == 2]
    fitting = [name for name in matrices if fits(shelf.shape(name)[1])]
    called = [name for name in matrices if kind(name) is usual]
    candidates = [name for name in called if name in fitting] or called
    if not candidates:
        candidates = [name for name in fitting if kind(name) is None]
        if len(candidates) == 1:
            shelf.notes.append(f"{candidates[0]} is taken to be the {what}, by its shape")
    if len(candidates) > 1:
        raise shelf.error(
            f"more than one matrix may be the {what}: {shelf.told(candidates)}; choose with --map {what}=NAME"
        )
    shelf.left -= set(candidates)
    return candidates[0] if candidates else None


def _without_embedding(shelf: Shelf, head: str | None, inputs: int, top: int) -> tuple[str | None, str | None]:
    """Embedding and head of a file with a head alone: tied, and saved once under its name; or inputs are one-hot."""
    if head is None:
        raise shelf.error(f"neither an embedding, [V, {inputs}], nor a head, [V, {top}]; name them with --map")
    vocabulary = shelf.matrix(head)[0]
    if inputs == top:
        shelf.notes.append(f"there is no embedding: it is taken to be tied to {head}")
        return head, None
    if inputs == vocabulary <= LARGEST_ONE_HOT:
        shelf.notes.append(
            f"there is no embedding, and {inputs} inputs: taken to be one-hot, the embedding the identity"
        )
        return None, head
    raise shelf.error(
        f"no embedding: expected a matrix of shape [{vocabulary}, {inputs}] beside the head {shelf.told([head])}; "
        "name it with --map embedding=NAME"
    )


def _bias(shelf: Shelf, matrix: str, vocabulary: int) -> str | None:
    """The vector beside the output matrix, or the only one called as a head is."""
    name: str | None = re.sub(r"weight$", "bias", matrix)
    if name not in shelf.left:
        vectors = [name for name in shelf.left if shelf.shape(name) == (vocabulary,) and kind(name) is HEADS]
        name = vectors[0] if len(vectors) == 1 else None
    shelf.left -= {name} if name else set()
    return name
