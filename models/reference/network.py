"""The oracle: the network in numpy, one step at a time. It is implemented from the equations, independently of the
torch network and the graphs.

Rows are a batch: x (B, H). The cells' equations are in `models/reference/cells/`; the equations of a convolution block
are

    n = LayerNorm(x),  c = sum_j K_j * n_(j tokens back),  x' = x + W_2 max(0, W_1 c + b_1) + b_2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.cell_registry import load
from wane.models.manifest import Architecture
from wane.models.reference.functions import Array, affine, layer_norm
from wane.models.weights import CellWeights, Weights, head_weight

State = dict[str, Array]
"""The state tensors by the manifest's names, each (B, *shape)."""

Step = Callable[[CellWeights, Array, tuple[Array, ...]], tuple[Array, ...]]
"""The step function of a cell. Its arguments are the cell's weights, the input (B, I) and the state tensors, (B, H)
each. It returns the next state."""


class Reference:
    """The network of an architecture, computed in float64. An object with the `dtype` float32 is used to measure
    rounding."""

    def __init__(
        self, architecture: Architecture, weights: Weights, dtype: type[np.float64 | np.float32] = np.float64
    ) -> None:
        self.architecture = architecture
        self._dtype = dtype
        self._residual = architecture.block == "residual"
        self._weights = {name: self._cast(tensor) for name, tensor in weights.items()}
        self._cells = [
            CellWeights.of(architecture, layer, self._weights, dtype) for layer in range(architecture.layers)
        ]
        self._step: Step = load("oracle", architecture.cell).step
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
        architecture = self.architecture
        x, after = self.stream(tokens, state)
        for layer in range(architecture.layers):
            names = architecture.layer_states(layer)
            fed = self._normalise(f"layers.{layer}.norm", x) if self._residual else x
            before = tuple(self._cast(state[name]) for name in names)
            new = self._step(self._cells[layer], fed, before)
            after |= dict(zip(names, new, strict=True))
            x = self._above_cell(layer, x, new[0])
        return self._top(x), after

    def stream(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, State]:
        """Returns the first layer's input, (B, H), and the next state of the convolution blocks. The input is the
        embedding, or the output of the blocks.

        tokens: (B). Reads only the blocks' tensors of `state`.
        """
        x: Array = self._weights["embedding.weight"][tokens]
        after: State = {}
        for block in range(0 if self.architecture.front is None else self.architecture.front.blocks):
            x, inputs = self._front(f"front.{block}.", x, self._cast(state[f"front.{block}.inputs"]))
            after[f"front.{block}.inputs"] = inputs
        return x, after

    def readout(self, x: Array, outputs: Sequence[Array]) -> Array:
        """Returns hidden (B, H) from the first layer's input `stream` (B, H) and the outputs of all layers' cells, (B,
        units) each."""
        for layer, y in enumerate(outputs):
            x = self._above_cell(layer, x, y)
        return self._top(x)

    def logits(self, hidden: Array) -> Array:
        """Computes the output layer: hidden (..., H) -> logits (..., V)."""
        return hidden @ self.head.T + self._weights["head.bias"]

    def _above_cell(self, layer: int, x: Array, y: Array) -> Array:
        """Returns the next layer's input. x: the layer's input. y: its cell's output."""
        if not self._residual:
            return y
        prefix = f"layers.{layer}."
        x = x + y @ self._weights[prefix + "mix.weight"].T
        if self.architecture.feed_forward:
            y = self._normalise(prefix + "feed_forward_norm", x)
            y = np.maximum(self._affine(prefix + "feed_forward_in", y), 0)
            x = x + self._affine(prefix + "feed_forward_out", y)
        return x

    def _top(self, x: Array) -> Array:
        return self._normalise("norm", x) if self._residual else x

    def _cast(self, tensor: NDArray[np.floating]) -> Array:
        cast: Array = tensor.astype(self._dtype)
        return cast

    def _front(self, prefix: str, x: Array, before: Array) -> tuple[Array, Array]:
        """Runs a convolution block. x: (B, H). before: (B, kernel - 1, H), the earlier inputs, oldest first."""
        inputs = np.concatenate([before, self._normalise(prefix + "norm", x)[:, None]], axis=1)
        y = (inputs * self._weights[prefix + "convolution.weight"]).sum(axis=1)
        y = np.maximum(self._affine(prefix + "feed_forward_in", y), 0)
        return x + self._affine(prefix + "feed_forward_out", y), inputs[:, 1:]

    def _affine(self, name: str, x: Array) -> Array:
        return affine(x, self._weights[name + ".weight"], self._weights[name + ".bias"])

    def _normalise(self, name: str, x: Array) -> Array:
        gain, shift = self._weights[name + ".weight"], self._weights[name + ".bias"]
        return layer_norm(x, gain, shift, self.architecture.norm_epsilon)
