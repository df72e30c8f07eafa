"""The five graphs of a bundle, by role. The bundle's format fixes the names and shapes of their inputs and outputs:

    step     tokens[B], state                        -> logits[B,V], top, hidden[B,H], state'
    window   tokens[B,T], lengths[B]                 -> logits[B,V], top, hidden[B,H], state'   (from the zero state)
             and for input-gated models radius[B], stream[B,H], error.<state>[B,units]
    advance  tokens[B,T], lengths[B], state          -> hidden[B,H], state'
    scan     tokens[B,T], targets[B,T], lengths[B], state -> logprobs[B,T], hiddens[B,T,H], hidden[B,H], state'
    head     hidden[B,H]                             -> logits[B,V], top

All graphs except `head` also have the output `norms[B,columns]` if the architecture has a `Readout`
(`models/manifest.py`). Each row of tokens is padded on the right with arbitrary tokens: 1 <= length <= T, and tokens
beyond the length have no effect. The next state is named `next.` + the name of the state. `hiddens` is `hidden` after
every token, and zero beyond the length of a row. Graphs of schema 3 have no `hiddens`. With a `Readout`, `scan` also
outputs `every_norms[B,T,columns]`, which is `norms` after every token. `radius` bounds the 2-norm distance of `hidden`
from that of any run that ends in these tokens, in exact arithmetic or, with a `Readout`, in float32. The sharper bounds
of `models/certificate/top1.py` are computed from `stream` and `error`. `stream` is the first block's input. `error`
bounds the distance of each unit of a state from the run's.

`top` stands for three outputs. `top_logits[B,K]` are the largest logits in descending order. `top_ids[B,K]` (int64) are
their ids, where ties are ordered by ascending id. `log_sum_exp[B]` is the logarithm of the sum of exp over all logits.
With these outputs, the most likely tokens and their log-probabilities are known without reading all logits. K is TOP
(`models/bundle_checks.py`), but at most V.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from wane.models.architecture import Architecture
from wane.models.bundle_checks import ROLES, TOP
from wane.models.certificate.request import RequestBound
from wane.models.export.graph import GraphWriter
from wane.models.export.network import NetworkWriter
from wane.models.export.radius import has_radius
from wane.models.manifest import Precision, Role

ROWS_AT_ONCE = 256
"""The largest number of rows of logits that `scan` computes at once. They need 2 MiB for a vocabulary of 2,048 tokens.
"""


def build_graphs(
    architecture: Architecture,
    weights_file: str,
    extents: Mapping[str, tuple[int, int]],
    request: RequestBound | None = None,
    precision: Precision = "float32",
) -> dict[Role, bytes]:
    """Returns every graph of a bundle as the bytes of an ONNX file.

    `extents`: the range of bytes of each tensor in `weights_file`. `request`: the bound for the same weights, or None
    for graphs without a radius. `precision`: the number format of the products with weights.
    """
    return {role: build_graph(role, architecture, weights_file, extents, request, precision) for role in ROLES}


def build_graph(
    role: Role,
    architecture: Architecture,
    weights_file: str,
    extents: Mapping[str, tuple[int, int]],
    request: RequestBound | None = None,
    precision: Precision = "float32",
) -> bytes:
    """Returns one graph of `build_graphs`."""
    graph = GraphWriter(role, weights_file, extents, precision=precision)
    network = NetworkWriter(graph, architecture)
    hidden_width, vocabulary = architecture.hidden, architecture.vocabulary_size
    if role == "head":
        hidden = graph.input("hidden", TensorProto.FLOAT, ["B", hidden_width])
        _answer(graph, network.head(graph, hidden), vocabulary)
        return graph.model()

    tensors = architecture.state_tensors()
    tokens = graph.input("tokens", TensorProto.INT64, ["B"] if role == "step" else ["B", "T"])
    targets = graph.input("targets", TensorProto.INT64, ["B", "T"]) if role == "scan" else ""
    lengths = "" if role == "step" else graph.input("lengths", TensorProto.INT64, ["B"])
    state = None
    if role != "window":
        state = [graph.input(tensor.name, TensorProto.FLOAT, ["B", *tensor.shape]) for tensor in tensors]

    if role == "step":
        assert state is not None, "step has no state: this is a bug"
        hidden, after, norms = network.step(tokens, state)
    else:
        bounded = role == "window" and has_radius(architecture)
        run = network.sequence(tokens, lengths, state, role == "scan", request if bounded else None)
        hidden, after, norms = run.last, run.state, run.norms
        if run.radius:
            graph.output("radius", run.radius, ["B"])
            graph.output("stream", run.stream, ["B", architecture.embedding])
            for tensor, error in zip(tensors[-len(run.errors) :], run.errors, strict=True):
                graph.output(f"error.{tensor.name}", error, ["B", *tensor.shape])
    if role == "scan":
        logprobs = _logprobs(graph, network, run.every, targets, lengths)
        graph.output("logprobs", logprobs, ["B", "T"])
        graph.output("hiddens", _by_row(graph, run.every, tokens, lengths), ["B", "T", hidden_width])
        if run.every_norms:
            every = _by_row(graph, run.every_norms, tokens, lengths)
            graph.output("every_norms", every, ["B", "T", architecture.norm_columns])
    elif role != "advance":
        _answer(graph, network.head(graph, hidden), vocabulary)
    graph.output("hidden", hidden, ["B", hidden_width])
    if norms:
        graph.output("norms", norms, ["B", architecture.norm_columns])
    for tensor, value in zip(tensors, after, strict=True):
        graph.output(f"next.{tensor.name}", value, ["B", *tensor.shape])
    return graph.model()


def _answer(graph: GraphWriter, logits: str, vocabulary: int) -> None:
    """Declares the outputs logits (B, V) and `top`."""
    count = min(TOP, vocabulary)
    top, ids = graph.nodes("TopK", logits, graph.integers(count), outputs=2, axis=1)
    largest = graph.node("Slice", top, graph.integers(0), graph.integers(1), graph.integers(1))
    # This replaces ReduceLogSumExp, which takes ten times as long on the CPU.
    terms = graph.node("Exp", graph.node("Sub", logits, largest))
    total = graph.node("Log", graph.node("ReduceSum", terms, graph.integers(1)))
    total = graph.node("Squeeze", graph.node("Add", largest, total), graph.integers(1))
    graph.output("logits", logits, ["B", vocabulary])
    graph.output("top_logits", top, ["B", count])
    graph.output("top_ids", ids, ["B", count], TensorProto.INT64)
    graph.output("log_sum_exp", total, ["B"])


def _logprobs(graph: GraphWriter, network: NetworkWriter, hidden: str, targets: str, lengths: str) -> str:
    """Returns log p(target), (B, T), and 0 beyond each row's length. hidden: (T * B, H).

    The rows are processed in equal chunks of at most ROWS_AT_ONCE rows, so that no more than (ROWS_AT_ONCE, V) logits
    are in memory.
    """
    by_time = graph.node("Transpose", targets, perm=[1, 0])
    flat = graph.node("Reshape", by_time, graph.integers(-1))
    rows, one = graph.node("Shape", flat), graph.integers(1)
    most = graph.integers(ROWS_AT_ONCE)
    pieces = graph.node("Div", graph.node("Add", rows, graph.integers(ROWS_AT_ONCE - 1)), most)
    size = graph.node("Div", graph.node("Sub", graph.node("Add", rows, pieces), one), pieces)
    missing = graph.node("Sub", graph.node("Mul", pieces, size), rows)
    none = graph.integers(0)
    hidden = graph.node("Pad", hidden, graph.node("Concat", graph.integers(0, 0), missing, none, axis=0))
    flat = graph.node("Pad", flat, graph.node("Concat", none, missing, axis=0))
    hidden = graph.node("Reshape", hidden, graph.node("Concat", pieces, size, graph.integers(-1), axis=0))
    flat = graph.node("Reshape", flat, graph.node("Concat", pieces, size, axis=0))

    def piece(body: GraphWriter, _: list[str], slices: list[str]) -> list[str]:
        # On the CPU, LogSoftmax and a gather are twenty times as fast as ReduceLogSumExp.
        logprobs = body.node("LogSoftmax", network.head(body, slices[0]), axis=-1)
        return [body.node("GatherElements", logprobs, body.node("Unsqueeze", slices[1], one), axis=1)]

    (logprobs,) = graph.scan(piece, [], [hidden, flat])
    logprobs = graph.node("Slice", graph.node("Reshape", logprobs, graph.integers(-1)), none, rows)
    logprobs = graph.node("Transpose", graph.node("Reshape", logprobs, graph.node("Shape", by_time)), perm=[1, 0])
    return graph.node("Where", _counted(graph, targets, lengths), logprobs, graph.number(0.0))


def _by_row(graph: GraphWriter, hidden: str, tokens: str, lengths: str) -> str:
    """Returns hidden (T * B, H) in the shape (B, T, H), with 0 beyond each row's length."""
    by_time = graph.node("Transpose", tokens, perm=[1, 0])
    shape = graph.node("Concat", graph.node("Shape", by_time), graph.integers(-1), axis=0)
    rows = graph.node("Transpose", graph.node("Reshape", hidden, shape), perm=[1, 0, 2])
    inside = graph.node("Unsqueeze", _counted(graph, tokens, lengths), graph.integers(2))
    return graph.node("Where", inside, rows, graph.number(0.0))


def _counted(graph: GraphWriter, tokens: str, lengths: str) -> str:
    """Returns whether each token (B, T) is within its row's length."""
    time = graph.node("Squeeze", graph.node("Shape", tokens, start=1))
    positions = graph.node("Range", graph.integer(0), time, graph.integer(1))
    return graph.node("Less", positions, graph.node("Unsqueeze", lengths, graph.integers(1)))
