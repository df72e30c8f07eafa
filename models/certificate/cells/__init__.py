"""The proofs about the cells. Each cell has one file, which `models/cell_registry.py` imports. This package imports
neither torch nor onnx.

Each file states its theorems and defines two functions:

- `build_layer(cell, inputs)` returns the `Layer` (`models/certificate/layer_bound.py`) of a cell's weights, for every
  input that a token can cause.
- `moved(step, pre, state, error)` computes one step over the tokens of one window (`models/certificate/cell_step.py`).
"""
