"""The cells as ONNX nodes. Each cell has one file, which `models/cell_registry.py` imports.

Each file defines `build(graph, architecture, layer)`. It returns the `CellWriter` (`models/export/cell_writer.py`) of
one layer. For an input-gated cell, this is an `InputGatedWriter`. The equations are those of `models/reference/cells/`.
"""
