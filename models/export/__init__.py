"""Exports a trained network as a bundle: ONNX graphs that share one weights file. Their outputs are compared with the
oracle's."""

from wane.models.export.export import export_again, export_bundle
from wane.models.export.parity import ExportError

__all__ = ["ExportError", "export_again", "export_bundle"]
