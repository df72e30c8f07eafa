"""The architecture of a network: a stack of causal layers between the embedding and the output layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, ValidationError, WrapValidator, model_validator

from wane.models.layer_registry import KINDS, AnyLayer, Frozen, LayerSpec

LARGEST_REACH = 65_535
"""The largest number of earlier tokens on which layers with finite memory may depend."""

SMALLEST_NORMAL = 2.0**-126
"""The smallest positive number that float32 represents with full precision."""

LARGEST_STATE = 1 << 26
"""The largest size, in bytes, of a session's state."""


class StateTensor(Frozen):
    """One tensor of a session's state. Its initial value is zero."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32"] = "float32"


class Architecture(Frozen):
    """All properties of the network except its weights.

    `embedding`: the width of the embedding, which is the first layer's input. If the layers are not plain, it is the
        width of every layer's output, too.
    `layers`: the layers, bottom to top. Layers with finite memory stand below layers with fading memory. Either all
        layers are plain, or none is. In the second case, the last layer is followed by a LayerNorm.
    `tied`: whether the output layer uses the embedding's matrix.
    `norm_epsilon`: the number that every LayerNorm adds to the variance. The change of a LayerNorm's output is
        therefore at most `max|gain| / sqrt(norm_epsilon)` times the change of its input.

    Up to schema 5, a network had layers of one `cell` and, below them, blocks of convolutions (`front`). Such fields
    are read into `layers`.
    """

    vocabulary_size: int = Field(ge=2)
    embedding: int = Field(ge=1)
    layers: tuple[AnyLayer, ...] = Field(min_length=1, max_length=1024)
    tied: bool = True
    norm_epsilon: float = Field(default=1e-5, ge=SMALLEST_NORMAL, le=1)

    @model_validator(mode="before")
    @classmethod
    def _from_cells(cls, data: object) -> object:
        return from_cells(data) if isinstance(data, Mapping) and "cell" in data else data

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        if self.tied and self.embedding != self.hidden:
            raise ValueError(f"tied weights need embedding == hidden, not {self.embedding} and {self.hidden}")
        plain = [layer.block == "plain" for layer in self.layers]
        if any(plain) and not all(plain):
            raise ValueError("either all layers are plain, or none is")
        if all(plain) and self.norm_epsilon != 1e-5:
            raise ValueError("norm_epsilon needs block = 'residual'")
        for below, above in zip(self.layers, self.layers[1:], strict=False):
            if above.finite and not below.finite:
                raise ValueError(
                    f"a layer with finite memory stands below the layers with fading memory, but {above.kind} stands "
                    f"above {below.kind}"
                )
        if self.fading and any(getattr(layer, "skip", False) for layer in self.layers):
            raise ValueError("skip is for models without recurrent layers")
        for placed in self.placed():
            placed.layer.tensors(placed.inputs)
        if self.reach > LARGEST_REACH:
            raise ValueError(f"the layers reach {self.reach} tokens back, but at most {LARGEST_REACH} are allowed")
        if (size := sum(4 * math.prod(tensor.shape) for tensor in self.state_tensors())) > LARGEST_STATE:
            raise ValueError(f"a session's state has {size} bytes, but at most {LARGEST_STATE} are allowed")
        return self

    @property
    def residual(self) -> bool:
        """Whether the layers are residual or front blocks, and not plain."""
        return self.layers[0].block != "plain"

    @property
    def hidden(self) -> int:
        """The width of the output layer's input."""
        return self.embedding if self.residual else self.layers[-1].units

    @property
    def finite(self) -> tuple[LayerSpec, ...]:
        """The layers with finite memory, bottom to top. Their tensors' names start with `front.0.`, `front.1.`, ..."""
        return tuple(layer for layer in self.layers if layer.finite)

    @property
    def fading(self) -> tuple[LayerSpec, ...]:
        """The layers with fading memory, bottom to top. Their tensors' names start with `layers.0.`, ..."""
        return tuple(layer for layer in self.layers if not layer.finite)

    @property
    def reach(self) -> int:
        """The number of earlier tokens on which the output of the layers with finite memory depends."""
        return sum(layer.reach for layer in self.layers)

    @property
    def family(self) -> str:
        """The kind of the last layer."""
        return self.layers[-1].kind

    @property
    def norm_columns(self) -> int:
        """The number of columns of the output `norms` (see `Readout` in `models/manifest.py`)."""
        return 3 if self.layers[-1].feed_forward else 2

    def placed(self, finite: bool | None = None) -> list[Placed]:
        """Returns every layer, or every layer with finite or fading memory, with its place in the network, bottom to
        top."""
        found: list[Placed] = []
        width, counts = self.embedding, {True: 0, False: 0}
        for layer in self.layers:
            name = f"{'front' if layer.finite else 'layers'}.{counts[layer.finite]}"
            counts[layer.finite] += 1
            found.append(Placed(layer, name, width))
            width = width if self.residual else layer.units
        return [placed for placed in found if finite in (None, placed.layer.finite)]

    def layer_states(self, layer: int) -> tuple[str, ...]:
        """Returns the names of the state tensors of one of the layers with fading memory: `layers.0.h`,
        `layers.0.c`."""
        return tuple(f"layers.{layer}.{name}" for name in self.fading[layer].states)

    def state_tensors(self) -> tuple[StateTensor, ...]:
        """Returns a session's state tensors, bottom to top: `front.0.inputs`, ..., `layers.0.h`, `layers.0.c`, ..."""
        return tuple(tensor for placed in self.placed() for tensor in placed.state_tensors())


