"""The registry of the kinds of layers (GRU, LSTM, convolution, ...).

A layer is causal: its output at a token depends on this token, the tokens before it, and nothing else. The part of a
layer that has a state is its cell. The memory of a layer is fading or finite. A layer with fading memory (a recurrent
layer) depends on all earlier tokens; its certificate states the factor by which two of its states come closer at every
token. A layer with finite memory depends on the last `reach + 1` tokens; its state consists of its last inputs.

To add a kind, add its class, its entry of `AnyLayer` and its name in `Kind` here, and a file to each folder of `PARTS`.
The file's name is `LayerSpec.module`. The docstring of each of these folders describes what its files define.
`models/layer_parts.py` imports a part on demand. Therefore a manifest can be read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from wane.models.layer_parts import Part

Block = Literal["plain", "residual", "front"]

NO_TORCH_LAYER = "torch.nn has no such layer"

Shape = tuple[int, ...]


class Frozen(BaseModel):
    """An immutable record. It rejects unknown fields and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class LayerSpec(Frozen):
    """The fields that all layers have, and the properties of a kind.

    `block`: how the cell is connected.
        "plain": the cell reads the output of the layer below, and its output is the layer's output.
        "residual": `x = x + mix(cell(LayerNorm(x)))`, where mix is a matrix of `units` columns.
        "front": `x = x + feed_forward(cell(LayerNorm(x)))`, for depthwise convolutions.
    `units`: the width of the cell's output.
    `feed_forward`: the width of the feed-forward part. If it is not 0, a residual block then computes
        `x = x + feed_forward(LayerNorm(x))`. A front block always has this part.

    module: the name of the kind's file in every folder of `PARTS`. Kinds that differ in one function share a file.
    gates: the number of blocks of `units` rows in the cell's matrices. The blocks are in torch's order: gru r, z, n;
        lstm i, f, g, o; gated f, z.
    states: the names of the cell's state tensors. For recurrent layers, they are (units) each, and the first tensor is
        the cell's output.
    input_gated: whether the cell's gates never depend on the state. Such gates may have caps (greatest values).
    finite: whether the layer's memory is finite.
    missing: the parts that this kind does not have, each with the reason. A key is a `Part` or "audit". A kind
        without the key "audit" exists as a class of `torch.nn`, whose name is `module` in capitals. Of the others,
        audits import minGRU and LRU (`training/audit/published_layers.py`).
    """

    module: ClassVar[str]
    gates: ClassVar[int] = 1
    states: ClassVar[tuple[str, ...]] = ("h",)
    input_gated: ClassVar[bool] = False
    finite: ClassVar[bool] = False
    missing: ClassVar[Mapping[Part | Literal["audit"], str]] = {}

    kind: str = Field(
        description="`linear`, `rnn_tanh`, `rnn_relu`, `gru`, `lstm`, `gated`, `leaky`, `lru` (recurrent), "
        "`convolution` or `attention`"
    )
    units: int = Field(ge=1, description="width of the cell's output")
    block: Block = Field(
        default="plain",
        description="`residual` adds LayerNorm, skip connection and feed-forward part; `front` does so without a "
        "matrix after the cell, for depthwise convolutions; either all layers are `plain`, or none is",
    )
    feed_forward: int = Field(default=0, ge=0, description="width of the feed-forward part; 0: none")

    @model_validator(mode="after")
    def _consistent(self) -> LayerSpec:
        if self.block == "plain" and self.feed_forward:
            raise ValueError("feed_forward needs block = 'residual'")
        if self.block == "front" and not self.feed_forward:
            raise ValueError("a front block needs feed_forward")
        if self.block == "front" and not self.finite:
            raise ValueError(f"a front block needs a layer with finite memory, not {self.kind}")
        return self

    @property
    def cap(self) -> float:
        """The greatest value of the cell's forget gates in float32, 1 if it has none."""
        return 1.0

    @property
    def reach(self) -> int:
        """The number of earlier tokens on which the output of a layer with finite memory depends."""
        return 0

    @property
    def input_tensors(self) -> tuple[str, str]:
        """The names of the weight (gates * units, I) and the bias (gates * units) that apply to the input."""
        return ("weight", "bias") if self.input_gated else ("weight_ih_l0", "bias_ih_l0")

    @property
    def recurrent_tensors(self) -> tuple[str, str] | None:
        """The names of the recurrent weight (gates * units, units) and the recurrent bias (gates * units), or None if
        the cell has no recurrent matrix."""
        return None if self.input_gated else ("weight_hh_l0", "bias_hh_l0")

    def state_shapes(self, inputs: int) -> dict[str, Shape]:
        """Returns the shapes of the cell's state tensors by name. inputs: the width of the cell's input."""
        del inputs
        return dict.fromkeys(self.states, (self.units,))

    def tensors(self, inputs: int) -> dict[str, Shape]:
        """Returns the shapes of the cell's weights by name, weights before biases."""
        rows = self.gates * self.units
        weight, bias = self.input_tensors
        if self.recurrent_tensors is None:
            return {weight: (rows, inputs), bias: (rows,)}
        recurrent_weight, recurrent_bias = self.recurrent_tensors
        return {weight: (rows, inputs), recurrent_weight: (rows, self.units), bias: (rows,), recurrent_bias: (rows,)}


