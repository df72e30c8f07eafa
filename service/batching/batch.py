"""Runs one batch of work items of one role (the name of a model's graph): joins the items' arrays, runs the graph, and
splits the outputs.

A batch runs on the runner's thread, or on the event loop's thread if it is short (`batcher.py`). Every item receives
its own result or its own error. Values that every row needs, such as the most probable tokens, are computed once for
the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Role
from wane.service.observability.tracing import Traced
from wane.service.runners.outputs import FINITE, Largest, Outputs
from wane.service.runners.runner import (
    ERROR,
    EVERY_NORMS,
    HIDDEN,
    HIDDENS,
    LOG_SUM_EXP,
    NEXT,
    NORMS,
    RADIUS,
    STREAM,
    TOP_IDS,
    TOP_LOGITS,
    Array,
    Feeds,
    Runner,
)
from wane.service.state.pool import ZERO, StatePool

# A batch of sequences is padded to the longest sequence. Two limits bound a batch. At most half of its positions are
# padding. The number of its positions (items times padded length) is so small that the graph's intermediate values take
# at most some tens of megabytes. The intermediate values of a position are a few thousand floats, and for scan also one
# float per token of the vocabulary. A batch of a single item may exceed both limits.
PADDED_SHARE = 2
MOST_POSITIONS: dict[Role, int] = {"window": 4_096, "advance": 4_096, "scan": 2_048}

ANSWERS = (*FINITE, HIDDENS, EVERY_NORMS, TOP_LOGITS, TOP_IDS, LOG_SUM_EXP, STREAM)
"""Outputs that a `Row` returns. It also returns the errors of a window's trace and the states to which they belong. All
other outputs are written to the state pool."""


@dataclass(slots=True, eq=False)
class Work:
    """One work item: a row of a batch of `role`.

    tokens: int64 (n), with n >= 1. In a step, `tokens` may also be a tuple of one token. In a head, `tokens` is None.
    targets: int64 (n), in a scan only. hidden: float32 (H), in a head only: the output layer's input. If it is None,
    the run uses the output layer's input that is stored in slot `read`. The run reads the state from slot `read` and
    writes the next state to slot `write`. A window ignores `read` and starts from the zero state. If `write` is None,
    the next state is dropped. If `binding` is true, the request is completed even if the caller leaves after the work
    has entered a batch. `chunk` says whether the item is one of a sequence's parallel chunks. The scheduler does not
    limit a batch of chunks by its run time, because the code that cut the sequence has chosen the number of chunks per
    batch.
    """

    role: Role
    tokens: NDArray[np.int64] | tuple[int, ...] | None = None
    targets: NDArray[np.int64] | None = None
    read: int = ZERO
    write: int | None = None
    binding: bool = False
    chunk: bool = False
    hidden: NDArray[np.float32] | None = None

    @property
    def length(self) -> int:
        """The number of positions that the item takes in a batch, without padding."""
        return 1 if self.tokens is None else len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class WindowTrace:
    """One row of the window graph's outputs that the gradient proof reads. All values are float32 and finite.

    length: the number of tokens in the window. logits: (V). norms: see `Row`. stream: (H), the value to which the
    output of the first layer's mixing matrix is added. states: each layer's state by tensor name, (units). errors:
    error bounds by the same names, one for each unit of `states`. An error bound limits the distance between the unit's
    value and its value after any longer history that ends in the window's tokens.
    """

    length: int
    logits: NDArray[np.float32]
    norms: Sequence[float] | None
    stream: NDArray[np.float32]
    states: Mapping[str, NDArray[np.float32]]
    errors: Mapping[str, NDArray[np.float32]]


@dataclass(slots=True, eq=False)
class Row:
    """One item's part of a run's outputs: logits float32 (V), hidden float32 (H), logprobs float32 (T), and the largest
    logits. All values are finite. An output that the graph does not have is None. Each array is read on access: it is a
    view of the batch's array, or a copy if the batch's array is on a device.

    row: the item's index in the `outputs` of its batch. window: the number of tokens of a window. radius: the window
    graph's bound of the effect of earlier tokens. The final hidden state of every history that ends in the window's
    tokens is within this 2-norm distance of `hidden`: see `Runner`. None if there is no bound. norms: the row's
    LayerNorms above the cell (see `Readout` in `models/manifest.py`). None if they are unknown.
    """

    outputs: Outputs
    row: int
    radius: float | None = None
    window: int = 0
    norms: Sequence[float] | None = None

    @property
    def trace(self) -> WindowTrace | None:
        """The row's trace. None if the graph does not output one, or if it is not finite."""
        stream = self.output(STREAM)
        logits = self.logits
        if stream is None or logits is None:
            return None
        names = [name.removeprefix(ERROR) for name in self.outputs if name.startswith(ERROR)]
        states = {name: self.outputs.row(NEXT + name, self.row) for name in names}
        errors = {name: self.outputs.row(ERROR + name, self.row) for name in names}
        if not all(np.isfinite(values).all() for values in (stream, *states.values(), *errors.values())):
            return None
        return WindowTrace(self.window, logits, self.norms, stream, states, errors)

    @property
    def logits(self) -> NDArray[np.float32] | None:
        return self.output("logits")

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        return self.output(HIDDEN)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        return self.output("logprobs")

    @property
    def most(self) -> int:
        """The number of largest logits that the graph outputs."""
        return self.outputs.most

    def largest(self, count: int) -> Largest | None:
        """Returns at least the `count` largest logits. Returns None if the graph outputs fewer."""
        return self.outputs.largest(self.row, count)

    @property
    def length(self) -> float:
        """The 2-norm of `hidden`. The graph must output `hidden`."""
        return self.outputs.lengths.item(self.row)

    def output(self, name: str) -> Array | None:
        """Returns this row of the output `name`. Returns None if the graph has no such output."""
        return self.outputs.row(name, self.row) if name in self.outputs else None


