"""The cells as ONNX nodes: one file per cell, found by `models/cell_registry.py`.

Each file defines `build(graph, architecture, layer)`, which returns the `CellWriter` (`models/export/cell_writer.py`)
of one layer, for an input-gated cell an `InputGatedWriter`. The equations are those of `models/reference/cells/`.
"""
