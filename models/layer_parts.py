"""The modules that implement the parts of a layer. This module needs no package, so torch networks can be built where
pydantic is missing (`benchmarks/gpu/train.py`)."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Literal

Part = Literal["torch", "oracle", "certificate", "constraint", "export"]

PARTS: dict[Part, str] = {
    "torch": "wane.models.cells",
    "oracle": "wane.models.reference.cells",
    "certificate": "wane.models.certificate.cells",
    "constraint": "wane.models.constraints.cells",
    "export": "wane.models.export.cells",
}
"""The package of each part of the layers' implementation. Each package has one module for each kind. The parts "oracle"
and "certificate" need only numpy."""


def load(part: Part, module: str) -> ModuleType:
    """Imports the module that implements one part of a kind of layers. module: the `LayerSpec.module` of the kind."""
    return import_module(f"{PARTS[part]}.{module}")