NOT_RUN = Outputs({})


class ColumnBatch:
    """A batch of B one-token steps, stored as one array per field (columns) instead of one `Work` item per step.

    slots: int (B), the slots of the states. tokens: int64 (B). queued_s: float64 (B), when each step was queued, by
    `time.perf_counter`. The run sets either `outputs` or `failure` (the error of the run). failed: the number of steps
    without a result, after the run.
    """

    __slots__ = ("failed", "failure", "outputs", "queued_s", "slots", "tokens")

    def __init__(self, slots: NDArray[np.intp], tokens: NDArray[np.int64], queued_s: NDArray[np.float64]) -> None:
        self.slots = slots
        self.tokens = tokens
        self.queued_s = queued_s
        self.outputs = NOT_RUN
        self.failure: Exception | None = None
        self.failed = 0

    @property
    def traced(self) -> dict[Traced, float]:
        """The traces of the batch's requests, and when each was queued by `time.perf_counter`."""
        return {}

    def waited_s(self, started_s: float) -> float:
        """Returns the total queue time of all rows until `started_s`, in seconds."""
        return float(started_s * len(self.slots) - self.queued_s.sum())


def run_columns(columns: ColumnBatch, pool: StatePool, runner: Runner, room: Mapping[str, Array]) -> None:
    """Runs a batch in columns. Does not write the next states to the pool. `room`: see `run`."""
    try:
        columns.outputs = Outputs.of(
            runner.run("step", {"tokens": columns.tokens, **pool.memory.gather(columns.slots, room)})
        )
        _ = columns.outputs.finite  # computed here, so that outputs without logits are an error of the run
    except Exception as error:  # the steps run again one by one, to find the one that fails
        columns.failure = error


def fits(role: Role, longest: int, total: int, items: int) -> bool:
    """Returns whether a batch of `items` sequences is within both limits of a batch's size. `longest`: the length of
    its longest sequence. `total`: the sum of the lengths."""
    if role not in MOST_POSITIONS:
        return True
    padded = longest * items
    return padded <= PADDED_SHARE * total and padded <= MOST_POSITIONS[role]


