"""The network as ONNX nodes: embedding, layers and output layer, for one step and for whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

from wane.models.architecture import Architecture, Placed
from wane.models.certificate.admissible import has_readout
from wane.models.certificate.request import RequestBound
from wane.models.export.blocks import feed_forward, layer_norm, layer_norm_by
from wane.models.export.cell_writer import InputGatedWriter, Times, build_cell, build_finite_cell
from wane.models.export.graph import GraphWriter
from wane.models.export.linear import linear
from wane.models.export.radius import RadiusWriter
from wane.models.layer_registry import Finite

TABLE_ELEMENTS = 1 << 22
"""The largest number of floats (16 MiB) in a table of the first layer's `drive` for every token. onnxruntime computes
such a table when it loads the graph. If the table would be larger, `drive` is computed for each request."""


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """The results of a run over sequences: `every` is `hidden` after every token, (T * B, H). `last` is `hidden` after
    each sequence's last token, (B, H). `state` is the state after the last token. `norms` describes the LayerNorms
    after the last token, (B, columns): see `Readout` in `models/manifest.py`. `every_norms` describes them after every
    token, (T * B, columns). Both are "" for other architectures.

    With a request bound, there are three more results after the last token: `radius` (B), the first layer's input
    `stream` (B, H), and `errors`, which bound the error of each layer's state (B, units).
    """

    every: str
    last: str
    state: list[str]
    norms: str = ""
    every_norms: str = ""
    radius: str = ""
    stream: str = ""
    errors: tuple[str, ...] = ()


class NetworkWriter:
    """Writes the network into one graph. Values have the shape (N, H), where N = B for a step. For sequences N = T * B,
    and the rows are time-major."""

    def __init__(self, graph: GraphWriter, architecture: Architecture) -> None:
        self._graph = graph
        self._architecture = architecture
        self._residual = architecture.residual
        self._finite = [(placed, build_finite_cell(graph, placed)) for placed in architecture.placed(finite=True)]
        self._placed = architecture.placed(finite=False)
        self._cells = [build_cell(graph, placed) for placed in self._placed]
        self._has_readout = has_readout(architecture) and graph.precision == "float32"
        self._statistics: list[str] = []

    def step(self, tokens: str, state: list[str]) -> tuple[str, list[str], str]:
        """Adds one step. tokens: (B). Returns hidden (B, H), the next state, and `norms` (see `SequenceRun`)."""
        x = self._graph.node("Gather", self._embedding(), tokens)
        after: list[str] = []
        skips: list[tuple[Placed, str]] = []
        for placed, finite in self._finite:
            y, new = finite.step(self._input(placed, x), self._state_of(placed, after, state))
            after += new
            x = self._above_finite(placed, x, y)
            skips.append((placed, y))
        x = self._skipped(x, skips)
        for layer, cell in enumerate(self._cells):
            driven = self._drive(layer, tokens, x)
            new = cell.step(self._graph, self._state_of(cell.placed, after, state), driven)
            after += new
            x, _ = self._above_cell(layer, x, new[0], "", None)
        if self._residual:
            x, _ = self._normalise_off("norm", x, "", None)
        return x, after, self._norms()

    def sequence(
        self,
        tokens: str,
        lengths: str,
        state: list[str] | None,
        every: bool,
        request: RequestBound | None = None,
    ) -> SequenceRun:
        """Adds a run over sequences. tokens: (B, T). lengths: (B). state: the initial state, or None for the zero
        state.

        If `every` is false, the part above the last cell is computed only for each sequence's last token, and the
        result's `every` is "". If `request` is given, the radius is computed as well. This requires an input-gated
        network, the zero state, and that `every` is false.
        """
        graph = self._graph
        by_time = graph.node("Transpose", tokens, perm=[1, 0])
        shape = graph.node("Shape", by_time)
        flat = graph.node("Reshape", by_time, graph.integers(-1))
        last = self._last_rows(lengths, graph.node("Shape", by_time, start=1))
        if state is None:
            state = self._zeros(shape)
        x = graph.node("Gather", self._embedding(), flat)
        after: list[str] = []
        times = Times(graph, by_time, lengths)
        skips: list[tuple[Placed, str]] = []
        for placed, finite in self._finite:
            y, new = finite.sequence(self._input(placed, x), times, self._state_of(placed, after, state))
            after += new
            x = self._above_finite(placed, x, y)
            skips.append((placed, y))
        if not self._cells and not every:
            x = graph.node("Gather", x, last)
            skips = [(placed, graph.node("Gather", y, last)) for placed, y in skips]
        x = self._skipped(x, skips)
        radius = None if request is None else RadiusWriter(graph, self._architecture, request, shape, lengths)
        stream = "" if radius is None else graph.node("Gather", x, last)
        r, errors = "", []
        for layer, cell in enumerate(self._cells):
            top = layer == len(self._cells) - 1
            before = self._state_of(cell.placed, after, state)
            rho, candidate = "", ""
            if radius is None or layer == 0:
                driven = self._drive(layer, flat, x)
            else:
                assert isinstance(cell, InputGatedWriter), "only input-gated cells have a radius: this is a bug"
                fed, rho = self._normalise_off(f"layers.{layer}.norm", x, r, radius)
                gate, candidate = cell.gates_of(fed)
                driven = cell.enter(gate, candidate)
                candidate = self._by_time(candidate, shape)
            driven = [self._by_time(value, shape) for value in driven]
            stacked = graph.scan(cell.step, before, driven)
            rows = [graph.node("Reshape", value, graph.integers(-1, cell.hidden)) for value in stacked]
            ends = [graph.node("Gather", value, last) for value in rows]
            y = ends[0] if top and not every else rows[0]
            if radius is not None:
                if layer == 0 and top:
                    error, off = radius.only(driven[0], stacked[0])
                elif layer == 0:
                    error, off = radius.first(driven[0], stacked[0], last)
                else:
                    gates = driven[0], candidate
                    error, off = radius.further(layer, gates, before[0], stacked[0], rho, last)
                errors.append(error)
                if top and layer:
                    off, r = graph.node("Gather", off, last), graph.node("Gather", r, last)
                r = radius.mixed(layer, r, off) if self._residual else off
            if top and not every and self._residual:
                x = graph.node("Gather", x, last)
            x, r = self._above_cell(layer, x, y, r, radius)
            after += ends
        if self._residual:
            x, r = self._normalise_off("norm", x, r, radius)
        if every:
            norms = self._norms()
            at_end = norms and graph.node("Gather", norms, last)
            return SequenceRun(x, graph.node("Gather", x, last), after, at_end, norms)
        if radius is None:
            return SequenceRun("", x, after, self._norms())
        return SequenceRun("", x, after, self._norms(), "", radius.radius(r), stream, tuple(errors))

    def head(self, graph: GraphWriter, hidden: str) -> str:
        """Adds the output layer. hidden: (N, H). Returns logits (N, V). `graph` is this network's graph, or the body of
        a loop in it."""
        architecture = self._architecture
        name = "embedding.weight" if architecture.tied else "head.weight"
        weight = self._graph.weight(name, architecture.vocabulary_size, architecture.hidden)
        bias = self._graph.weight("head.bias", architecture.vocabulary_size)
        return linear(graph, hidden, weight, bias, self._graph)

    def _embedding(self) -> str:
        architecture = self._architecture
        return self._graph.weight("embedding.weight", architecture.vocabulary_size, architecture.embedding)

    def _input(self, placed: Placed, x: str) -> str:
        """Returns the cell's input: x, or LayerNorm(x) in a residual network."""
        return self._normalise(f"{placed.name}.norm", x) if self._residual else x

    def _skipped(self, x: str, outputs: list[tuple[Placed, str]]) -> str:
        """Adds the skip connections to the output layer's input. outputs: the cells' outputs."""
        for placed, y in outputs:
            if isinstance(placed.layer, Finite) and placed.layer.skip:
                weight = self._graph.weight(f"{placed.name}.skip.weight", self._architecture.hidden, placed.layer.units)
                x = linear(self._graph, y, weight, x)
        return x

    def _above_finite(self, placed: Placed, x: str, y: str) -> str:
        """Adds the part of a block above a cell with finite memory. x: the block's input, (N, H). y: the cell's output.
        Returns the block's output."""
        graph, hidden, layer = self._graph, self._architecture.hidden, placed.layer
        if layer.block == "plain":
            return y
        if layer.block == "residual":
            mix = graph.weight(f"{placed.name}.mix.weight", hidden, layer.units)
            x = linear(graph, y, mix, x)
            if not layer.feed_forward:
                return x
            y = self._normalise(f"{placed.name}.feed_forward_norm", x)
        return graph.node("Add", x, feed_forward(graph, f"{placed.name}.", y, hidden, layer.feed_forward))

    def _drive(self, layer: int, tokens: str, x: str) -> list[str]:
        """Returns the results of the cell's `drive`, N rows each. If a first layer reads the embeddings directly, these
        rows are taken from tables with one row for each token of the vocabulary, unless the tables would have more than
        TABLE_ELEMENTS elements."""
        cell = self._cells[layer]
        if (
            layer == 0
            and not self._finite
            and self._architecture.vocabulary_size * cell.gates * cell.hidden <= TABLE_ELEMENTS
        ):
            tables = cell.drive(self._input(cell.placed, self._embedding()))
            return [self._graph.node("Gather", table, tokens) for table in tables]
        return cell.drive(self._input(cell.placed, x))

    def _above_cell(self, layer: int, x: str, y: str, r: str, radius: RadiusWriter | None) -> tuple[str, str]:
        """Adds the part of a block above the cell. x: the block's input, (N, H). y: the cell's output, (N, units). r:
        the bound of the error of `x + mix(y)`. Returns the block's output and the bound of its error."""
        if not self._residual:
            return y, r
        graph, hidden, spec = self._graph, self._architecture.hidden, self._placed[layer].layer
        units, width = spec.units, spec.feed_forward
        prefix = f"layers.{layer}."
        x = linear(graph, y, graph.weight(prefix + "mix.weight", hidden, units), x)
        off = ""
        if radius is not None:
            r, off = radius.evaluated(r, x)
        if width == 0:
            return x, r
        y, rho = self._normalise_off(prefix + "feed_forward_norm", x, r, radius)
        if radius is not None:
            r = radius.fed_forward(layer, r, rho, off)
        return graph.node("Add", x, feed_forward(graph, prefix, y, hidden, width)), r

    def _normalise(self, name: str, x: str) -> str:
        return layer_norm(self._graph, name, x, self._architecture)

    def _normalise_off(self, name: str, x: str, r: str, radius: RadiusWriter | None) -> tuple[str, str]:
        """Adds a LayerNorm above a cell. Returns its output, and the bound of the normalised vector's error if r bounds
        the error of x."""
        if not self._residual:
            return x, r
        if radius is None and not self._has_readout:
            return self._normalise(name, x), ""
        y, mean, inverse = layer_norm_by(self._graph, name, x, self._architecture, outputs=3)
        self._statistics += [inverse] if self._statistics else [mean, inverse]
        return y, "" if radius is None else radius.normalised(r, inverse)

    def _norms(self) -> str:
        """Returns the statistics of the LayerNorms above the cell, (N, columns), or "" without a `Readout`."""
        return self._graph.node("Concat", *self._statistics, axis=1) if self._has_readout else ""

    @staticmethod
    def _state_of(placed: Placed, after: list[str], state: list[str]) -> list[str]:
        """Returns the state tensors of a layer. after: the next states of the layers below it."""
        return state[len(after) : len(after) + len(placed.layer.states)]

    def _by_time(self, rows: str, shape: str) -> str:
        """Reshapes (T * B, width) to (T, B, width)."""
        graph = self._graph
        return graph.node("Reshape", rows, graph.node("Concat", shape, graph.integers(-1), axis=0))

    def _last_rows(self, lengths: str, batch: str) -> str:
        """Returns the row index of each sequence's last token among the T * B rows: (length - 1) * B + b."""
        graph = self._graph
        size = graph.node("Squeeze", batch)
        columns = graph.node("Range", graph.integer(0), size, graph.integer(1))
        before = graph.node("Mul", graph.node("Sub", lengths, graph.integer(1)), size)
        return graph.node("Add", before, columns)

    def _zeros(self, shape: str) -> list[str]:
        graph = self._graph
        batch = graph.node("Gather", shape, graph.integers(1))
        shapes = [tensor.shape for tensor in self._architecture.state_tensors()]
        zeros = {
            each: graph.node("ConstantOfShape", graph.node("Concat", batch, graph.integers(*each), axis=0))
            for each in dict.fromkeys(shapes)
        }
        return [zeros[each] for each in shapes]
