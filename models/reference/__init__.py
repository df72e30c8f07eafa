"""The oracle of every network, in numpy: `Reference(architecture, weights)`. No torch, no onnx."""

from models.reference.functions import Array
from models.reference.network import Reference, State

__all__ = ["Array", "Reference", "State"]