def run(
    works: Sequence[Work], pool: StatePool, runner: Runner, room: Mapping[str, Array] | None = None
) -> list[Row | Exception]:
    """Runs a batch of one role. If the run fails, runs every item alone, so that only items that cause an error fail.

    `room`: the state pool's buffers for gathered states. No concurrent call may use these buffers.
    """
    try:
        return _run(works, pool, runner, room)
    except Exception as error:  # a runner's error fails the items, not the server
        if len(works) == 1:
            return [error]
        return [row for work in works for row in run([work], pool, runner, room)]


def _run(
    works: Sequence[Work], pool: StatePool, runner: Runner, room: Mapping[str, Array] | None
) -> list[Row | Exception]:
    role = works[0].role
    reads = [work.read for work in works]
    if role == "head":
        feeds = dict(_hidden(works, pool))
        kept = {NORMS: feeds.pop(NORMS)} if NORMS in feeds else {}
        outputs = Outputs.of(runner.run(role, feeds))
        if HIDDEN not in outputs:
            outputs = Outputs({**outputs, HIDDEN: feeds[HIDDEN], **kept})
    else:
        states = {} if role == "window" else pool.memory.gather(reads, room)
        outputs = Outputs.of(runner.run(role, {**_tokens(works), **states}))
        pool.scatter([work.write for work in works], outputs)
    none = [None] * len(works)
    radii = outputs[RADIUS].tolist() if RADIUS in outputs else none
    norms = outputs[NORMS].tolist() if NORMS in outputs else none
    finite: list[bool] = outputs.finite.tolist()
    bounded = [name.removeprefix(ERROR) for name in outputs if name.startswith(ERROR)]
    answers = outputs.only({*ANSWERS, *(prefix + name for name in bounded for prefix in (ERROR, NEXT))})
    return [
        Row(answers, row, radius if radius is not None and math.isfinite(radius) else None, work.length, norms[row])
        if finite[row]
        else FloatingPointError("the model's output is not finite")
        for row, (work, radius) in enumerate(zip(works, radii, strict=True))
    ]


def _hidden(works: Sequence[Work], pool: StatePool) -> Feeds:
    """Returns the input of the output layer for each item of a batch of role head."""
    if all(work.hidden is None for work in works):
        return pool.memory.gather_hidden([work.read for work in works])
    rows = [pool.memory.read([work.read])[HIDDEN][0] if work.hidden is None else work.hidden for work in works]
    return {HIDDEN: np.stack(rows)}


def _tokens(works: Sequence[Work]) -> dict[str, Array]:
    """Returns the graph's token inputs. For step: tokens (B). For the other roles: tokens (B, T) padded with 0, lengths
    (B) and, for scan, targets (B, T) padded with 0."""
    tokens = [work.tokens for work in works if work.tokens is not None]
    assert len(tokens) == len(works), "the work has no tokens: this is a bug"
    if works[0].role == "step":
        return {"tokens": np.array([ids[0] for ids in tokens], np.int64)}
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    feeds = {"tokens": _padded([np.asarray(ids) for ids in tokens], int(lengths.max())), "lengths": lengths}
    if works[0].role == "scan":
        targets = [work.targets for work in works if work.targets is not None]
        feeds["targets"] = _padded(targets, int(lengths.max()))
    return feeds


def _padded(rows: Sequence[NDArray[np.int64]], width: int) -> NDArray[np.int64]:
    """Returns the rows as int64 (B, width), padded with 0 on the right.

    The rows are joined as bytes, because numpy releases the interpreter's lock (GIL) for every row that it copies.
    While the event loop is busy, the runner's thread would wait for the lock after each row, and each wait takes longer
    than the copy.
    """
    size = np.dtype(np.int64).itemsize * width
    whole = bytearray().join([ids.tobytes().ljust(size, b"\0") for ids in rows])
    return np.frombuffer(whole, np.int64).reshape(len(rows), width)