class ImportedGraph(Architecture):
    """The architecture of a graph that Wane did not build (`models/imported/`). Its layers are not known.

    `width`: the width of `hidden`, which is the input of the graph's last matrix if it was found, and otherwise the
        logits.
    `tensors`: a session's state tensors. Each is (B, *shape) with the batch first, in float32. The graph's own layout
        and type may differ.
    `rows`: whether the rows of a batch run together, or one by one inside the graph. They run one by one if the graph
        has a fixed batch of 1 that could not be changed, or if its rows affect one another.
    """

    kind: Literal["imported"] = "imported"
    width: int = Field(ge=1)
    tensors: tuple[StateTensor, ...] = Field(min_length=1, max_length=1024)
    rows: Literal["together", "one by one"] = "together"
    # What is not known is not in the manifest.
    embedding: int = Field(default=1, exclude=True)
    layers: tuple[()] = Field(default=(), exclude=True)
    tied: bool = Field(default=False, exclude=True)
    norm_epsilon: float = Field(default=1e-5, exclude=True)

    @model_validator(mode="after")
    def _consistent(self) -> ImportedGraph:
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) < len(names) or not all(name.startswith("state.") for name in names):
            raise ValueError(f"the names of the tensors must differ and start with 'state.', but are {names}")
        if any(size < 1 for tensor in self.tensors for size in tensor.shape):
            raise ValueError("every size in a tensor's shape must be at least 1")
        if (size := sum(4 * math.prod(tensor.shape) for tensor in self.tensors)) > LARGEST_STATE:
            raise ValueError(f"a session's state has {size} bytes, but at most {LARGEST_STATE} are allowed")
        return self

    @property
    def residual(self) -> bool:
        """False: no layer is known."""
        return False

    @property
    def hidden(self) -> int:
        """The width of `hidden`."""
        return self.width

    @property
    def family(self) -> str:
        """The kind of the architecture."""
        return self.kind

    def state_tensors(self) -> tuple[StateTensor, ...]:
        """Returns a session's state tensors."""
        return self.tensors


def read_architecture(data: object, read: Callable[[object], Architecture]) -> Architecture:
    """Returns the architecture in a manifest's field. `read` reads that of a network of Wane's layers. Raises
    ValueError."""
    if isinstance(data, Mapping) and data.get("kind") == "imported":
        return ImportedGraph.model_validate(data)
    return read(data)


