"""The weights of ONNX's LSTM, GRU and RNN nodes in torch's layout.

ONNX orders the blocks of rows i, o, f, c (LSTM) and z, r, h (GRU); torch i, f, c, o and r, z, h. A node whose function
none of Wane's cells has is an error that names the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wane.models.layer_registry import KINDS, Kind
from wane.training.audit.graph.values import Cell, Constant, Filled, Input, Matrix, Value

CELLS: dict[str, Kind] = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}
ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""For each block of rows in torch's order, its place in ONNX's order."""
FUNCTIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}


class NotRecurrent(ValueError):
    """Raised if none of Wane's cells computes what the node does. The message says what differs."""


def read_cell(
    operator: str, node: str, attributes: Mapping[str, Any], inputs: Sequence[Value | None], width: int
) -> tuple[Cell, tuple[str, ...]]:
    """Returns the cell of a node, and the names of graph inputs that are its initial state.

    inputs: X, W, R, B, sequence_lens, initial_h, initial_c and P; None for those that the node lacks. width: the number
    of X's features. Raises NotRecurrent.
    """
    _, weight, recurrent, bias, lengths, *states = (*inputs, *[None] * 8)[:8]
    peepholes = states.pop()
    kind = _kind(operator, attributes)
    if lengths is not None:
        raise NotRecurrent("it has sequence_lens, but Wane runs every token of a sequence")
    gates = KINDS[kind].gates
    w, r = _array("W", weight), _array("R", recurrent)
    units = r.shape[-1]
    for name, array, shape in (("W", w, (1, gates * units, width)), ("R", r, (1, gates * units, units))):
        if array.shape != shape:
            raise NotRecurrent(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
    if attributes.get("hidden_size", units) != units:
        raise NotRecurrent(f"hidden_size is {attributes['hidden_size']}, but R has {units} columns")
    b = np.zeros((1, 2 * gates * units), np.float32) if bias is None else _array("B", bias)
    if b.shape != (1, 2 * gates * units):
        raise NotRecurrent(f"B has shape {list(b.shape)}, expected {[1, 2 * gates * units]}")
    if peepholes is not None and not _is_zero(peepholes):
        raise NotRecurrent("it has peephole weights (P), which Wane's LSTM lacks")
    starts = tuple(start for state in states if state is not None and (start := _start(state)) is not None)
    first, second = np.split(b[0], 2)
    arrays = {"weight_ih_l0": w[0], "weight_hh_l0": r[0], "bias_ih_l0": first, "bias_hh_l0": second}
    names = {
        "weight_ih_l0": _name(weight),
        "weight_hh_l0": _name(recurrent),
        "bias_ih_l0": f"{_name(bias)}[:, :{len(first)}]",
        "bias_hh_l0": f"{_name(bias)}[:, {len(first)}:]",
    }
    weights = {
        name: np.concatenate([np.split(array, gates)[place] for place in ORDER[operator]])
        for name, array in arrays.items()
    }
    if bias is None:
        names = {name: value for name, value in names.items() if name.startswith("weight")}
    return Cell(kind, units, weights, names, node), starts


def _kind(operator: str, attributes: Mapping[str, Any]) -> Kind:
    """Returns the kind of the cell. Raises NotRecurrent for attributes that change the function."""
    if (direction := attributes.get("direction", "forward")) != "forward":
        raise NotRecurrent(f"its direction is {direction}. A model that reads the next tokens cannot predict them")
    if attributes.get("layout", 0) != 0:
        raise NotRecurrent("its layout is 1, which onnxruntime does not run; export it with layout 0")
    if (clip := attributes.get("clip")) is not None:
        raise NotRecurrent(f"it clips its sums to {clip:g} (clip), which Wane's cells do not")
    if attributes.get("input_forget", 0) != 0:
        raise NotRecurrent("it couples the input gate with the forget gate (input_forget), which Wane's LSTM does not")
    functions = [name.lower() for name in attributes.get("activations", FUNCTIONS[operator])]
    if operator == "RNN" and functions == ["relu"]:
        return "rnn_relu"
    if functions != FUNCTIONS[operator]:
        known = "Tanh or Relu" if operator == "RNN" else ", ".join(FUNCTIONS[operator]).title()
        raise NotRecurrent(f"its activations are {', '.join(attributes['activations'])}; Wane has {known}")
    if operator == "GRU" and attributes.get("linear_before_reset", 0) == 0:
        raise NotRecurrent(
            "linear_before_reset is 0: its reset gate multiplies the state before the recurrent matrix, and in Wane's "
            "GRU, as in torch's, the product of the two (Keras: reset_after=True)"
        )
    return CELLS[operator]


def _array(name: str, value: Value | None) -> Matrix:
    """Returns a weight. Raises NotRecurrent if it is not a constant of floating-point numbers."""
    if not isinstance(value, Constant) or value.array.dtype.kind != "f":
        raise NotRecurrent(f"{name} is not a constant of floating-point numbers")
    return value.array


def _name(value: Value | None) -> str:
    return value.name if isinstance(value, Constant) else ""


def _is_zero(value: Value) -> bool:
    if isinstance(value, Constant):
        return value.array.dtype.kind == "f" and not value.array.any()
    return isinstance(value, Filled) and value.value == 0


def _start(state: Value) -> str | None:
    """Returns the name of the graph input that is the initial state, None for zeros. Raises NotRecurrent for another
    state."""
    if isinstance(state, Input) and not state.whole:
        return state.name
    if isinstance(state, Filled) and state.value == 0:
        return state.source
    if not _is_zero(state):
        raise NotRecurrent("its initial state is not zero, but a session of Wane begins with zeros")
    return None
