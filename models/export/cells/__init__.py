"""The layers' cells as ONNX nodes. Each kind has one file, which `models/layer_parts.py` imports.

Each file defines `build(graph, placed)`. It returns the `CellWriter` (`models/export/cell_writer.py`) of one layer. For
an input-gated cell, this is an `InputGatedWriter`. For a cell with finite memory, it is a `FiniteWriter`. The equations
are those of `models/reference/cells/`.
"""
