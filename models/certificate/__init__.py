"""Computes the proofs about a model's weights: `certify(architecture, weights, max_window, rounding)`. This package
imports neither torch nor onnx."""

from wane.models.certificate.certify import certify

__all__ = ["certify"]
