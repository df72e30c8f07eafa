"""Compares the network that was made from an ONNX file with onnxruntime's results for the file, on random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, helper

from wane.models.imported.first_run import run_apart
from wane.models.imported.graph_file import GraphError, real_inputs
from wane.models.reference.network import Reference
from wane.training.audit.foreign_model import ForeignModel
from wane.training.audit.graph.axes import FEATURES
from wane.training.audit.graph.model import Logits
from wane.training.errors import ForeignError

LARGEST_DIFFERENCE = 1e-5
"""The largest difference of two logits, divided by the largest logit if it is above 1, that is attributed to rounding.
If the graph ends with a Softmax or LogSoftmax, these are the differences of its results."""

LENGTHS, SEQUENCES = (32, 7), 4
"""The lengths and the number of the random sequences of each run, if the graph does not fix them."""

Array = NDArray[Any]


def check_graph(path: Path, proto: ModelProto, model: ForeignModel, logits: Logits) -> str:
    """Runs the file in a process of its own, and compares. Returns a note. Raises ForeignError if the file cannot be
    run, or if a number differs by more than rounding."""
    generator, largest, compared = np.random.default_rng(0), 0.0, 0
    for length in LENGTHS:
        feeds, tokens, names = _feeds(path, proto, logits, length, generator)
        try:
            theirs = run_apart(path, feeds)[logits.name]
        except GraphError as error:
            raise ForeignError(str(error)) from error
        ours = _own(model, logits, tokens, names)
        if ours.shape != theirs.shape:
            raise ForeignError(
                f"{path}: {logits.name} has shape {list(theirs.shape)}, but the graph was read as one of "
                f"{list(ours.shape)}"
            )
        scale = max(1.0, float(np.abs(theirs).max()))
        difference = float(np.abs(ours - theirs).max()) / scale
        if not difference <= LARGEST_DIFFERENCE:
            raise ForeignError(
                f"{path}: the model that was read from the graph is another than the graph: for random tokens, "
                f"{logits.name} differs by {difference * scale:.3g} from onnxruntime's result (largest: {scale:.3g})"
            )
        largest, compared = max(largest, difference * scale), compared + tokens.size
    return f"checked with onnxruntime: {logits.name} differs by at most {largest:.1e} after {compared} random tokens"


def _feeds(
    path: Path, proto: ModelProto, logits: Logits, length: int, generator: np.random.Generator
) -> tuple[dict[str, Array], Array, list[str]]:
    """Returns the graph's inputs, the tokens in them, and the names of the tokens' dimensions."""
    inputs = {given.name: given for given in real_inputs(proto.graph)}
    source, stage = logits.stage.tokens.name, logits.stage
    given = inputs.pop(source)
    if unread := sorted(inputs.keys() - set(stage.starts)):
        raise ForeignError(
            f"{path}: the input {unread[0]!r} is neither the tokens nor an initial state of a layer. Export the model "
            "without it"
        )
    one_hot = np.dtype(_dtype(given)).kind == "f" and stage.one_hot_input
    names = [f"{source}.{place}" for place in range(len(given.type.tensor_type.shape.dim) - one_hot)]
    sizes = {
        dimension.dim_param: length if name == stage.time else SEQUENCES
        for name, dimension in zip(names, given.type.tensor_type.shape.dim, strict=False)
    }
    own = [length if name == stage.time else SEQUENCES for name in names]
    shape = _shape(given, own)
    tokens = generator.integers(stage.vocabulary, size=shape[: len(names)])
    fed = np.eye(stage.vocabulary)[tokens] if one_hot else tokens
    feeds = {source: fed.astype(_dtype(given))}
    for name, start in inputs.items():
        dimensions = start.type.tensor_type.shape.dim
        feeds[name] = np.zeros(
            _shape(start, [sizes.get(one.dim_param, SEQUENCES) for one in dimensions]), _dtype(start)
        )
    return feeds, tokens, names


def _shape(given: ValueInfoProto, free: Sequence[int]) -> list[int]:
    """Returns the shape of an input. `free`: the sizes of dimensions that it does not fix."""
    fixed = [one.dim_value for one in given.type.tensor_type.shape.dim]
    return [size or (free[place] if place < len(free) else 1) for place, size in enumerate(fixed)]


def _dtype(given: ValueInfoProto) -> Any:
    return helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)


def _own(model: ForeignModel, logits: Logits, tokens: Array, names: Sequence[str]) -> Array:
    """Returns what the graph's output should be, in float64, for tokens whose dimensions have the names `names`."""
    stage = logits.stage
    assert stage.time is not None, "the network has no layer: this is a bug"
    time = names.index(stage.time)
    moved = np.moveaxis(tokens, time, 0)
    reference = Reference(model.architecture, model.weights)
    state: Mapping[str, Array] = reference.zero_state(moved[0].size)
    found = []
    for column in moved.reshape(len(moved), -1):
        row, _, state = reference.step(column, state)
        found.append(row)
    values = np.stack(found).reshape(*moved.shape, -1)
    if stage.ending is not None:
        shifted = values - values.max(axis=-1, keepdims=True)
        values = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        values = np.exp(values) if stage.ending == "Softmax" else values
    labels = [stage.time, *(name for name in names if name != stage.time), FEATURES]
    if stage.last:
        values, labels = values[-1], labels[1:]
    places = [labels.index(one.name) for axis in logits.axes for one in axis]
    units = [place for place in range(values.ndim) if place not in places]  # axes of length 1
    sizes = [int(np.prod([values.shape[labels.index(one.name)] for one in axis], dtype=int)) for axis in logits.axes]
    return np.transpose(values, [*units, *places]).reshape(sizes)
