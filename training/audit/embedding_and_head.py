"""Finds what a checkpoint has before and after its recurrent layers: the embedding, the head, and a projection between
the top layer and the head."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wane.training.audit.foreign_model import Array, read_one_hot
from wane.training.audit.layers import Layers
from wane.training.audit.published_layers import PublishedLayers
from wane.training.audit.tensor_map import TensorMap
from wane.training.audit.tensor_names import EMBEDDINGS, HEADS, OUTER, kind


@dataclass(frozen=True, slots=True)
class Linear:
    """The names, in the file, of the tensors of an affine map. If `bias` is None, the bias is zero. `transposed`:
    whether the matrix has the shape (features, vocabulary), like the weight of a torch.nn.Linear that reads one-hot
    input."""

    weight: str
    bias: str | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """The maps below and above the recurrent layers. If `embedding` is None, the bottom layer reads one-hot input. If
    `head` is None, the head's matrix is tied to the embedding's. `bias`: the head's bias, or None for zeros.
    `projection`: a map between the top layer and the head, or None."""

    embedding: Linear | None
    head: str | None
    bias: str | None
    projection: Linear | None


def find_embedding_and_head(tensors: TensorMap, layers: Layers | PublishedLayers) -> EmbeddingAndHead:
    """Finds the embedding and the head by the option --map, by their usual names, or by their shapes. Finds a
    projection by --map only. Raises ForeignError."""
    inputs, top = layers.inputs, layers.sizes[-1]
    mapped = {name: tensors.mapped(name) for name in OUTER}
    projection = _projection(tensors, mapped, top)
    width = top if projection is None else tensors.matrix(projection.weight)[0]
    table = mapped["embedding"] or _find(
        tensors,
        "embedding",
        EMBEDDINGS,
        lambda name: tensors.matrix(name)[1] == inputs and not _has_output_bias(tensors, name),
    )
    embedding = None if table is None else _embedding(tensors, table, mapped["embedding.bias"], inputs)
    vocabulary = None if embedding is None else _vocabulary(tensors, embedding)
    head = mapped["head"]
    if projection is None and head is None:
        _refuse_projection(tensors, embedding, vocabulary, top)
    head = head or _find(
        tensors,
        "head",
        HEADS,
        lambda name: tensors.matrix(name)[1] == width and vocabulary in (None, tensors.matrix(name)[0]),
    )
    if embedding is None:
        embedding, head = _without_embedding(tensors, head, mapped["embedding.bias"], inputs, width)
    elif head is None:
        if inputs != width:
            raise tensors.error(
                f"no head: expected a matrix of shape [{vocabulary}, {width}] for the embedding "
                f"{tensors.describe([embedding.weight])}; name it with --map head=NAME"
            )
        tensors.notes.append("the file has no head: the head's matrix is assumed to be tied to the embedding")
    if embedding is not None:
        vocabulary = _vocabulary(tensors, embedding)
        tensors.expect(embedding.weight, (inputs, vocabulary) if embedding.transposed else (vocabulary, inputs))
        if embedding.bias is not None:
            tensors.expect(embedding.bias, (inputs,))
    elif head is not None:
        vocabulary = tensors.matrix(head)[0]
    assert vocabulary is not None, "neither an embedding nor a head was found: this is a bug"
    if head is not None:
        tensors.expect(head, (vocabulary, width))
    bias = mapped["head.bias"] or _head_bias(tensors, head, embedding, vocabulary)
    if bias is None:
        tensors.notes.append("the head has no bias: it is assumed to be zero")
    else:
        tensors.expect(bias, (vocabulary,) if len(tensors.shape(bias)) == 1 else _column(tensors, bias, vocabulary))
    tensors.assumptions += [
        "the embedding's rows are assumed to reach the bottom layer as they are",
        *(["no activation is assumed between the top layer and the head"] if projection is None else []),
        "the head's output is assumed to be the logits, without another function on it",
    ]
    return EmbeddingAndHead(embedding, head, bias, projection)


def _matrices(tensors: TensorMap) -> list[str]:
    return [name for name in sorted(tensors.unassigned) if len(tensors.shape(name)) == 2]


def _find(tensors: TensorMap, what: str, usual: frozenset[str], fits: Callable[[str], bool]) -> str | None:
    """Returns the name of the matrix that has one of the names `usual`. If several have such a name, one whose shape
    fits is preferred. If no matrix has such a name, returns the name of the only matrix whose shape fits and whose name
    is not a usual one. Returns None if there is no such matrix. Raises ForeignError if there are several."""
    matrices = _matrices(tensors)
    fitting = [name for name in matrices if fits(name)]
    called = [name for name in matrices if kind(name) is usual]
    candidates = [name for name in called if name in fitting] or called
    if not candidates:
        candidates = [name for name in fitting if kind(name) is None]
        if len(candidates) == 1:
            tensors.notes.append(f"{candidates[0]} is assumed to be the {what}, by its shape")
    return _only(tensors, what, candidates)


def _only(tensors: TensorMap, what: str, candidates: list[str]) -> str | None:
    """Marks the only candidate as assigned, and returns it. Returns None if there is no candidate. Raises ForeignError
    if there are several."""
    if len(candidates) > 1:
        raise tensors.error(
            f"several matrices may be the {what}: {tensors.describe(candidates)}; choose one with --map {what}=NAME"
        )
    tensors.unassigned -= set(candidates)
    return candidates[0] if candidates else None


def _bias_name(tensors: TensorMap, matrix: str) -> str | None:
    """Returns the name of a matrix's bias: for `x.weight`, the vector `x.bias`. Returns None if no unassigned vector
    has this name."""
    name = re.sub(r"weight$", "bias", matrix)
    return name if name != matrix and name in tensors.unassigned and len(tensors.shape(name)) == 1 else None


def _has_output_bias(tensors: TensorMap, matrix: str) -> bool:
    """Whether a matrix has a bias with one number per row, as a head has. An embedding table has no such bias."""
    bias = _bias_name(tensors, matrix)
    return bias is not None and tensors.shape(bias)[0] == tensors.matrix(matrix)[0]


def _own_bias(tensors: TensorMap, matrix: str) -> str | None:
    """Marks a matrix's bias as assigned, and returns its name. Returns None if there is no bias."""
    name = _bias_name(tensors, matrix)
    tensors.unassigned -= {name} if name else set()
    return name


