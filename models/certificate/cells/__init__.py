"""The proofs about every cell: one file per cell, found by `models/cell_registry.py`. Imports neither torch nor onnx.

Each file states its theorems and defines

- `build_layer(cell, inputs)`: the `Layer` (`models/certificate/layer_bound.py`) of a cell's weights, for every input
  that a token can cause;
- `moved(step, pre, state, error)`: one step over one window's tokens (`models/certificate/cell_step.py`).
"""
