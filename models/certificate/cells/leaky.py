"""Leaky units: the gated cell (`gated.py`) whose gates are constant, so their weight is 0."""

from wane.models.certificate.cells.gated import build_layer, moved

__all__ = ["build_layer", "moved"]
