"""Finds the recurrent layers of a checkpoint: their tensors, their order and their kind of cell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from wane.models.layer_registry import KINDS, Kind
from wane.training.audit.foreign_model import Array
from wane.training.audit.tensor_map import TensorMap
from wane.training.audit.tensor_names import PART, PARTS

TORCH_CELLS: dict[int, Kind] = {
    info.gates: cell for cell, info in reversed(KINDS.items()) if "audit" not in info.missing
}
"""The cells that also exist in `torch.nn`, by the number of row blocks of the recurrent matrix. An RNN has one block,
whether its nonlinearity is tanh or relu. The key 1 maps to the tanh cell."""

GRU4REC_ONE_HOT = re.compile(r"(^|\.)(Wx0\.weight|Wh0|Wrz0|Bh0)$")
"""Matches the tensors of the layer `GRUEmbedding` in the GRU4Rec authors' PyTorch program."""

Names = dict[str, str]
"""The names, in the file, of one layer's tensors, by part (`weight_ih`, `bias_hh`, ...)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The recurrent layers, bottom to top. `sizes`: each layer's number of units. `inputs`: the number of input
    features of the bottom layer."""

    cell: Kind
    names: list[Names]
    sizes: list[int]
    inputs: int


def find_layers(tensors: TensorMap, nonlinearity: str | None) -> Layers:
    """Finds the recurrent layers, and marks their tensors as assigned. Raises ForeignError."""
    found: dict[tuple[str, int], Names] = {}
    by_hand = {theirs for ours, theirs in tensors.mapping.items() if re.fullmatch(r"layers\.\d+\.\w+", ours)}
    # Sorts `weight_hh_l0_raw` before `weight_hh_l0`, its copy after dropout, so that the layer uses the raw matrix.
    for name in sorted(tensors.unassigned - by_hand, key=lambda name: (not name.endswith("_raw"), name)):
        if (match := PART.match(name)) is None:
            continue
        if match["reverse"]:
            raise tensors.error(
                f"{name}: the layer is bidirectional. A model that reads the next tokens cannot predict them"
            )
        if match["part"] == "weight_hr":
            raise tensors.error(f"{name}: the LSTM projects its output (proj_size). Wane's cells have no such matrix")
        prefix = _module(tensors, match["prefix"]) if match["raw"] else match["prefix"]
        layer = found.setdefault((prefix, int(match["layer"] or 0)), {})
        if (raw := layer.setdefault(match["part"], name)) != name:
            tensors.notes.append(f"{name} is assumed to be {raw} after dropout, and is not used")
            tensors.unassigned.discard(name)
    names = _arranged(tensors, found)
    if not names and (one_hot := [name for name in sorted(tensors.unassigned) if GRU4REC_ONE_HOT.search(name)]):
        raise tensors.error(
            f"{tensors.describe(one_hot)}: the one-hot input of the GRU4Rec authors' program, whose first GRU layer is "
            "not stored as torch.nn.GRUCell. Wane cannot read this layout. It reads models that the program trains "
            "with a constrained or a separate embedding"
        )
    if not names:
        raise tensors.error(
            "no recurrent layer: no tensor has a name like those of torch.nn.RNN, GRU or LSTM (weight_ih_l0, "
            f"weight_hh_l0), and --map names none. Found: {tensors.listing()}"
        )
    for index, layer in enumerate(names):
        for part in ("weight_ih", "weight_hh"):
            if part not in layer:
                raise tensors.error(f"layer {index} ({', '.join(layer.values())}) has no {part}")
        tensors.unassigned -= set(layer.values())
    return _checked(tensors, names, nonlinearity)


def _module(tensors: TensorMap, prefix: str) -> str:
    """Returns the prefix of the other tensors of a layer that has a `_raw` matrix. awd-lstm wraps the layer's module:
    the matrix is `rnns.0.weight_hh_l0_raw`, and the others are `rnns.0.module.weight_ih_l0` and so on."""
    wrapped = f"{prefix}module."
    return wrapped if any(name.startswith(wrapped) for name in tensors.unassigned) else prefix


def _arranged(tensors: TensorMap, found: dict[tuple[str, int], Names]) -> list[Names]:
    """Returns the layers, bottom to top: the modules that --map names as `layers.N`, or all modules if it names none. A
    tensor that --map names as `layers.N.PART` replaces this part of layer N. The layer's other tensors stay."""
    modules = {prefix.rstrip("._"): parts for (prefix, layer), parts in found.items() if layer == 0}
    layers: dict[int, Names] = {}
    replaced: dict[int, Names] = {}
    for ours, theirs in tensors.mapping.items():
        if not ours.startswith("layers."):
            continue
        index, _, part = ours.removeprefix("layers.").partition(".")
        if part:
            replaced.setdefault(int(index), {})[part] = tensors.mapped(ours) or ""
        elif theirs in modules:
            layers[int(index)] = modules[theirs]
        else:
            known = ", ".join(sorted(modules)) or "none"
            raise tensors.error(f"--map {ours}={theirs}: no recurrent module has that name; known: {known}")
    if not layers:
        layers = dict(enumerate(_ordered(tensors, found)))
        for below, above in pairwise(dict.fromkeys(prefix.rstrip("._") for prefix, _ in sorted(found, key=_place))):
            tensors.assumptions.append(f"{above} is assumed to read the output of {below}, not to run beside it")
    for number, parts in replaced.items():
        layers[number] = layers.get(number, {}) | parts
    if sorted(layers) != list(range(len(layers))):
        raise tensors.error(f"--map names the layers {sorted(layers)}; count them from 0, bottom to top")
    return [layers[number] for number in sorted(layers)]


