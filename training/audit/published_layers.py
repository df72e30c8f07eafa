"""Reads the layers minGRU and LRU in the layouts of their published implementations.

**minGRU** (Feng et al. 2024, arXiv 2410.01201). `to_hidden_and_gate` (2H, D) has the rows of the candidate, then those
of the gate; `to_out` (D, H) may follow. This is the layout of minGRU-pytorch, which computes in log-space: its
candidates are `g(x)`, positive numbers (appendix B.3). With `linear_z` and `linear_h` (H, D), the paper's listings have
the same layer with and without g (sections B.2.1 and B.3), so an option says which. The state is
`h' = (1 - sigmoid(k)) h + sigmoid(k) z`, and the forget gate of Wane's gated cell is `sigmoid(-k)`.

**LRU** (Orvieto et al. 2023, arXiv 2303.06349): `s' = lambda s + exp(gamma_log) B x`, `y = Re(C s) + D x`. The file has
`nu_log`, `theta_log` and `gamma_log` (N), B (N, I) and C (O, N) as complex tensors or as `B_re`, `B_im`, `C_re` and
`C_im`, and D as a vector or a matrix (O, I). D x is computed by further units with lambda = 0, whose state is x.

The matrix after a layer (`to_out`, or C and D) becomes part of the next layer's weight, or of the head's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from wane.models.layer_registry import AnyLayer, read_layer
from wane.training.audit.foreign_model import Array
from wane.training.audit.tensor_map import TensorMap
from wane.training.audit.tensor_names import PUBLISHED

FORGOTTEN = 5.0
"""nu of a unit that forgets its state at once: exp(-exp(5)) is 4e-65, which is 0 in float32."""

BLOCKS = (
    (re.compile(r"(^|\.)gamma$"), "RMSNorm (gamma)"),
    (re.compile(r"(^|\.)normalization\."), "a normalisation (normalization)"),
    (re.compile(r"(^|\.)(out1|out2)\."), "a gated linear unit (out1, out2)"),
    (re.compile(r"(^|\.)(conv|net)\.\d*\.?"), "a convolution"),
)
"""Tensors of the blocks in which the published language models put these layers."""


@dataclass(frozen=True, slots=True)
class PublishedLayers:
    """The layers, bottom to top. weights: by Wane's names. inputs: the width of the bottom layer's input. outputs: the
    width of what the head reads. after: the matrix (outputs, units) after the top layer, or None."""

    specs: tuple[AnyLayer, ...]
    weights: dict[str, Array]
    inputs: int
    outputs: int
    after: Any

    @property
    def cell(self) -> str:
        """The kind of the layers."""
        return self.specs[-1].kind

    @property
    def sizes(self) -> list[int]:
        """The width of what the head reads, as the only entry (see `Layers`)."""
        return [self.outputs]

    def move_after(self, weights: dict[str, Array], names: dict[str, str]) -> None:
        """Makes the matrix after the top layer part of the head's."""
        if self.after is None:
            return
        head = weights.get("head.weight", weights["embedding.weight"])
        weights["head.weight"] = (head.astype(np.float64) @ self.after).astype(np.float32)
        names["head.weight"] = f"{names.get('head.weight', names['embedding.weight'])} @ {names.pop('after')}"


