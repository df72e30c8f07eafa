"""The oracle of every network, in numpy: `Reference(architecture, weights)`. No torch, no onnx."""

from wane.models.reference.functions import Array
from wane.models.reference.network import Reference, State

__all__ = ["Array", "Reference", "State"]