class Linear(LayerSpec):
    """`h' = W h + U x + b`."""

    module: ClassVar[str] = "linear"
    missing: ClassVar = {"audit": NO_TORCH_LAYER}
    kind: Literal["linear"] = "linear"


class RnnTanh(LayerSpec):
    """`h' = tanh(W h + U x + b)`."""

    module: ClassVar[str] = "rnn"
    kind: Literal["rnn_tanh"] = "rnn_tanh"


class RnnRelu(LayerSpec):
    """`h' = max(0, W h + U x + b)`."""

    module: ClassVar[str] = "rnn"
    kind: Literal["rnn_relu"] = "rnn_relu"


class Gru(LayerSpec):
    """The gated recurrent unit (Cho et al. 2014), in torch's form."""

    module: ClassVar[str] = "gru"
    gates: ClassVar[int] = 3
    kind: Literal["gru"] = "gru"


class Lstm(LayerSpec):
    """The LSTM with a forget gate (Gers et al. 2000)."""

    module: ClassVar[str] = "lstm"
    gates: ClassVar[int] = 4
    states: ClassVar[tuple[str, ...]] = ("h", "c")
    kind: Literal["lstm"] = "lstm"


class InputGated(LayerSpec):
    """The fields of layers `s' = f * s + (1 - f) * z(x)` whose gates f do not depend on the state.

    `gate_cap`: c, in float32. The forget gates are `f = c * sigmoid(...)`, so none exceeds c.
    `candidate`: the function that gives z: "tanh", "identity" or "positive" (`x + 0.5` for x >= 0, else `sigmoid(x)`).
        With "identity", the kind "gated" is the minGRU (Feng et al. 2024, arXiv 2410.01201, section 3.1); with
        "positive", the minGRU in log-space (appendix B.3), whose states are positive.
    """

    gates: ClassVar[int] = 2
    states: ClassVar[tuple[str, ...]] = ("s",)
    input_gated: ClassVar[bool] = True
    missing: ClassVar = {"constraint": "its gates have caps", "audit": NO_TORCH_LAYER}
    candidate: Literal["tanh", "identity", "positive"] = Field(
        default="tanh", description="function of the candidate z; `positive`: x + 0.5 for x >= 0, else sigmoid(x)"
    )
    gate_cap: float = Field(default=1.0, gt=0, le=1, description="greatest value of a forget gate")

    @property
    def cap(self) -> float:
        return float(np.float32(self.gate_cap))


class Gated(InputGated):
    """`s' = f(x) * s + (1 - f(x)) * z(x)`, f = c * sigmoid(W_f x + b_f)."""

    module: ClassVar[str] = "gated"
    kind: Literal["gated"] = "gated"


class Leaky(InputGated):
    """`s' = f * s + (1 - f) * z(x)`, f = c * sigmoid(b_f): leaky units, each with a constant time scale. The first half
    of the bias is b_f, and the weight is that of z."""

    module: ClassVar[str] = "leaky"
    kind: Literal["leaky"] = "leaky"

    def tensors(self, inputs: int) -> dict[str, Shape]:
        return {"weight": (self.units, inputs), "bias": (2 * self.units,)}


