"""The layers' cells in torch. Each kind has one file, which `models/layer_parts.py` imports.

Each file defines `build(placed)`, which returns the cell of one layer. A cell is a torch module. Its input
is time-major, and its state is an argument and a result:

    forward(x: float32 (T, B, I), state: tuple of (B, *shape)) -> (y: (T, B, H), state after the last step)

Parameters have torch's names, layouts and gate orders, and the bundle's weights file uses the same.
`models/reference/cells/` has the equations and is an independent oracle for these modules.
"""

from torch import Tensor

State = tuple[Tensor, ...]