def find_published_layers(tensors: TensorMap, nonlinearity: str | None) -> PublishedLayers | None:
    """Finds the layers, and marks their tensors as assigned. Returns None if there is none. Raises ForeignError."""
    found = {match["module"]: match["part"] for name in tensors.unassigned if (match := PUBLISHED.match(name))}
    if not found:
        return None
    modules = sorted(found, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))
    if len({re.sub(r"\d+", "", module) for module in modules}) > 1:
        raise tensors.error(f"several recurrent modules ({', '.join(modules)}), whose names do not give their order")
    if nonlinearity is not None and nonlinearity not in ("identity", "positive"):
        raise tensors.error(f"--nonlinearity {nonlinearity} is for an RNN; a minGRU has identity or positive")
    specs, weights, after, outputs, inputs = list[AnyLayer](), dict[str, Array](), None, 0, 0
    for place, module in enumerate(modules):
        read = _lru if found[module] == "nu_log" else _min_gru
        spec, own, width, next_after = read(tensors, module, found[module], nonlinearity, place)
        if place and width != outputs:
            raise tensors.error(f"{module} reads {width} features, but the layer below has {outputs}")
        inputs = inputs or width
        if after is not None:
            own["weight"] = own["weight"].astype(np.float64) @ after
        specs.append(spec)
        weights |= {
            f"layers.{place}.cell.{name}": np.ascontiguousarray(array, np.float32) for name, array in own.items()
        }
        after = next_after
        outputs = spec.units if after is None else len(after)
        if place:
            tensors.assumptions.append(f"{module} is assumed to read the output of {modules[place - 1]} alone")
    if after is not None:
        tensors.names["after"] = f"the output of {modules[-1]}"
    blocks = [what for pattern, what in BLOCKS if any(pattern.search(name) for name in tensors.unassigned)]
    if blocks:
        raise tensors.error(
            f"around its {'LRU' if specs[-1].kind == 'lru' else 'minGRU'} layers, the model has {', '.join(blocks)}, "
            "which the published blocks combine with GELU and skip connections. Wane's residual blocks have LayerNorm "
            "and ReLU instead, so they compute another function. The audit reads such layers between an embedding and "
            "a head"
        )
    return PublishedLayers(tuple(specs), weights, inputs, outputs, after)


Read = tuple[AnyLayer, dict[str, Any], int, Any]
"""A layer's fields, its weights by the names of `LayerSpec.tensors`, its input's width, and the matrix after it."""


def _min_gru(tensors: TensorMap, module: str, part: str, nonlinearity: str | None, place: int) -> Read:
    prefix, ours = f"{module}." if module else "", f"layers.{place}.cell.weight"
    if part == "to_hidden_and_gate":
        name = f"{prefix}{part}.weight"
        rows, width = tensors.matrix(name)
        if rows % 2:
            raise tensors.error(f"{name} has {rows} rows, but a candidate and a gate need an even number")
        hidden, gate = np.split(_take(tensors, ours, name), 2)
        bias = _optional(tensors, f"{prefix}{part}.bias", (rows,))
        hidden_bias, gate_bias = np.split(bias, 2)
        function = nonlinearity or "positive"
        if nonlinearity is None and not place:
            tensors.assumptions.append(
                "the candidates of the minGRU are assumed to be those of minGRU-pytorch, in log-space: x + 0.5 for "
                "x >= 0, else sigmoid(x) (or give --nonlinearity identity)"
            )
    else:
        if nonlinearity is None:
            raise tensors.error(
                f"{prefix}linear_z, {prefix}linear_h: the minGRU paper's two listings have these names, with "
                "candidates that are the pre-activations themselves (--nonlinearity identity), and in log-space, where "
                "they are x + 0.5 for x >= 0, else sigmoid(x) (--nonlinearity positive). A file does not record which"
            )
        units, width = tensors.matrix(f"{prefix}linear_z.weight")
        if f"{prefix}linear_h.weight" not in tensors.unassigned:
            raise tensors.error(f"{prefix}linear_z.weight has no {prefix}linear_h.weight beside it")
        tensors.expect(f"{prefix}linear_h.weight", (units, width))
        gate = _take(tensors, ours, f"{prefix}linear_z.weight")
        hidden = _take(tensors, ours, f"{prefix}linear_h.weight")
        tensors.names[ours] = f"{prefix}linear_z.weight, {prefix}linear_h.weight"
        gate_bias = _optional(tensors, f"{prefix}linear_z.bias", (units,))
        hidden_bias, function = _optional(tensors, f"{prefix}linear_h.bias", (units,)), nonlinearity
    units, after = len(gate), None
    if (out := f"{prefix}to_out.weight") in tensors.unassigned:
        tensors.expect(out, (tensors.matrix(out)[0], units))
        after = _take(tensors, f"layers.{place}.out", out).astype(np.float64)
        tensors.notes.append(f"{out} is multiplied into the weight of what reads it")
    spec = read_layer({"kind": "gated", "units": units, "candidate": function})
    return spec, {"weight": np.concatenate([-gate, hidden]), "bias": np.append(-gate_bias, hidden_bias)}, width, after


