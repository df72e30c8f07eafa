"""The registry of the recurrent cells (GRU, LSTM, ...) and of the modules that implement them.

To add a cell, add an entry to `CELLS`, add the cell's name to `Cell`, and add a file to each folder of `PARTS`. The
file's name is `CellInfo.module`. The docstring of each of these folders describes what its files define. `load` imports
a part on demand. Therefore a manifest can be read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Literal

Cell = Literal["linear", "rnn_tanh", "rnn_relu", "gru", "lstm", "gated"]

Part = Literal["torch", "oracle", "certificate", "constraint", "export"]

PARTS: dict[Part, str] = {
    "torch": "wane.models.cells",
    "oracle": "wane.models.reference.cells",
    "certificate": "wane.models.certificate.cells",
    "constraint": "wane.models.constraints.cells",
    "export": "wane.models.export.cells",
}
"""The package of each part of the cells' implementation. Each package has one module per cell. The parts "oracle" and
"certificate" need only numpy."""


@dataclass(frozen=True, slots=True)
class CellInfo:
    """The properties of a cell.

    module: the name of the cell's file in every folder of `PARTS`. Cells that differ in one function share a file.
    gates: the number of blocks of H rows in the cell's matrices. The blocks are in torch's order: gru r, z, n; lstm i,
        f, g, o; gated f, z.
    states: the names of the cell's state tensors, (H) each. The first tensor is the cell's output.
    input_gated: whether the cell's gates depend on the input alone, never on the state. Such gates may have caps
        (greatest values).
    missing: the parts that this cell does not have, each with the reason. A key is a `Part` or "audit". The key "audit"
        means that checkpoints of this cell cannot be imported. A cell without this key exists as a class of `torch.nn`,
        whose name is `module` in capitals.
    """

    module: str
    gates: int
    states: tuple[str, ...] = ("h",)
    input_gated: bool = False
    missing: Mapping[Part | Literal["audit"], str] = field(default_factory=dict)

    @property
    def input_tensors(self) -> tuple[str, str]:
        """The names of the weight (gates * H, I) and the bias (gates * H) that apply to the input."""
        return ("weight", "bias") if self.input_gated else ("weight_ih_l0", "bias_ih_l0")

    @property
    def recurrent_tensors(self) -> tuple[str, str] | None:
        """The names of the recurrent weight (gates * H, H) and the recurrent bias (gates * H), or None if the cell is
        input-gated."""
        return None if self.input_gated else ("weight_hh_l0", "bias_hh_l0")


NO_TORCH_LAYER = "torch.nn has no such layer"

CELLS: dict[Cell, CellInfo] = {
    "linear": CellInfo("linear", gates=1, missing={"audit": NO_TORCH_LAYER}),
    "rnn_tanh": CellInfo("rnn", gates=1),
    "rnn_relu": CellInfo("rnn", gates=1),
    "gru": CellInfo("gru", gates=3),
    "lstm": CellInfo("lstm", gates=4, states=("h", "c")),
    "gated": CellInfo(
        "gated",
        gates=2,
        states=("s",),
        input_gated=True,
        missing={"constraint": "torch.nn has no gates with caps", "audit": NO_TORCH_LAYER},
    ),
}


def load(part: Part, cell: Cell) -> ModuleType:
    """Imports the module that implements one part of a cell."""
    return import_module(f"{PARTS[part]}.{CELLS[cell].module}")
