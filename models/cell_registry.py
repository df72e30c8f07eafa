"""The registry of cells, with one line per cell, and the modules that implement them.

To add a cell, add a line to `CELLS`, its name to `Cell`, and a file named `CellInfo.module` to each folder of `PARTS`.
The docstring of each of these folders describes what its files define. `load` imports a part on demand, so that reading
a manifest does not need torch.
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
"""The package of each part, with one module per cell. The oracle and the certificate need only numpy."""


@dataclass(frozen=True, slots=True)
class CellInfo:
    """The properties of a cell.

    module: the name of its file in every folder of `PARTS`; cells that differ in one function share a file. gates: the
    number of blocks of H rows in its matrices, in torch's order: gru r, z, n; lstm i, f, g, o; gated f, z. states: its
    state tensors, (H) each; the first is its output. input_gated: whether its gates depend on the input alone, never on
    the state. Such gates may have caps. missing: the parts that this cell does not have, each with the reason. A key is
    a `Part` or "audit", which means that checkpoints of this cell cannot be imported. A cell without the key "audit" is
    a class of `torch.nn` whose name is the module's name in capitals.
    """

    module: str
    gates: int
    states: tuple[str, ...] = ("h",)
    input_gated: bool = False
    missing: Mapping[Part | Literal["audit"], str] = field(default_factory=dict)

    @property
    def input_tensors(self) -> tuple[str, str]:
        """The names of the input weight (gates * H, I) and the input bias (gates * H)."""
        return ("weight", "bias") if self.input_gated else ("weight_ih_l0", "bias_ih_l0")

    @property
    def recurrent_tensors(self) -> tuple[str, str] | None:
        """The names of the recurrent weight (gates * H, H) and the recurrent bias (gates * H). None if the cell is
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
