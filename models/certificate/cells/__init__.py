"""The proofs about the layers' cells. Each kind has one file, which `models/layer_parts.py` imports. This package
imports neither torch nor onnx.

Each file states its theorems. A file of a kind with finite memory defines `furthest(cell, inputs)`, which bounds the
cell's output, and `rounding(cell, inputs, error, unit)`, which bounds the error of the computed output. The others
define two functions:

- `build_layer(cell, inputs)` returns the `Layer` (`models/certificate/layer_bound.py`) with the bounds of a cell, for
  every input that a token can cause.
- `moved(step, pre, state, error)` computes the cell's next state in a window, and bounds of the distance between this
  state and the uninterrupted run's state (`models/certificate/cell_step.py`).
"""
