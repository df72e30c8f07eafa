"""Makes a network of Wane from an ONNX graph of an embedding, recurrent layers and an output layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto
from pydantic import ValidationError

from wane.models.architecture import Architecture
from wane.models.layer_registry import read_layer
from wane.training.audit.foreign_model import Array, ForeignModel, read_one_hot
from wane.training.audit.graph.axes import Axes
from wane.training.audit.graph.graph import follow
from wane.training.audit.graph.values import Matrix, Rows, Stage, Unknown, Value
from wane.training.errors import ForeignError


@dataclass(frozen=True, slots=True)
class Logits:
    """The output of a graph that has the logits. axes: its axes, in the graph's order."""

    name: str
    axes: Axes
    stage: Stage


def recognise(path: Path, model: ModelProto, tensors: Mapping[str, NDArray[Any]]) -> tuple[ForeignModel, Logits]:
    """Returns the model of a graph, and which of its outputs has the logits. `model`: as `read_graph` checks it.
    `tensors`: its initialisers. Raises ForeignError, which names the node that Wane cannot express."""
    outputs = follow(model, tensors)
    logits = _logits(path, outputs)
    stage = logits.stage
    weights, names, notes = _weights(path, stage)
    notes += _notes(logits, outputs)
    try:
        architecture = Architecture(
            vocabulary_size=stage.vocabulary,
            embedding=weights["embedding.weight"].shape[1],
            layers=tuple(read_layer({"kind": cell.kind, "units": cell.units}) for cell in stage.cells),
            tied="head.weight" not in weights,
        )
    except ValidationError as error:
        raise ForeignError(f"{path}: Wane cannot serve this model: {error.errors()[0]['msg']}") from error
    return ForeignModel(architecture, weights, names, tuple(notes), ()), logits


def _logits(path: Path, outputs: Mapping[str, Value]) -> Logits:
    """Returns the output with the logits: the first one with layers and an output layer. Raises ForeignError."""
    found = [
        Logits(name, value.axes, value.stage)
        for name, value in outputs.items()
        if isinstance(value, Rows) and value.stage.cells and value.stage.matrix is not None
    ]
    # logits and their probabilities may both be outputs
    distinct = {id(one.stage.matrix): one for one in reversed(found)}
    if len(distinct) > 1:
        raise ForeignError(
            f"{path}: several outputs have an output layer ({', '.join(one.name for one in found)}), and a model of "
            "Wane has one. Export the graph of the next token's logits alone"
        )
    if found:
        if found[0].stage.width != found[0].stage.vocabulary:
            raise ForeignError(
                f"{path}: the output {found[0].name} has {found[0].stage.width} logits for {found[0].stage.vocabulary} "
                "tokens, and a model of Wane predicts the tokens that it reads"
            )
        return found[0]
    reasons = [value.reason for value in outputs.values() if isinstance(value, Unknown)]
    if reasons:
        raise ForeignError(f"{path}: Wane cannot express this graph: {reasons[0]}")
    raise ForeignError(
        f"{path}: no output is computed by an embedding, LSTM, GRU or RNN nodes and an output layer (Gemm, or MatMul "
        f"and Add). Outputs: {', '.join(outputs)}"
    )


def _weights(path: Path, stage: Stage) -> tuple[dict[str, Array], dict[str, str], list[str]]:
    """Returns the weights by Wane's names, their names in the file, and notes."""
    weights: dict[str, Array] = {}
    tensors: dict[str, str] = {}
    notes: list[str] = []
    for place, cell in enumerate(stage.cells):
        for name, matrix in cell.weights.items():
            weights[f"layers.{place}.cell.{name}"] = _single(path, cell.names.get(name, name), matrix)
        tensors |= {f"layers.{place}.cell.{name}": theirs for name, theirs in cell.names.items()}
    if stage.table is None:
        read_one_hot(weights)
        notes.append("there is no embedding: the bottom layer reads one-hot tokens")
    else:
        weights["embedding.weight"] = _single(path, stage.names["table"], stage.table)
        tensors["embedding.weight"] = stage.names["table"]
    embedding = weights["embedding.weight"]
    assert stage.matrix is not None, "the model has no output layer: this is a bug"
    head = _single(path, stage.names["matrix"], stage.matrix)
    if head.shape == embedding.shape and np.array_equal(head, embedding):
        notes.append("the output layer's matrix equals the embedding's: the two are tied")
    else:
        weights["head.weight"], tensors["head.weight"] = head, stage.names["matrix"]
    bias = np.zeros(len(head), np.float32) if stage.bias is None else stage.bias
    weights["head.bias"] = _single(path, stage.names.get("bias", "bias"), bias)
    if "bias" in stage.names:
        tensors["head.bias"] = stage.names["bias"]
    if merged := [f"{ours}: {theirs}" for ours, theirs in tensors.items() if "@" in theirs]:
        notes.append(f"matrices without a function between them are multiplied to one: {', '.join(merged)}")
    return weights, tensors, notes


def _single(path: Path, name: str, matrix: Matrix) -> Array:
    """Returns an array in float32. Raises ForeignError for numbers that are not finite."""
    with np.errstate(over="ignore"):
        array: Array = np.ascontiguousarray(matrix, np.float32)
    if not np.isfinite(array).all():
        raise ForeignError(f"{path}: {name} holds a value that is not finite in float32")
    return array


def _notes(logits: Logits, outputs: Mapping[str, Value]) -> list[str]:
    stage, notes = logits.stage, list[str]()
    nodes = ", ".join(f"{cell.node.removeprefix('the node ')} is {cell.kind} of {cell.units}" for cell in stage.cells)
    notes.append(f"the layers of the graph: {nodes}")
    if stage.ending is not None:
        notes.append(f"the {stage.ending} at the end of the graph is dropped: Wane computes probabilities from logits")
    if stage.last:
        notes.append("the graph has the logits after the last token only; Wane computes them after every token")
    if stage.starts:
        notes.append(
            f"the inputs {', '.join(dict.fromkeys(stage.starts))} are initial states: a session begins with zeros"
        )
    if others := [name for name in outputs if name != logits.name]:
        notes.append(f"outputs that are not read: {', '.join(others)}")
    return notes
