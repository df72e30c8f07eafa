"""Reads an ONNX file of unknown origin as a model of Wane."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from wane.models.imported.first_run import check_apart
from wane.models.imported.graph_file import GraphError, initialisers, read_graph
from wane.training.audit.foreign_model import ForeignModel
from wane.training.audit.graph.check import check_graph
from wane.training.audit.graph.model import recognise
from wane.training.errors import ForeignError


def read_onnx(path: Path) -> tuple[ForeignModel, str]:
    """Reads the graph, makes a model of it, and compares the model with onnxruntime's results for the file. Returns the
    model and the SHA-256 of the file. Raises ForeignError."""
    try:
        check_apart(path)
        proto = read_graph(path)
        tensors = initialisers(proto, path.parent)
    except GraphError as error:
        raise ForeignError(str(error)) from error
    model, logits = recognise(path, proto, tensors)
    note = check_graph(path, proto, model, logits)
    return replace(model, notes=(*model.notes, note)), hashlib.sha256(path.read_bytes()).hexdigest()