def _embedding(tensors: TensorMap, weight: str, bias: str | None, inputs: int) -> Linear:
    """Returns the embedding with the matrix `weight`. The matrix is assumed to be the weight of a Linear over one-hot
    input if it has one row per input of the bottom layer and, in addition, has a bias or is not square."""
    rows, columns = tensors.matrix(weight)
    bias = bias or _own_bias(tensors, weight)
    transposed = rows == inputs and (bias is not None or columns != inputs)
    if transposed:
        tensors.notes.append(
            f"{weight} is assumed to be the weight of a Linear over one-hot input; the embedding is its transpose"
            + ("" if bias is None else f" plus {bias}")
        )
    return Linear(weight, bias, transposed)


def _vocabulary(tensors: TensorMap, embedding: Linear) -> int:
    return tensors.matrix(embedding.weight)[1 if embedding.transposed else 0]


def _projection(tensors: TensorMap, mapped: dict[str, str | None], top: int) -> Linear | None:
    """Returns the projection that --map names, or None if --map names none. Raises ForeignError unless the projection's
    matrix has one column per unit of the top layer."""
    weight = mapped["projection"]
    if weight is None:
        return None
    width = tensors.matrix(weight)[0]
    tensors.expect(weight, (width, top))
    bias = mapped["projection.bias"] or _own_bias(tensors, weight)
    if bias is not None:
        tensors.expect(bias, (width,))
    tensors.notes.append(
        f"{weight} is a projection without an activation, as --map says: the head's matrix is multiplied by it"
    )
    return Linear(weight, bias)


def _refuse_projection(tensors: TensorMap, embedding: Linear | None, vocabulary: int | None, top: int) -> None:
    """Raises ForeignError if the file may contain a projection between the top layer and the head. This is the case if
    one matrix has the shape (P, top) of a projection, and another the shape (V, P) of a head that reads the
    projection's output, for a vocabulary of V tokens."""
    matrices = _matrices(tensors)
    heads = [*matrices, *([] if embedding is None or embedding.transposed else [embedding.weight])]
    for projection in matrices:
        width, reads = tensors.matrix(projection)
        if reads != top or width == vocabulary:
            continue
        for head in heads:
            rows, columns = tensors.matrix(head)
            if head != projection and columns == width and (rows > width if vocabulary is None else rows == vocabulary):
                raise tensors.error(
                    f"{tensors.describe([projection])} has the shape of a projection between the top layer, which has "
                    f"{top} units, and the head {tensors.describe([head])}. A file does not record whether an "
                    f"activation follows a projection. If none does, give --map projection={projection}. If one does, "
                    "Wane cannot express this model"
                )


def _without_embedding(
    tensors: TensorMap, head: str | None, bias: str | None, inputs: int, width: int
) -> tuple[Linear | None, str | None]:
    """Returns the embedding and the head's name for a file without an embedding matrix of a usual name or shape. Either
    a Linear reads one-hot input, or embedding and head are tied and saved as the head, or the bottom layer reads
    one-hot input."""
    if head is None:
        raise tensors.error(
            f"no embedding of shape [V, {inputs}] and no head of shape [V, {width}] for a vocabulary of V tokens; "
            "name them with --map"
        )
    vocabulary = tensors.matrix(head)[0]
    linear = [name for name in _matrices(tensors) if tensors.matrix(name) == (inputs, vocabulary)]
    if (weight := _only(tensors, "embedding", linear)) is not None:
        return _embedding(tensors, weight, bias, inputs), head
    if inputs == width:
        tensors.notes.append(f"the file has no embedding: it is assumed to be tied to {head}")
        return Linear(head), None
    if inputs == vocabulary:
        tensors.notes.append(
            f"there is no embedding: the {inputs} inputs of the bottom layer are assumed to be one-hot"
        )
        return None, head
    raise tensors.error(
        f"no embedding: expected a matrix of shape [{vocabulary}, {inputs}] for the head "
        f"{tensors.describe([head])}; name it with --map embedding=NAME"
    )


