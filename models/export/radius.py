"""The radius of a window as ONNX nodes. It bounds the 2-norm distance of `hidden` from that of any run that ends in the
window's tokens.

This is the form of the bound of `models/certificate/request.py` that is cheapest to compute. Only networks of
input-gated cells have a radius. Let B windows have T tokens each. The error of a value is its distance from the run's
value. r, (T * B, 1), bounds the error of the stream x, a layer's input, in the 2-norm. e bounds the error of a state,
unit by unit. e' is the next value of e:

- First layer: `e' = f e`, starting from `|s| + reach` at the cut. Above convolution blocks, e starts at the first token
  whose receptive field is within the window. Before this token, r is FAR, which stands for no bound. If the network has
  a single layer, e is the initial value times the product of f over the tokens.
- A LayerNorm: with q = r / sqrt(variance + epsilon), `rho = min(q + q^3 / H, r / sqrt(epsilon), 2 sqrt(H))`. q + q^3 /
  H is above the bound 2 sqrt(H) sin(asin(t) / 2), t = q / sqrt(H), of `models/certificate/layer_norm.py` for every t <=
  1. This bound equals q sec(asin(t) / 2), and `sec(asin(t) / 2) <= 1 + t^2`. For t > 1, q + q^3 / H is above 2 sqrt(H),
  which bounds any error.
- Further layers: `e' = min((f + df) e + df (|s - z| + dz) + (1 - f) dz, |s| + reach)`. With the greatest slopes, `df =
  cap / 4 |W_f| rho` and `dz = |W_z| rho`, where |.| denotes the rows' lengths.
- Mixing and feed-forward: their outputs' errors are bounded by products of spectral norms, and added to r.

The bound includes the rounding of its own float32 arithmetic. Constants are rounded up by UP. Gates below SMALLEST are
replaced by SMALLEST. All other gates have a relative error of at most 2^-17. To include it, e is multiplied by GROWTH
for every token. FLOOR is added to the radius for the rounding of the float64 oracle.

In a residual network with one layer, the radius also includes the rounding of the float32 arithmetic of both runs
(`models/certificate/readout.py`). In other networks it does not.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from wane.models.architecture import Architecture
from wane.models.certificate.interval_rounding import Vector
from wane.models.certificate.request import RequestBound
from wane.models.export.graph import GraphWriter

GROWTH = 1 + 2.0**-16
SMALLEST = 2.0**-6
"""The lower limit of a gate. The absolute error of onnxruntime's sigmoid, 2^-23, is a relative error of 2^-17 at this
limit."""

FLOOR = 2.0**-20
FAR = 1e9
UP = 1 + 2.0**-17


def has_radius(architecture: Architecture) -> bool:
    """Returns whether a `window` graph of the architecture can have a radius: all layers with fading memory are
    input-gated, and there is at least one."""
    return bool(architecture.fading) and all(layer.input_gated for layer in architecture.fading)


class RadiusWriter:
    """Adds the error bounds of windows from the zero state to a graph, layer by layer."""

    def __init__(
        self, graph: GraphWriter, architecture: Architecture, request: RequestBound, shape: str, lengths: str
    ) -> None:
        """shape: int64 (2), T and B. lengths: int64 (B). With `request.readout`, all bounds include the float32
        rounding of both runs."""
        assert has_radius(architecture), "only input-gated cells have a radius: this is a bug"
        self._graph = graph
        self._architecture = architecture
        self._request = request
        self._readout = request.readout
        self._shape = shape
        self._lengths = lengths
        self._reach = architecture.reach
        self._units = [layer.units for layer in architecture.fading]
        time = graph.node("Gather", shape, graph.integer(0))
        self._growth = graph.node("Pow", graph.number(GROWTH), graph.node("Cast", time, to=TensorProto.FLOAT))
        self._times = graph.node("Range", graph.integer(0), time, graph.integer(1))
        self._early = ""
        """A value of the graph, (T, 1, 1): 1 at tokens whose receptive field in the convolutions includes tokens before
        the window, else 0."""
        if self._reach:
            early = graph.node("Less", self._times, graph.integer(self._reach))
            self._early = graph.node("Unsqueeze", self._number(early), graph.integers(1, 2))

    def only(self, f: str, states: str) -> tuple[str, str]:
        """Bounds the error of a network's only layer. f, states: the gates and the states after every token, (T, B,
        units).

        Returns the bounds of the state's error after the last token: of each unit, (B, units), and in the 2-norm, (B,
        1).
        """
        graph = self._graph
        after = graph.node("LessOrEqual", self._lengths, self._column(self._times))
        least = graph.node("Unsqueeze", self._number(after), graph.integers(2))
        least = graph.node("Max", least, graph.number(SMALLEST), *([self._early] if self._early else []))
        kept = graph.node("Max", f, least)
        kept = graph.node("ReduceProd", kept, graph.integers(0), keepdims=0)
        error = self._ended(graph.node("Mul", kept, self._start(states)))
        if self._request.states_apart is not None:
            error = graph.node("Add", error, self._up("states apart", self._request.states_apart))
        length = graph.node("ReduceL2", error, graph.integers(1), keepdims=1)
        if self._early:
            length = graph.node("Add", length, graph.node("Mul", self._column(self._short(1)), graph.number(FAR)))
        return error, length

    def first(self, f: str, states: str, last: str) -> tuple[str, str]:
        """Bounds the error of the first of several layers. f, states: the gates and the states after every token, (T,
        B, units). last: the row indices of the last tokens, (B).

        Returns the bounds of each unit's error after the last token, (B, units), and of the state's error in the 2-norm
        after every token, (N, 1).
        """
        graph = self._graph
        least = graph.node("Max", graph.number(SMALLEST), self._early) if self._early else graph.number(SMALLEST)
        kept = graph.node("Max", f, least)

        def step(body: GraphWriter, state: list[str], slices: list[str]) -> list[str]:
            return [body.node("Mul", slices[0], state[0])]

        errors = graph.scan(step, [self._start(states)], [kept])[0]
        return self._ended(self._at(errors, last, 0)), self._length(errors, self._early)

    def further(
        self, layer: int, gates: tuple[str, str], before: str, states: str, rho: str, last: str
    ) -> tuple[str, str]:
        """Bounds the error of a layer above the first. gates: f and z, (T, B, units) each. before: the state before the
        first token, (B, units). states: the states after every token, (T, B, units). rho: the bound of the LayerNorm's
        error, (N, 1). Returns the same bounds as `first`."""
        graph, cell, (f, z) = self._graph, self._request.layers[layer].cell, gates
        gate, candidate = (linear.rows for linear in cell.inflow)
        rho = graph.node("Reshape", rho, graph.node("Concat", self._shape, graph.integers(1), axis=0))
        df = graph.node("Mul", rho, self._up(f"gate {layer}", gate * (self._architecture.fading[layer].cap / 4)))
        dz = graph.node("Mul", rho, self._up(f"candidate {layer}", candidate))
        shorter = graph.node("Slice", states, graph.integers(0), graph.integers(-1))
        earlier = graph.node("Concat", graph.node("Unsqueeze", before, graph.integers(0)), shorter, axis=0)
        apart = graph.node("Add", graph.node("Abs", graph.node("Sub", earlier, z)), dz)
        entering = graph.node("Mul", graph.node("Sub", graph.number(UP), f), dz)
        driven = graph.node("Add", graph.node("Mul", df, apart), entering)
        kept = graph.node("Add", graph.node("Max", f, graph.number(SMALLEST)), df)
        reach = self._up(f"reach {layer}", cell.reach[0])
        most = graph.node("Add", graph.node("Abs", states), reach)

        def step(body: GraphWriter, state: list[str], slices: list[str]) -> list[str]:
            moved = body.node("Add", body.node("Mul", slices[0], state[0]), slices[1])
            return [body.node("Min", moved, slices[2])]

        start = graph.node("Add", graph.node("Abs", before), reach)
        errors = graph.scan(step, [start], [kept, driven, most])[0]
        return self._grown(self._at(errors, last, layer)), self._length(errors, "")

    def normalised(self, r: str, inverse: str) -> str:
        """Bounds the error of a LayerNorm's normalised vector, before its gain. r: the bound of its input's error, (N,
        1). inverse: 1 / sqrt(variance + epsilon), (N, 1)."""
        graph, hidden = self._graph, self._architecture.hidden
        q = graph.node("Mul", r, inverse)
        squared = graph.node("Mul", graph.node("Mul", q, q), graph.number(UP / hidden))
        bent = graph.node("Mul", q, graph.node("Add", squared, graph.number(UP)))
        steepest = graph.number(UP / np.sqrt(self._architecture.norm_epsilon))
        return graph.node("Min", bent, graph.node("Mul", r, steepest), graph.number(2 * UP * np.sqrt(hidden)))

    def mixed(self, layer: int, r: str, error: str) -> str:
        """Bounds the error of the stream after the mixing matrix. r: the bound of the error of the block's input, or ""
        if this input is exact. error: the bound of the state's error. The arguments and the result have the shape (N,
        1)."""
        turned = self._graph.node("Mul", error, self._graph.number(UP * self._request.layers[layer].mix.norm))
        return self._graph.node("Add", r, turned) if r else turned

    def evaluated(self, r: str, x: str) -> tuple[str, str]:
        """Returns `r`, the bound of the error of the sum `x` after the mixing matrix, with the rounding of both runs
        added, and the bound of the rounding that depends on the length of `x`. r: (N, 1), x: (N, H). Without a readout,
        returns `r` and ""."""
        if self._readout is None:
            return r, ""
        graph = self._graph
        length = graph.node("ReduceL2", x, graph.integers(1), keepdims=1)
        off = graph.node("Mul", length, graph.number(UP * 2 * self._readout.relative))
        return graph.node("Add", graph.node("Add", r, off), graph.number(UP * 2 * self._readout.mixed)), off

    def fed_forward(self, layer: int, r: str, rho: str, off: str) -> str:
        """Bounds the error of the stream after the feed-forward block. r, rho: the bounds before and after the block's
        LayerNorm, (N, 1). off: see `evaluated`."""
        graph, part = self._graph, self._request.layers[layer].feed_forward
        assert part is not None, "the block has no feed-forward part: this is a bug"
        if self._readout is None:
            return graph.node("Add", r, graph.node("Mul", rho, graph.number(UP * part.inner.norm * part.outer.norm)))
        assert self._readout.slope is not None, "the readout has no feed-forward part: this is a bug"
        r = graph.node("Add", r, graph.node("Mul", rho, graph.number(UP * self._readout.slope)))
        return graph.node("Add", graph.node("Add", r, off), graph.number(UP * 2 * self._readout.fed))

    def radius(self, rho: str) -> str:
        """Returns the windows' radius, (B). rho: (B, 1), the bound of the last LayerNorm's error, or of the last
        state's error in a plain network."""
        graph = self._graph
        outward = graph.node("Mul", rho, graph.number(UP * self._request.largest_gain))
        floor = FLOOR if self._readout is None else FLOOR + UP * 2 * self._readout.top
        return graph.node("Squeeze", graph.node("Add", outward, graph.number(floor)), graph.integers(1))

    def _start(self, states: str) -> str:
        """Returns the bound of the error of the first layer's state before the first token whose receptive field is
        within the window: (B, units)."""
        graph, reach = self._graph, self._up("reach 0", self._request.layers[0].cell.reach[0])
        if not self._reach:
            units = graph.integers(self._units[0])
            batch = graph.node("Slice", self._shape, graph.integers(1), graph.integers(2))
            return graph.node("Expand", reach, graph.node("Concat", batch, units, axis=0))
        latest = graph.node("Sub", graph.node("Gather", self._shape, graph.integer(0)), graph.integer(1))
        latest = graph.node("Min", latest, graph.integer(self._reach - 1))
        return graph.node("Add", graph.node("Abs", graph.node("Gather", states, latest)), reach)

    def _ended(self, error: str) -> str:
        """Returns the bound of the error of the first layer's state after the last token. For windows with fewer than
        `self._reach` tokens, the cell's `reach` is added: `_start` may have read the state after a padding token, and
        `reach` bounds the state after the last token."""
        error = self._grown(error)
        if not self._reach:
            return error
        graph, reach = self._graph, self._up("reach 0", self._request.layers[0].cell.reach[0])
        return graph.node("Add", error, graph.node("Mul", self._column(self._short(0)), reach))

    def _short(self, more: int) -> str:
        """Returns (B): 1 for windows with fewer than `self._reach + more` tokens, else 0."""
        return self._number(self._graph.node("Less", self._lengths, self._graph.integer(self._reach + more)))

    def _length(self, errors: str, early: str) -> str:
        graph = self._graph
        length = self._grown(graph.node("ReduceL2", errors, graph.integers(2), keepdims=1))
        if early:
            length = graph.node("Add", length, graph.node("Mul", early, graph.number(FAR)))
        return graph.node("Reshape", length, graph.integers(-1, 1))

    def _grown(self, error: str) -> str:
        return self._graph.node("Mul", error, self._growth)

    def _at(self, errors: str, last: str, layer: int) -> str:
        graph = self._graph
        return graph.node("Gather", graph.node("Reshape", errors, graph.integers(-1, self._units[layer])), last)

    def _number(self, flags: str) -> str:
        return self._graph.node("Cast", flags, to=TensorProto.FLOAT)

    def _column(self, values: str) -> str:
        return self._graph.node("Unsqueeze", values, self._graph.integers(1))

    def _up(self, name: str, value: Vector) -> str:
        return self._graph.vector(name, value * UP)
