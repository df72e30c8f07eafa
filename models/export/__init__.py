"""Exports a trained network as a bundle: graphs over one weights file, checked against the oracle."""

from wane.models.export.export import export_again, export_bundle
from wane.models.export.parity import ExportError

__all__ = ["ExportError", "export_again", "export_bundle"]
