"""Random weights with a chosen scale, for tests that need no trained model."""

from __future__ import annotations

import numpy as np

from wane.models.architecture import Architecture
from wane.models.layer_registry import Kind
from wane.models.weights import weight_shapes

BLOCKS = ("plain", "residual")


def architecture(cell: Kind, block: str = "plain", layers: int = 1, **fields: object) -> Architecture:
    """Returns a small architecture with 11 tokens and layers of 6 units of one kind.

    fields: further fields of the architecture or of its layers. hidden: the width of the layers' outputs. units: the
    cells' units, by default `hidden`. gate_caps: one for each layer. front: the fields of convolutions in front blocks,
    and `blocks`, their number.
    """
    hidden = fields.pop("hidden", 6)
    assert isinstance(hidden, int)
    sizes: dict[str, object] = {"vocabulary_size": 11, "embedding": hidden}
    caps = fields.pop("gate_caps", ())
    assert isinstance(caps, tuple)
    units = fields.pop("units", None) or hidden
    assert isinstance(units, int)
    if cell == "lru" and units % 2:  # real and imaginary parts
        units += 1
        if block == "plain":
            fields["embedding"] = units
    each = {"kind": cell, "block": block, "units": units}
    each["feed_forward"] = fields.pop("feed_forward", 0)
    stack = [each | ({"gate_cap": caps[layer]} if caps else {}) for layer in range(layers)]
    front = fields.pop("front", None)
    if isinstance(front, dict):
        shared = {name: value for name, value in front.items() if name != "blocks"}
        stack = [{"kind": "convolution", "block": "front", "units": hidden} | shared] * front["blocks"] + stack
    return Architecture.model_validate(sizes | {"layers": stack} | fields)


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
