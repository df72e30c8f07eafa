"""The oracle: the network in numpy, one step at a time. It is implemented from the equations, independently of the
torch network and the graphs.

Rows are a batch: x (B, H). The cells' equations are in `models/reference/cells/`. With n = LayerNorm(x) and the cell's
output y, the equations of the blocks are

    plain:     y = cell(x),  x' = y
    residual:  y = cell(n),  v = x + M y,  x' = v + W_2 max(0, W_1 LayerNorm(v) + b_1) + b_2
    front:     y = cell(n),  x' = x + W_2 max(0, W_1 y + b_1) + b_2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture, Placed
from wane.models.layer_parts import load
from wane.models.layer_registry import Finite
from wane.models.reference.functions import Array, affine, layer_norm
from wane.models.weights import CellWeights, Weights, head_weight

State = dict[str, Array]
"""The state tensors by the manifest's names, each (B, *shape)."""

Step = Callable[[CellWeights, Array, tuple[Array, ...]], tuple[Array, ...]]
"""The step function of a cell. Its arguments are the cell's weights, the input (B, I) and the state tensors. It returns
the next state, before which a cell with finite memory puts its output."""


class Reference:
    """The network of an architecture, computed in float64. An object with the `dtype` float32 is used to measure
    rounding."""

    def __init__(
        self, architecture: Architecture, weights: Weights, dtype: type[np.float64 | np.float32] = np.float64
    ) -> None:
        self.architecture = architecture
        self._dtype = dtype
        self._residual = architecture.residual
        self._weights = {name: self._cast(tensor) for name, tensor in weights.items()}
        self._finite, self._fading = (
            [_Cell(self, each, dtype) for each in architecture.placed(it)] for it in (True, False)
        )
        self.head: Array = head_weight(weights).astype(np.float64)

    def zero_state(self, batch: int) -> State:
        """Returns the state before any token."""
        return {tensor.name: np.zeros((batch, *tensor.shape)) for tensor in self.architecture.state_tensors()}

    def step(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, Array, State]:
        """Runs one step. tokens: (B). Returns logits (B, V), hidden (B, H) and the next state."""
        hidden, after = self.advance(tokens, state)
        return self.logits(hidden), hidden, after

    def advance(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, State]:
        """Runs one step without logits. tokens: (B). Returns the output layer's input, hidden (B, H), and the next
        state."""
        x, after = self.stream(tokens, state)
        for cell in self._fading:
            _, x = self._layer(cell, x, state, after)
        return self._top(x), after

    def stream(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, State]:
        """Returns the input of the first layer with fading memory, (B, H), and the next state of the layers below it.
        If there is none, the input is the last layer's output.

        tokens: (B). Reads only the tensors of `state` of layers with finite memory.
        """
        x: Array = self._weights["embedding.weight"][tokens]
        after: State = {}
        skipped: Array | float = 0.0
        for cell in self._finite:
            y, above = self._layer(cell, x, state, after)
            if isinstance(cell.placed.layer, Finite) and cell.placed.layer.skip:
                skipped = skipped + y @ self._weights[f"{cell.placed.name}.skip.weight"].T
            x = above
        return x + skipped, after

    def readout(self, x: Array, outputs: Sequence[Array]) -> Array:
        """Returns hidden (B, H) from `stream` (B, H) and the outputs of the cells of all layers with fading memory, (B,
        units) each."""
        for cell, y in zip(self._fading, outputs, strict=True):
            x = self._above_cell(cell.placed, x, y)
        return self._top(x)

    def logits(self, hidden: Array) -> Array:
        """Computes the output layer: hidden (..., H) -> logits (..., V)."""
        return hidden @ self.head.T + self._weights["head.bias"]

    def _layer(
        self, cell: _Cell, x: Array, state: Mapping[str, NDArray[np.floating]], after: State
    ) -> tuple[Array, Array]:
        """Returns the output of a layer's cell and the layer's output (B, H), and adds the layer's next state to
        `after`. x: (B, H)."""
        fed = self._normalise(f"{cell.placed.name}.norm", x) if self._residual else x
        new = cell.step(cell.weights, fed, tuple(self._cast(state[name]) for name in cell.states))
        after |= dict(zip(cell.states, new[-len(cell.states) :], strict=True))
        return new[0], self._above_cell(cell.placed, x, new[0])

    def _above_cell(self, placed: Placed, x: Array, y: Array) -> Array:
        """Returns the next layer's input. x: the layer's input. y: its cell's output."""
        if not self._residual:
            return y
        if placed.layer.block == "residual":
            x = x + y @ self._weights[f"{placed.name}.mix.weight"].T
            if not placed.layer.feed_forward:
                return x
            y = self._normalise(f"{placed.name}.feed_forward_norm", x)
        y = np.maximum(self._affine(f"{placed.name}.feed_forward_in", y), 0)
        return x + self._affine(f"{placed.name}.feed_forward_out", y)

    def _top(self, x: Array) -> Array:
        return self._normalise("norm", x) if self._residual else x

    def _cast(self, tensor: NDArray[np.floating]) -> Array:
        cast: Array = tensor.astype(self._dtype)
        return cast

    def _affine(self, name: str, x: Array) -> Array:
        return affine(x, self._weights[name + ".weight"], self._weights[name + ".bias"])

    def _normalise(self, name: str, x: Array) -> Array:
        gain, shift = self._weights[name + ".weight"], self._weights[name + ".bias"]
        return layer_norm(x, gain, shift, self.architecture.norm_epsilon)


class _Cell:
    """The cell of one layer."""

    def __init__(self, network: Reference, placed: Placed, dtype: type[np.float64 | np.float32]) -> None:
        self.placed = placed
        self.weights = CellWeights.of(placed, network._weights, dtype)
        self.step: Step = load("oracle", placed.layer.module).step
        self.states = [tensor.name for tensor in placed.state_tensors()]