AnyArchitecture = Annotated[SerializeAsAny[Architecture], WrapValidator(read_architecture)]
"""The field of a record that has either kind of architecture."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer in its place. name: the beginning of its tensors' names. inputs: the width of its input."""

    layer: LayerSpec
    name: str
    inputs: int

    @property
    def cell(self) -> str:
        """The beginning of the names of the cell's weights: `layers.0.cell`, or `front.0.convolution` in a front
        block."""
        return f"{self.name}.{self.layer.kind if self.layer.block == 'front' else 'cell'}"

    def state_tensors(self) -> tuple[StateTensor, ...]:
        """Returns the layer's state tensors."""
        shapes = self.layer.state_shapes(self.inputs)
        return tuple(StateTensor(name=f"{self.name}.{name}", shape=shape) for name, shape in shapes.items())


class Front(Frozen):
    """The convolution blocks of an architecture up to schema 5."""

    blocks: int = Field(ge=1, le=64, description="number of blocks, each of which reads the output of the one below")
    kernel_size: int = Field(ge=2, le=64, description="number of tokens that a convolution reads")
    feed_forward: int = Field(ge=1, description="width of the feed-forward part")

    @property
    def reach(self) -> int:
        """The number of tokens in the blocks' receptive field, without the current token."""
        return self.blocks * (self.kernel_size - 1)


class _Cells(Frozen):
    """The fields of an architecture up to schema 5. `units` is the number of units of each cell in residual blocks,
    `hidden` by default. `gate_caps` has one number for each layer of a gated cell, or none."""

    cell: Literal["linear", "rnn_tanh", "rnn_relu", "gru", "lstm", "gated"]
    vocabulary_size: int = Field(ge=2)
    embedding: int = Field(ge=1)
    hidden: int = Field(ge=1)
    layers: int = Field(ge=1, le=1024)
    block: Literal["plain", "residual"] = "plain"
    feed_forward: int = Field(default=0, ge=0)
    tied: bool = True
    front: Front | None = None
    units: int | None = Field(default=None, ge=1)
    norm_epsilon: float = Field(default=1e-5, ge=SMALLEST_NORMAL, le=1)
    gate_caps: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> _Cells:
        if self.block == "residual" and self.embedding != self.hidden:
            raise ValueError(f"residual blocks need embedding == hidden, not {self.embedding} and {self.hidden}")
        if self.block == "plain" and (self.front is not None or self.units is not None):
            raise ValueError("front and units need block = 'residual'")
        if self.gate_caps and not KINDS[self.cell].input_gated:
            raise ValueError(f"gate_caps are for gated cells, not for {self.cell}")
        if self.gate_caps and len(self.gate_caps) != self.layers:
            raise ValueError(f"gate_caps has {len(self.gate_caps)} numbers, but the network has {self.layers} layers")
        return self


def from_cells(data: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields of an `Architecture` from the fields of an architecture up to schema 5. Raises ValueError."""
    try:
        old = _Cells.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(": ".join([*map(str, first["loc"]), str(first["msg"])])) from error
    layers: list[dict[str, object]] = []
    if old.front is not None:
        shared = {"kernel_size": old.front.kernel_size, "feed_forward": old.front.feed_forward}
        layers += [{"kind": "convolution", "block": "front", "units": old.hidden} | shared] * old.front.blocks
    for layer in range(old.layers):
        fields: dict[str, object] = {"kind": old.cell, "block": old.block, "feed_forward": old.feed_forward}
        fields["units"] = old.units or old.hidden
        if old.gate_caps:
            fields["gate_cap"] = old.gate_caps[layer]
        layers.append(fields)
    kept = {"vocabulary_size", "embedding", "tied", "norm_epsilon"}
    return {name: value for name, value in old.model_dump().items() if name in kept} | {"layers": layers}
