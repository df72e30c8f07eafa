"""Every kind of cell, one line each, and the modules that implement it.

To add a cell: a line in `CELLS` and its name in `Cell`; in each folder of `PARTS` one file named as `CellInfo.module`.
The docstring of such a folder says what its files define. This module imports none of them: `load` imports a part when
it is asked for, so that reading a manifest does not need torch.
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
"""The package that holds each part, one module per cell. Oracle and certificate need numpy alone."""


@dataclass(frozen=True, slots=True)
class CellInfo:
    """What the rest of the code needs to know of a cell.

    module: the name of its file in every folder of `PARTS`; cells that differ in one function share theirs.
    gates: blocks of H rows in its matrices, in torch's order: gru r, z, n; lstm i, f, g, o; gated f, z.
    states: its state tensors, (H) each; the first is its output.
    input_gated: its gates depend on the input alone, never on the state; such gates may have caps.
    missing: the parts that this cell does not have, each with the reason. Besides `Part`, "audit": no checkpoint of
    such a cell can be imported. A cell without this entry is `torch.nn`'s own, whose class is the module's name in
    capitals.
    """

    module: str
    gates: int
    states: tuple[str, ...] = ("h",)
    input_gated: bool = False
    missing: Mapping[Part | Literal["audit"], str] = field(default_factory=dict)

    @property
    def input_tensors(self) -> tuple[str, str]:
        """The names of the weight (gates * H, I) and the bias (gates * H) that the input meets."""
        return ("weight", "bias") if self.input_gated else ("weight_ih_l0", "bias_ih_l0")

    @property
    def recurrent_tensors(self) -> tuple[str, str] | None:
        """The names of the weight (gates * H, H) and the bias (gates * H) that the state meets; None if input-gated."""
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
        missing={"constraint": "the gates' caps are part of the function", "audit": NO_TORCH_LAYER},
    ),
}


def load(part: Part, cell: Cell) -> ModuleType:
    """The module that implements one part of a cell."""
    return import_module(f"{PARTS[part]}.{CELLS[cell].module}")
