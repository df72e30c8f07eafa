"""The oracle: every cell, one step at a time, in numpy, written from the equations and from nothing else.

Rows are a batch: x (B, I), h, c, s (B, H). With `sigma` the logistic function and `*` elementwise:

    linear    h' = W h + U x + b
    rnn       h' = rho(W h + U x + b), rho = tanh or max(0, .)
    gru       r = sigma(U_r x + b_r + W_r h + d_r),  z = sigma(U_z x + b_z + W_z h + d_z)
              n = tanh(U_n x + b_n + r * (W_n h + d_n)),  h' = (1 - z) * n + z * h
    lstm      i, f, o = sigma(U x + b + W h + d) by gate,  g = tanh(U_g x + b_g + W_g h + d_g)
              c' = f * c + i * g,  h' = o * tanh(c')
    gated     f = cap * sigma(U_f x + b_f),  z = tanh(U_z x + b_z),  s' = f * s + (1 - f) * z
    front     n = LayerNorm(x),  c = sum_j K_j * n_(j tokens back),  x' = x + W_2 max(0, W_1 c + b_1) + b_2

GRU: Cho et al. 2014 as torch has it, the reset gate after the matrix. LSTM: Hochreiter and Schmidhuber 1997 with
the forget gate of Gers et al. 2000.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import STATE_NAMES, Architecture
from wane.models.weights import Weights, head_weight

Array = NDArray[np.float64]
State = dict[str, Array]
"""By the manifest's names, each (B, *shape)."""


def sigmoid(x: Array) -> Array:
    """The logistic function, without overflow or cancellation."""
    small = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1.0, small) / (1 + small)
    return result


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Over the last axis: weight * (x - mean) / sqrt(variance + epsilon) + bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    result: Array = centred / np.sqrt(variance + epsilon) * weight + bias
    return result


class Reference:
    """The network of an architecture, stepped in float64, or in `dtype` to see what rounding does."""

    def __init__(
        self, architecture: Architecture, weights: Weights, dtype: type[np.float64 | np.float32] = np.float64
    ) -> None:
        self.architecture = architecture
        self._dtype = dtype
        self._residual = architecture.block == "residual"
        self._weights = {name: self._cast(tensor) for name, tensor in weights.items()}
        self.head: Array = head_weight(weights).astype(np.float64)

    def zero_state(self, batch: int) -> State:
        """The state before any token."""
        return {tensor.name: np.zeros((batch, *tensor.shape)) for tensor in self.architecture.state_tensors()}

    def step(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, Array, State]:
        """tokens: (B). Returns logits (B, V), hidden (B, H) and the state after."""
        hidden, after = self.advance(tokens, state)
        return self.logits(hidden), hidden, after

    def advance(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, State]:
        """A step without logits. tokens: (B). Returns hidden (B, H), the output layer's input, and the state after."""
        architecture = self.architecture
        x, after = self.stream(tokens, state)
        for layer in range(architecture.layers):
            names = [f"layers.{layer}.{name}" for name in STATE_NAMES[architecture.cell]]
            fed = self._normalise(f"layers.{layer}.norm", x) if self._residual else x
            new = self._cell(layer, fed, *(self._cast(state[name]) for name in names))
            after |= dict(zip(names, new, strict=True))
            x = self._above_cell(layer, x, new[0])
        return self._top(x), after

    def stream(self, tokens: NDArray[np.int64], state: Mapping[str, NDArray[np.floating]]) -> tuple[Array, State]:
        """What the first layer is fed, (B, H), and the front's state after: embeddings, or what a front makes of them.

        tokens: (B); of `state`, the front's tensors are read."""
        x: Array = self._weights["embedding.weight"][tokens]
        after: State = {}
        for block in range(0 if self.architecture.front is None else self.architecture.front.blocks):
            x, inputs = self._front(f"front.{block}.", x, self._cast(state[f"front.{block}.inputs"]))
            after[f"front.{block}.inputs"] = inputs
        return x, after

    def readout(self, x: Array, outputs: Sequence[Array]) -> Array:
        """hidden (B, H) of the first layer's stream (B, H) and what each layer's cell puts out, (B, units)."""
        for layer, y in enumerate(outputs):
            x = self._above_cell(layer, x, y)
        return self._top(x)

    def logits(self, hidden: Array) -> Array:
        """hidden: (..., H) -> logits (..., V)."""
        return hidden @ self.head.T + self._weights["head.bias"]

    def _above_cell(self, layer: int, x: Array, y: Array) -> Array:
        """What the next layer reads. x: the layer's input, y: what its cell puts out."""
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
        """A convolution block. x: (B, H), before: (B, kernel - 1, H), the inputs before, the oldest first."""
        inputs = np.concatenate([before, self._normalise(prefix + "norm", x)[:, None]], axis=1)
        y = (inputs * self._weights[prefix + "convolution.weight"]).sum(axis=1)
        y = np.maximum(self._affine(prefix + "feed_forward_in", y), 0)
        return x + self._affine(prefix + "feed_forward_out", y), inputs[:, 1:]

    def _affine(self, name: str, x: Array) -> Array:
        return x @ self._weights[name + ".weight"].T + self._weights[name + ".bias"]

    def _normalise(self, name: str, x: Array) -> Array:
        gain, shift = self._weights[name + ".weight"], self._weights[name + ".bias"]
        return layer_norm(x, gain, shift, self.architecture.norm_epsilon)

    def _cell(self, layer: int, x: Array, *state: Array) -> tuple[Array, ...]:
        """One step of one layer's cell: its state after, what it puts out first."""
        cell, prefix = self.architecture.cell, f"layers.{layer}.cell."
        if cell == "gated":
            gate, candidate = np.split(self._affine_of(prefix, "weight", "bias", x), 2, axis=-1)
            f = self.architecture.gate_cap(layer) * sigmoid(gate)
            return (f * state[0] + (1 - f) * np.tanh(candidate),)
        h = state[0]
        inflow = self._affine_of(prefix, "weight_ih_l0", "bias_ih_l0", x)
        recalled = self._affine_of(prefix, "weight_hh_l0", "bias_hh_l0", h)
        match cell:
            case "linear":
                return (inflow + recalled,)
            case "rnn_tanh":
                return (np.tanh(inflow + recalled),)
            case "rnn_relu":
                return (np.maximum(inflow + recalled, 0),)
            case "gru":
                u_r, u_z, u_n = np.split(inflow, 3, axis=-1)
                w_r, w_z, w_n = np.split(recalled, 3, axis=-1)
                r, z = sigmoid(u_r + w_r), sigmoid(u_z + w_z)
                n = np.tanh(u_n + r * w_n)
                return ((1 - z) * n + z * h,)
            case "lstm":
                i, f, g, o = np.split(inflow + recalled, 4, axis=-1)
                c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
                return (sigmoid(o) * np.tanh(c), c)

    def _affine_of(self, prefix: str, weight: str, bias: str, x: Array) -> Array:
        return x @ self._weights[prefix + weight].T + self._weights[prefix + bias]