def _head_bias(tensors: TensorMap, head: str | None, embedding: Linear | None, vocabulary: int) -> str | None:
    """Marks the head's bias as assigned, and returns its name. The bias is the vector that belongs to the head's matrix
    in the file (to the embedding's matrix, if the two are tied). If there is none, the bias is the only unassigned
    vector of length `vocabulary` whose name contains a usual word for a head, or else the only unassigned matrix of
    shape (V, 1) or (1, V), as in the GRU4Rec authors' program. Returns None if there is no bias."""
    matrix = head or (embedding.weight if embedding is not None else "")
    if (own := _own_bias(tensors, matrix)) is not None:
        return own
    vectors = [name for name in tensors.unassigned if tensors.shape(name) == (vocabulary,) and kind(name) is HEADS]
    if not vectors:
        vectors = [name for name in tensors.unassigned if tensors.shape(name) in ((vocabulary, 1), (1, vocabulary))]
        if len(vectors) == 1:
            tensors.notes.append(f"{vectors[0]} is assumed to be the head's bias, by its shape")
    name = vectors[0] if len(vectors) == 1 else None
    tensors.unassigned -= {name} if name else set()
    return name


def _column(tensors: TensorMap, bias: str, vocabulary: int) -> tuple[int, int]:
    """Returns the shape that a bias with two axes must have: the one of (V, 1) and (1, V) that is nearer."""
    return (1, vocabulary) if tensors.shape(bias)[0] == 1 else (vocabulary, 1)


def outer_weights(
    tensors: TensorMap, outer: EmbeddingAndHead, layers: Layers | PublishedLayers, weights: dict[str, Array]
) -> None:
    """Adds the weights of the embedding and the head to `weights`, which contains those of the layers. If the head's
    matrix equals the embedding's, or is tied to it, `weights` gets no matrix for the head."""
    hidden = max(layers.sizes)
    if outer.embedding is None:
        if isinstance(layers, PublishedLayers):
            raise tensors.error(
                f"no embedding: Wane reads one-hot input of GRU, LSTM and RNN layers, not of {layers.cell}"
            )
        matrix = None
        read_one_hot(weights)
    else:
        matrix = _table(tensors, "embedding.weight", outer.embedding)
        weights["embedding.weight"] = matrix
        if outer.embedding.bias is not None:
            bias = tensors.take("embedding.bias", outer.embedding.bias)
            weights["embedding.weight"] = matrix + bias
            tensors.names["embedding.weight"] += f" + {tensors.names.pop('embedding.bias')}"
    embedding = weights["embedding.weight"]
    if outer.head is not None:
        matrix = tensors.take("head.weight", outer.head)
    else:
        tensors.names["head.weight"] = tensors.names["embedding.weight"].partition(" + ")[0]
    assert matrix is not None, "neither a head nor an embedding was found: this is a bug"
    bias = np.zeros(len(embedding), np.float32) if outer.bias is None else tensors.take("head.bias", outer.bias).ravel()
    if outer.projection is not None:
        matrix, bias = _project(tensors, outer.projection, matrix, bias)
    matrix = np.pad(matrix, ((0, 0), (0, hidden - layers.sizes[-1])))
    weights["head.bias"] = bias
    if matrix.shape == embedding.shape and np.array_equal(matrix, embedding):
        if outer.head is not None:
            tensors.notes.append("the head's matrix equals the embedding's: the two are tied")
        else:
            del tensors.names["head.weight"]
    else:
        weights["head.weight"] = matrix


def _table(tensors: TensorMap, ours: str, embedding: Linear) -> Array:
    """Returns the embedding's matrix (V, E) without its bias."""
    matrix = tensors.take(ours, embedding.weight)
    if not embedding.transposed:
        return matrix
    tensors.names[ours] += ".T"
    return np.ascontiguousarray(matrix.T)


def _project(tensors: TensorMap, projection: Linear, head: Array, bias: Array) -> tuple[Array, Array]:
    """Merges the projection into the head. Returns the matrix and the bias of the merged head, which reads the top
    layer's output. Computes the products in float64."""
    matrix = tensors.take("projection.weight", projection.weight)
    own = tensors.names["head.weight"]
    tensors.names["head.weight"] = f"{own} @ {tensors.names.pop('projection.weight')}"
    if projection.bias is not None:
        added = head.astype(np.float64) @ tensors.take("projection.bias", projection.bias)
        bias = (bias + added).astype(np.float32)
        terms = [tensors.names.get("head.bias"), f"{own} @ {tensors.names.pop('projection.bias')}"]
        tensors.names["head.bias"] = " + ".join(filter(None, terms))
    return (head.astype(np.float64) @ matrix).astype(np.float32), bias
