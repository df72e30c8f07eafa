"""What is proved of a model: `certify(architecture, weights, max_window, rounding)`. No torch, no onnx."""

from wane.models.certificate.certify import certify

__all__ = ["certify"]
