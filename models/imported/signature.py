"""Finds the tokens, the logits and the states among the inputs and outputs of a graph of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from wane.models.imported.graph_file import GraphError, real_inputs

Arrays = dict[str, NDArray[Any]]

TOKEN_TYPES = (TensorProto.INT64, TensorProto.INT32)
STATE_TYPES = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
)
PIECES = {TensorProto.INT64: (22, 21), TensorProto.INT32: (22,), TensorProto.DOUBLE: (24, 24)}
"""The types of states that float32 does not hold exactly, each with the number of bits of all its pieces but the last
one. A session keeps such a state in pieces: of an integer, the lowest bits first; of a float64, the nearest float32 and
then that of the rest."""

TOKEN_NAMES = ("tokens", "token", "input_ids", "ids")
"""The names of the input with the tokens, if several inputs could be the tokens."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input. `shape`: its sizes, None where the size is free. `axis`: the axis of the batch; None if it has none,
    which is possible for a graph of one row only."""

    name: str
    element: int
    shape: tuple[int | None, ...]
    axis: int | None

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row: the sizes of the other axes."""
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.axis and size is not None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(self.element))
        return found

    @property
    def pieces(self) -> int:
        """The number of float32 numbers in which a session keeps a value."""
        return 1 + len(PIECES.get(self.element, ()))

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of one row's state in a session."""
        return (self.pieces, *self.row) if self.pieces > 1 else self.row or (1,)

    def values(self, kept: NDArray[np.float32]) -> NDArray[Any]:
        """Returns the values (B, *row) of a session's states (B, *kept), in int64 or float64."""
        if self.pieces == 1:
            return kept.astype(np.int64 if self.dtype == np.bool_ else np.float64)
        pieces = np.moveaxis(kept.astype(np.float64), 1, 0)
        if self.element == TensorProto.DOUBLE:
            return np.asarray(pieces[0] + (pieces[1] + pieces[2]))
        found, shift = np.zeros(pieces[0].shape, np.int64), 0
        for piece, bits in zip(pieces, (*PIECES[self.element], 0), strict=True):
            found += piece.astype(np.int64) << shift
            shift += bits
        return found

    def batched(self, rows: int) -> tuple[int, ...]:
        """The shape for a batch of `rows` rows."""
        return tuple(rows if axis == self.axis else int(size or 1) for axis, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a graph. `fixed`: whether the graph was exported for a batch of 1."""

    tokens: Port
    states: tuple[Port, ...]
    fixed: bool

    def feeds(self, tokens: NDArray[np.int64], states: Sequence[NDArray[Any]]) -> Arrays:
        """Returns the inputs for tokens (B) and states in the graph's own layout."""
        shape = self.tokens.batched(len(tokens))
        found = {self.tokens.name: tokens.astype(self.tokens.dtype).reshape(shape)}
        return found | {port.name: value for port, value in zip(self.states, states, strict=True)}

    def zeros(self, rows: int) -> list[NDArray[Any]]:
        """Returns the states before the first token."""
        return [np.zeros(port.batched(rows), port.dtype) for port in self.states]

    def batch_axes(self) -> Iterator[Inputs]:
        """Yields these inputs with each choice of the axis of the batch: a graph with a fixed batch of 1 does not say
        which axis of length 1 is the batch. The n-th such axis of every state is chosen together."""
        ones = [[axis for axis, size in enumerate(port.shape) if size == 1] for port in self.states]
        for place in range(max(map(len, ones)) if self.fixed else 1):
            states = [
                replace(port, axis=axes[min(place, len(axes) - 1)]) if self.fixed else port
                for port, axes in zip(self.states, ones, strict=True)
            ]
            yield Inputs(self.tokens, tuple(states), self.fixed)

    def probe(self) -> int:
        """Returns a number of rows that is no other size of the inputs, so that the batch is seen in the outputs."""
        if self.fixed:
            return 1
        sizes = {size for port in (self.tokens, *self.states) for size in port.shape}
        return next(rows for rows in range(3, 3 + len(sizes) + 1) if rows not in sizes)


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs of a graph, the name of its logits, and the name of the next value of each state."""

    inputs: Inputs
    logits: str
    after: tuple[str, ...]


def find_inputs(graph: onnx.GraphProto, tokens: str | None) -> Inputs:
    """Finds the input with the tokens, which is named `tokens` if it is given, and the states. Raises GraphError."""
    values = {value.name: declared(value) for value in real_inputs(graph)}
    token = _token_input(values, tokens)
    element, dims = values.pop(token)
    if not values:
        raise GraphError(f"has no state: its only input is {token!r}. A model without a state needs no session")
    free = [axis for axis, size in enumerate(dims) if not isinstance(size, int)]
    sizes = [size for size in dims if isinstance(size, int)]
    if len(dims) > 2 or len(free) > 1:
        raise GraphError(
            f"the tokens {token!r} have the shape {_shape(dims)}, but one step reads one token of each row: [B] or "
            "[B, 1]"
        )
    if any(size != 1 for size in sizes):
        raise GraphError(
            f"the tokens {token!r} have the shape {_shape(dims)}: export the graph for a batch of 1, or with a free "
            "batch axis (dynamic_axes or dynamic_shapes in torch)"
        )
    batch = dims[free[0]] if free else None
    port = Port(token, element, _sizes(dims), free[0] if free else (0 if dims else None))
    states = tuple(_state(name, *declared, batch, not free) for name, declared in values.items())
    return Inputs(port, states, not free)


def find_outputs(
    inputs: Inputs, outputs: Arrays, vocabulary: int, pairs: Mapping[str, str], logits: str | None
) -> Signature:
    """Finds the logits and the next states among the outputs of a run of `Inputs.probe` rows: by `pairs`, from states
    to outputs, and otherwise by shape and type. Raises GraphError if this is impossible or ambiguous."""
    for name in pairs:
        if name not in {port.name for port in inputs.states}:
            raise GraphError(f"--state {name}={pairs[name]}: the states are {_names(p.name for p in inputs.states)}")
    for name in [*pairs.values(), *([logits] if logits else [])]:
        if name not in outputs:
            raise GraphError(f"has no output {name!r}: its outputs are {_names(outputs)}")
    rows = inputs.probe()
    candidates: dict[str, list[str]] = {}
    for port in inputs.states:
        chosen = [pairs[port.name]] if port.name in pairs else [*outputs]
        fits = [
            name
            for name in chosen
            if outputs[name].shape == port.batched(rows) and outputs[name].dtype == port.dtype and name != logits
        ]
        if not fits:
            raise GraphError(
                f"the state {port.name!r} of shape {list(port.batched(rows))} and type {port.dtype} has no next value: "
                f"{_listing({name: outputs[name] for name in chosen})}. Name it with --state {port.name}=OUTPUT; an "
                "input that is not a state must be a constant in the graph"
            )
        candidates[port.name] = fits
    scores = [logits] if logits else [*outputs]
    scores = [name for name in scores if _are_logits(outputs[name], rows, vocabulary)]
    if not scores:
        raise GraphError(
            f"has no logits, which have the shape [B, {vocabulary}] for a vocabulary of {vocabulary} tokens: "
            f"{_listing(outputs)}"
        )
    found = list(_assignments(candidates, scores))
    if not found:
        raise GraphError("the logits and the next states need an output each: " + _listing(outputs))
    if len(found) > 1:
        first, score = found[0]
        said = " ".join(f"--state {name}={output}" for name, output in first.items())
        several = "; ".join(f"{name}: {_names(fits)}" for name, fits in candidates.items() if len(fits) > 1)
        which = f"for the logits: {_names(scores)}" if len(scores) > 1 else "for the states"
        raise GraphError(
            f"shapes alone do not tell which output is the next value of each state ({several or which}). If the order "
            f"of the outputs is that of the inputs, give: {said} --logits {score}"
        )
    after, score = found[0]
    return Signature(inputs, score, tuple(after[port.name] for port in inputs.states))


def _token_input(values: Mapping[str, tuple[int, list[int | str]]], asked: str | None) -> str:
    whole = [name for name, (element, dims) in values.items() if element in TOKEN_TYPES and len(dims) <= 2]
    if asked is not None:
        if asked not in values:
            raise GraphError(f"has no input {asked!r}: its inputs are {_names(values)}")
        if values[asked][0] not in TOKEN_TYPES:
            raise GraphError(f"the tokens {asked!r} must be int64 or int32, but are {_type(values[asked][0])}")
        return asked
    if len(whole) > 1:
        whole = [name for name in whole if name.lower() in TOKEN_NAMES] or whole
    if len(whole) != 1:
        kinds = ", ".join(f"{name!r} {_type(element)}{_shape(dims)}" for name, (element, dims) in values.items())
        raise GraphError(f"which input has the tokens, int64 or int32 [B]? Name it with --tokens: {kinds}")
    return whole[0]


def _state(name: str, element: int, dims: list[int | str], batch: int | str | None, fixed: bool) -> Port:
    if element not in STATE_TYPES:
        raise GraphError(f"the state {name!r} has the type {_type(element)}, which no session can hold")
    free = [axis for axis, size in enumerate(dims) if not isinstance(size, int)]
    if fixed:
        if free:
            raise GraphError(
                f"the state {name!r} has the shape {_shape(dims)}, but the batch of the tokens is 1: a state of a "
                "session has one size, whatever it has read"
            )
        ones = [axis for axis, size in enumerate(dims) if size == 1]
        return Port(name, element, _sizes(dims), ones[0] if ones else None)
    if len(free) > 1 and batch:
        same = [axis for axis in free if dims[axis] == batch]
        free = same if len(same) == 1 else free
    sizes = [size for axis, size in enumerate(dims) if axis != (free[0] if free else None)]
    if len(free) != 1 or not all(isinstance(size, int) for size in sizes):
        raise GraphError(
            f"the state {name!r} has the shape {_shape(dims)}, but must have one free axis, that of the batch: a state "
            "of a session has one size, whatever it has read"
        )
    return Port(name, element, _sizes(dims), free[0])


def _are_logits(output: NDArray[Any], rows: int, vocabulary: int) -> bool:
    floats = np.issubdtype(output.dtype, np.floating)
    return floats and output.ndim >= 1 and output.shape[-1] == vocabulary and output.size == rows * vocabulary


def _assignments(candidates: Mapping[str, list[str]], scores: Sequence[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Yields the first two ways to give each state an output of its own, and the logits another one."""
    names = [*candidates]
    count = 0

    def extend(chosen: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(chosen) == len(names):
            yield chosen
            return
        for output in candidates[names[len(chosen)]]:
            if output not in chosen:
                yield from extend((*chosen, output))

    for chosen in extend(()):
        for score in scores:
            if score not in chosen:
                yield dict(zip(names, chosen, strict=True)), score
                count += 1
                if count == 2:
                    return


def declared(value: onnx.ValueInfoProto) -> tuple[int, list[int | str]]:
    """Returns the element type and the sizes of an input. A size without a name is an empty text."""
    if not value.type.HasField("tensor_type"):
        raise GraphError(f"the input {value.name!r} is not a tensor")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise GraphError(f"the input {value.name!r} has no shape: export the graph with the shapes of its inputs")
    dims: list[int | str] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value < 1:
            raise GraphError(f"the input {value.name!r} has a size of {dim.dim_value}")
        dims.append(int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param))
    return int(tensor.elem_type), dims


def _sizes(dims: Sequence[int | str]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in dims)


def _shape(dims: Sequence[int | str]) -> str:
    return "[" + ", ".join(str(size) if size != "" else "?" for size in dims) + "]"


def _names(names: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))


def _listing(outputs: Arrays) -> str:
    return "its outputs are " + ", ".join(f"{name!r} {v.dtype}{list(v.shape)}" for name, v in outputs.items())


def _type(element: int) -> str:
    try:
        return str(np.dtype(helper.tensor_dtype_to_np_dtype(element)))
    except KeyError:
        return f"type {element}"
