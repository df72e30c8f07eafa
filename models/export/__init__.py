"""From a trained network to a bundle: graphs over one weights file, checked against the oracle."""

from models.export.export import export_bundle
from models.export.parity import ExportError

__all__ = ["ExportError", "export_bundle"]