def _ordered(tensors: TensorMap, found: dict[tuple[str, int], Names]) -> list[Names]:
    """Orders the layers by the numbers in their module's name (`cells.0`), then by the layer's number in its module
    (`_l0`)."""
    prefixes = {prefix for prefix, _ in found}
    if len({re.sub(r"\d+", "", prefix) for prefix in prefixes}) > 1:
        known = ", ".join(sorted(prefix.rstrip("._") for prefix in prefixes))
        raise tensors.error(
            f"several recurrent modules ({known}), whose names do not give their order; "
            "set it: --map layers.0=MODULE --map layers.1=MODULE"
        )

    return [found[key] for key in sorted(found, key=_place)]


def _place(key: tuple[str, int]) -> tuple[list[int], int]:
    """Returns the sort key of a layer: the numbers in its module's name, and its number in the module."""
    return [int(number) for number in re.findall(r"\d+", key[0])], key[1]


def _checked(tensors: TensorMap, names: list[Names], nonlinearity: str | None) -> Layers:
    """Checks that the shapes of each layer's tensors fit together and fit the layer below, and that all layers have the
    same cell. Returns the layers."""
    cells: list[Kind] = []
    sizes: list[int] = []
    for layer in names:
        name = layer["weight_hh"]
        rows, hidden = tensors.matrix(name)
        if hidden == 0 or rows % hidden or rows // hidden not in TORCH_CELLS:
            known = ", ".join(f"{n * hidden} ({KINDS[cell].module.upper()})" for n, cell in sorted(TORCH_CELLS.items()))
            raise tensors.error(f"{name} has shape [{rows}, {hidden}]: {hidden} units need {known} rows")
        fed = tensors.matrix(layer["weight_ih"])
        expected = (rows, sizes[-1] if sizes else fed[1])
        if fed != expected:
            below = f", because the layer below has {sizes[-1]} units" if sizes else ""
            raise tensors.error(
                f"{layer['weight_ih']} has shape {list(fed)}, expected {list(expected)} "
                f"for {name} of shape [{rows}, {hidden}]{below}"
            )
        for part in ("bias_ih", "bias_hh"):
            if part in layer:
                tensors.expect(layer[part], (rows,))
        cells.append(TORCH_CELLS[rows // hidden])
        sizes.append(hidden)
    if len(set(cells)) > 1:
        raise tensors.error(
            f"layers of different cells ({', '.join(cells)}), but Wane needs the same cell in all layers"
        )
    return Layers(_cell(tensors, cells[0], nonlinearity), names, sizes, tensors.matrix(names[0]["weight_ih"])[1])


def _cell(tensors: TensorMap, cell: Kind, nonlinearity: str | None) -> Kind:
    if KINDS[cell].module != "rnn":
        if nonlinearity is not None:
            raise tensors.error(
                f"--nonlinearity is for an RNN, but the rows of the recurrent matrix are those of a {cell.upper()}"
            )
        return cell
    if nonlinearity is None:
        tensors.notes.append(
            "a file does not record an RNN's nonlinearity: it is assumed to be tanh (or give --nonlinearity relu)"
        )
    return "rnn_relu" if nonlinearity == "relu" else "rnn_tanh"


def layer_weights(tensors: TensorMap, layers: Layers) -> dict[str, Array]:
    """Returns the layers' weights by Wane's names, padded to the width of the widest layer.

    Padding units have only zero weights. Their state starts at 0, stays at 0 in every kind of cell (tanh(0) = 0), and
    contributes 0 to other units. The padding therefore changes no output.
    """
    hidden, gates = max(layers.sizes), KINDS[layers.cell].gates
    if len(set(layers.sizes)) > 1:
        tensors.notes.append(
            f"layers of {', '.join(map(str, layers.sizes))} units: narrower layers are padded to {hidden} with units "
            "that stay at zero, which changes no output"
        )
    weights: dict[str, Array] = {}
    missing: list[str] = []
    for index, layer in enumerate(layers.names):
        more = hidden - layers.sizes[index]
        below = hidden - layers.sizes[index - 1] if index else 0
        columns = {"weight_ih": [(0, below)], "weight_hh": [(0, more)]}
        for part in PARTS:
            ours = f"layers.{index}.cell.{part}_l0"
            if part in layer:
                blocks = np.split(tensors.take(ours, layer[part]), gates)
                weights[ours] = np.concatenate([np.pad(block, [(0, more), *columns.get(part, [])]) for block in blocks])
            else:
                missing.append(f"{part} of layer {index}")
                weights[ours] = np.zeros(gates * hidden, np.float32)
    if missing:
        tensors.notes.append(f"biases missing from the file are zeros: {', '.join(missing)}")
    return weights
