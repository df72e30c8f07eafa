"""The numpy oracle of every network: `Reference(architecture, weights)`. This package imports neither torch nor
onnx."""

from wane.models.reference.functions import Array
from wane.models.reference.network import Reference, State

__all__ = ["Array", "Reference", "State"]