class Lru(LayerSpec):
    """The linear recurrent unit (Orvieto et al. 2023, arXiv 2303.06349): `s' = lambda * s + U x + b` for complex s.

    `lambda = exp(-exp(nu) + i exp(theta))`, so |lambda| < 1. The first half of the units are the real parts of s, the
    second half the imaginary parts. The block's mixing matrix reads both.
    """

    module: ClassVar[str] = "lru"
    states: ClassVar[tuple[str, ...]] = ("s",)
    missing: ClassVar = {"audit": NO_TORCH_LAYER}
    kind: Literal["lru"] = "lru"

    @model_validator(mode="after")
    def _even(self) -> Lru:
        if self.units % 2:
            raise ValueError(f"units are real and imaginary parts, so their number must be even, not {self.units}")
        return self

    @property
    def input_tensors(self) -> tuple[str, str]:
        return "weight", "bias"

    @property
    def recurrent_tensors(self) -> None:
        return None

    def tensors(self, inputs: int) -> dict[str, Shape]:
        half = (self.units // 2,)
        return {"weight": (self.units, inputs), "bias": (self.units,), "nu": half, "theta": half}


class Finite(LayerSpec):
    """The fields of all layers with finite memory.

    `skip`: whether the cell's output also enters the output layer's input: `x + sum skip(y)` over the layers with a
        skip, before the last LayerNorm. For residual blocks of models without recurrent layers.
    """

    finite: ClassVar[bool] = True
    missing: ClassVar = {"constraint": "finite memory needs no constraint", "audit": NO_TORCH_LAYER}
    skip: bool = Field(default=False, description="whether the cell's output also enters the output layer's input")

    @model_validator(mode="after")
    def _has_mix(self) -> Finite:
        if self.skip and self.block != "residual":
            raise ValueError("skip needs block = 'residual'")
        return self


class Convolution(Finite):
    """A causal convolution and an activation: `y_t = activation(sum_j K_j x_(t - j d) + b)`, d = `dilation`.

    `channels`: "depthwise": each unit reads the same unit of the input. "full": each unit reads all units.
    `activation`: "none", "relu", "tanh"; "glu": `a * sigmoid(g)` (Dauphin et al. 2017, arXiv 1612.08083); "wavenet":
        `tanh(a) * sigmoid(g)` (van den Oord et al. 2016, arXiv 1609.03499). For the last two, a is the first half of
        the rows, and g is the second half.

    A front block's convolution is depthwise and has neither dilation nor activation nor bias.
    """

    module: ClassVar[str] = "convolution"
    states: ClassVar[tuple[str, ...]] = ("inputs",)
    kind: Literal["convolution"] = "convolution"
    kernel_size: int = Field(ge=2, le=64, description="number of tokens that the convolution reads")
    dilation: int = Field(default=1, ge=1, le=4096, description="distance, in tokens, of two tokens that it reads")
    channels: Literal["depthwise", "full"] = Field(
        default="depthwise", description="`depthwise`: each unit reads the same unit of the input; `full`: all units"
    )
    activation: Literal["none", "relu", "tanh", "glu", "wavenet"] = Field(
        default="none", description="`glu`: a * sigmoid(g); `wavenet`: tanh(a) * sigmoid(g)"
    )

    @model_validator(mode="after")
    def _fits_block(self) -> Convolution:
        if self.block == "front" and (self.channels, self.activation, self.dilation) != ("depthwise", "none", 1):
            raise ValueError("a front block needs channels = 'depthwise', activation = 'none' and dilation = 1")
        return self

    @property
    def rows(self) -> int:
        """The number of sums that are computed at a token."""
        return self.units * (2 if self.activation in ("glu", "wavenet") else 1)

    @property
    def reach(self) -> int:
        return (self.kernel_size - 1) * self.dilation

    def state_shapes(self, inputs: int) -> dict[str, Shape]:
        return {"inputs": (self.reach, inputs)}

    def tensors(self, inputs: int) -> dict[str, Shape]:
        if self.channels == "depthwise" and inputs != self.units:
            raise ValueError(f"a depthwise convolution of {self.units} units cannot read {inputs} units")
        weight = (
            (self.kernel_size, self.rows) if self.channels == "depthwise" else (self.kernel_size, self.rows, inputs)
        )
        return {"weight": weight} if self.block == "front" else {"weight": weight, "bias": (self.rows,)}


class Attention(Finite):
    """Causal attention over the last `window` tokens, this token included. Head h of token t reads token t - j with the
    weight `softmax_j(q_t . k_(t - j) / sqrt(units / heads) + p_(h, j))` (Vaswani et al. 2017, arXiv 1706.03762). p is a
    table: a position is known only relative to the query. A token before the first one has no weight.
    """

    module: ClassVar[str] = "attention"
    gates: ClassVar[int] = 3
    states: ClassVar[tuple[str, ...]] = ("keys", "values", "filled")
    kind: Literal["attention"] = "attention"
    window: int = Field(ge=2, le=4096, description="number of tokens that a token reads, including itself")
    heads: int = Field(default=1, ge=1, le=256, description="number of heads; they share `units` equally")

    @model_validator(mode="after")
    def _divides(self) -> Attention:
        if self.units % self.heads:
            raise ValueError(f"units {self.units} is not a multiple of heads {self.heads}")
        if self.block == "front":
            raise ValueError("a front block needs a convolution")
        return self

    @property
    def reach(self) -> int:
        return self.window - 1

    def state_shapes(self, inputs: int) -> dict[str, Shape]:
        del inputs
        return {"keys": (self.reach, self.units), "values": (self.reach, self.units), "filled": (self.reach,)}

    def tensors(self, inputs: int) -> dict[str, Shape]:
        rows = self.gates * self.units
        return {"weight": (rows, inputs), "positions": (self.heads, self.window), "bias": (rows,)}


AnyLayer = Annotated[
    Linear | RnnTanh | RnnRelu | Gru | Lstm | Gated | Leaky | Lru | Convolution | Attention, Field(discriminator="kind")
]

Kind = Literal["linear", "rnn_tanh", "rnn_relu", "gru", "lstm", "gated", "leaky", "lru", "convolution", "attention"]

KINDS: dict[Kind, type[LayerSpec]] = {
    spec.model_fields["kind"].default: spec for spec in get_args(get_args(AnyLayer)[0])
}

_READER: TypeAdapter[AnyLayer] = TypeAdapter(AnyLayer)

FADING: tuple[Kind, ...] = tuple(kind for kind, spec in KINDS.items() if not spec.finite)
"""The kinds with fading memory."""


def read_layer(fields: object) -> AnyLayer:
    """Returns a layer from its fields, of which `kind` is one. Raises pydantic.ValidationError."""
    layer: AnyLayer = _READER.validate_python(fields)
    return layer
