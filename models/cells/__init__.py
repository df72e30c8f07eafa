"""The recurrent cells, in torch: one file per cell, found by `models/cell_registry.py`.

Each file defines `build(architecture, layer)`, which returns the cell of one layer. A cell reads time-major input and
carries its state explicitly:

    forward(x: float32 (T, B, I), state: tuple of (B, H)) -> (y: (T, B, H), state after the last step)

Parameters have torch's names, layouts and gate orders, because the bundle's weights file keeps them. Equations:
`models/reference/cells/`, the independent oracle of these modules.
"""

from torch import Tensor

State = tuple[Tensor, ...]
