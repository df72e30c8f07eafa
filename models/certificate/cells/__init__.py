"""The proofs about the cells. Each cell has one file, which `models/cell_registry.py` imports. This package imports
neither torch nor onnx.

Each file states its theorems and defines two functions:

- `build_layer(cell, inputs)` returns the `Layer` (`models/certificate/layer_bound.py`) with the bounds of a cell, for
  every input that a token can cause.
- `moved(step, pre, state, error)` computes the cell's next state in a window, and bounds of the distance between this
  state and the uninterrupted run's state (`models/certificate/cell_step.py`).
"""