def _lru(tensors: TensorMap, module: str, part: str, nonlinearity: str | None, place: int) -> Read:
    del nonlinearity
    prefix = f"{module}." if module else ""
    (units,) = _vector_shape(tensors, f"{prefix}{part}")
    taken = {
        name: _take(tensors, f"layers.{place}.cell.{name}", f"{prefix}{name}", (units,))
        for name in ("nu_log", "theta_log", "gamma_log")
    }
    b, c = _complex(tensors, prefix, "B", place), _complex(tensors, prefix, "C", place)
    if len(b) != units or c.shape[1] != units:
        raise tensors.error(f"{prefix}B and C have shapes {list(b.shape)} and {list(c.shape)}, for {units} units")
    (outputs, _), width = c.shape, b.shape[1]
    direct = np.zeros((outputs, width))
    if (name := f"{prefix}D") in tensors.unassigned:
        shape = tensors.shape(name)
        if shape not in ((outputs, width), (outputs,)) or (len(shape) == 1 and outputs != width):
            raise tensors.error(f"{name} has shape {list(shape)}, expected [{outputs}] or [{outputs}, {width}]")
        given = _take(tensors, f"layers.{place}.D", name)
        direct = np.diag(given) if given.ndim == 1 else given
    driven = np.exp(taken["gamma_log"].astype(np.float64))[:, None] * b
    more = (width + 1) // 2 if direct.any() else 0
    through = np.eye(2 * more, width)  # the input, in the real parts and then in the imaginary parts of further units
    weight = np.concatenate([driven.real, through[:more], driven.imag, through[more:]])
    read = np.zeros((outputs, 2 * more))
    read[:, :width] = direct if more else 0
    after = np.concatenate([c.real, read[:, :more], -c.imag, read[:, more:]], axis=1)
    own = {
        "weight": weight,
        "bias": np.zeros(len(weight), np.float32),
        "nu": np.append(taken["nu_log"], np.full(more, FORGOTTEN, np.float32)),
        "theta": np.append(taken["theta_log"], np.zeros(more, np.float32)),
    }
    if more:
        tensors.notes.append(f"{prefix}D x is computed by {more} more complex units, which forget their state at once")
    return read_layer({"kind": "lru", "units": len(weight)}), own, width, after


def _take(tensors: TensorMap, ours: str, name: str, shape: tuple[int, ...] | None = None) -> Array:
    if name not in tensors.unassigned:
        raise tensors.error(f"the layer has no {name}; known: {tensors.listing()}")
    if shape is not None:
        tensors.expect(name, shape)
    tensors.unassigned.discard(name)
    return tensors.take(ours, name)


def _optional(tensors: TensorMap, name: str, shape: tuple[int, ...]) -> Array:
    """Returns a bias, zeros if the file has none."""
    return _take(tensors, name, name, shape) if name in tensors.unassigned else np.zeros(shape, np.float32)


def _vector_shape(tensors: TensorMap, name: str) -> tuple[int]:
    shape = tensors.shape(name)
    if len(shape) != 1:
        raise tensors.error(f"{name} has shape {list(shape)}, expected a vector")
    return (shape[0],)


def _complex(tensors: TensorMap, prefix: str, part: str, place: int) -> Any:
    """Returns a complex matrix, which the file has as one complex tensor or as its real and imaginary parts."""
    name = f"{prefix}{part}"
    if name in tensors.unassigned:
        tensors.matrix(name)
        tensors.unassigned.discard(name)
        return tensors.take_complex(f"layers.{place}.{part}", name)
    real, imaginary = (_take(tensors, f"layers.{place}.{part}_{half}", f"{name}_{half}") for half in ("re", "im"))
    if real.ndim != 2 or real.shape != imaginary.shape:
        raise tensors.error(f"{name}_re and {name}_im have shapes {list(real.shape)} and {list(imaginary.shape)}")
    return real.astype(np.float64) + 1j * imaginary
