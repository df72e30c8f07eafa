"""Random weights with a chosen scale, for tests that need no trained model."""

from __future__ import annotations

import numpy as np

from wane.models.cell_registry import Cell
from wane.models.manifest import Architecture
from wane.models.weights import weight_shapes

BLOCKS = ("plain", "residual")


def architecture(cell: Cell, block: str = "plain", layers: int = 1, **fields: object) -> Architecture:
    """Returns a small architecture with 11 tokens and 6 units."""
    sizes: dict[str, object] = {"vocabulary_size": 11, "embedding": 6, "hidden": 6}
    return Architecture.model_validate(sizes | {"cell": cell, "block": block, "layers": layers} | fields)


def random_weights(
    architecture: Architecture, seed: int, recurrent: float = 1.0, driven: float = 1.0
) -> dict[str, np.ndarray]:
    """Returns Gaussian weights. `recurrent` scales the recurrent matrices: with `recurrent` = 1, their spectral norm is
    about 2. `driven` scales the cells' input matrices."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(architecture).items():
        values = generator.normal(size=shape)
        if "weight_hh" in name:
            values *= recurrent / np.sqrt(shape[1])
        elif ".cell." in name and len(shape) == 2:
            values *= driven / np.sqrt(shape[1])
        elif "norm.weight" in name:
            values = 1 + 0.3 * values
        elif name != "embedding.weight":
            values *= 0.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.5
        weights[name] = values.astype(np.float32)
    return weights
