"""Runs a long sequence as parallel chunks.

The sequence is processed in segments of at most SEGMENT_TOKENS tokens, so that only one segment's states are held in
memory. Each segment is cut into chunks, which run in parallel. A *cell* is the part of a chunk in one run.

The initial state of every chunk except the first is unknown. Such a chunk is *warmed up*: the tokens before it run from
the zero state, and the chunk starts from the resulting state. A *joint* is a boundary of two cells at which the second
cell started from a state other than the state at the end of the first cell. Every chunk except the first begins with a
joint. The difference of the two states at the joint is measured for each unit.

If the difference at a joint exceeds the limit, the cell after the joint runs again from the state at the end of the
cell before the joint. The joint then moves to the end of the repeated cell. The next cell runs again, too, if the
difference at the moved joint exceeds the limit. Otherwise the earlier results of the next cell are kept.

A run *in order* passes over the tokens from first to last, without chunks. If the limit is 0, the two states at every
joint must be equal, so the results are bit-identical to those of a run in order, for any model. If too many cells of a
segment run again, the rest of the sequence runs in order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Manifest, Role
from wane.service.batching.batch import Row, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.chunked.layout import SEGMENT_TOKENS, ChunkLayout, ThroughputProfile, lay_out
from wane.service.runners.runner import EVERY_NORMS, HIDDENS, KEPT, Array, StateMemory, output_name
from wane.service.state.pool import ZERO, StatePool

IN_ORDER: dict[Role, int] = {"advance": 512, "scan": 256}
"""The number of tokens in one run of a sequence that runs in order."""

REPEATED_CELLS = 0.5
"""Limit on the repeated fraction of a segment's cells. If a segment exceeds the limit, the rest of the sequence runs in
order."""


class ChunkBatch:
    """The states and log-probabilities of one segment's cells, on the host.

    `tokens`: int64 (n), the segment's tokens, at most as many as the layout has. `targets`: int64 (n), the tokens whose
    log-probabilities the graph `scan` computes; None for the graph `advance`. Cells are numbered from 0 along the
    segment. Cell g is number g % layout.cells of chunk g // layout.cells."""

    def __init__(
        self,
        role: Role,
        layout: ChunkLayout,
        tokens: NDArray[np.int64],
        targets: NDArray[np.int64] | None,
        memory: StateMemory,
    ) -> None:
        """`memory`: the memory that holds the model's states."""
        self.layout = layout
        self.role = role
        self.tokens = tokens
        self.targets = targets
        self.cells = cells = -(-len(tokens) // layout.steps)
        self.logprobs = None if targets is None else np.empty(len(tokens))
        self.norms: NDArray[np.float32] | None = None  # the LayerNorms after every token, if the graph outputs them
        self._memory = memory
        self.edges = {
            name: np.empty((2 * cells, *values.shape[1:]), np.float32) for name, values in memory.read([ZERO]).items()
        }
        """Row g of each array has the state from which cell g starts, and row `cells` + g the state at its end."""

    def column(self, part: int) -> range:
        """Returns the cells with number `part` of all chunks. The last chunks may be too short to have such a cell."""
        return range(part, self.cells, self.layout.cells)

    def begin(self, cells: Sequence[int], reads: Sequence[int], writes: Sequence[int], *, binding: bool) -> list[Work]:
        """Returns the work that runs cells from the states in the slots `reads` of the model's memory to the slots
        `writes`. Stores the states from which they start. `binding` applies to the first one."""
        self._store(cells, reads)
        works = []
        for index, (cell, read, write) in enumerate(zip(cells, reads, writes, strict=True)):
            at = self._extent(cell)
            targets = None if self.targets is None else self.targets[at]
            bound = binding and not index
            works.append(Work(self.role, self.tokens[at], targets, read=read, write=write, binding=bound, chunk=True))
        return works

    def ended(self, cells: Sequence[int], slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Stores the states at the end of cells, and the cells' log-probabilities. The states are in `slots` of the
        model's memory."""
        self._store([self.cells + cell for cell in cells], slots)
        for cell, row in zip(cells, rows, strict=True):
            at = self._extent(cell)
            if self.logprobs is not None and row.logprobs is not None:
                self.logprobs[at] = row.logprobs[: at.stop - at.start]
            norms = row.output(EVERY_NORMS)
            if norms is not None:
                if self.norms is None:
                    self.norms = np.empty((len(self.tokens), norms.shape[-1]), np.float32)
                self.norms[at] = norms[: at.stop - at.start]

    def _store(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        for name, values in self._memory.read(slots).items():
            self.edges[name][rows] = values

    def restore(self, cell: int, slot: int) -> None:
        """Writes the state at the end of a cell to a slot of the model's memory."""
        row = slice(self.cells + cell, self.cells + cell + 1)
        self._memory.write(np.array([slot]), {output_name(name): values[row] for name, values in self.edges.items()})

    def differences(self, first: int = 1, last: int | None = None) -> dict[str, Array]:
        """Returns, for each state tensor's name and each cell from `first` up to, but not including, `last`, the
        absolute difference of each unit between the state from which the cell starts and the state at the end of the
        cell before it: float32 (n, *shape). It is 0 if both values are NaN, and infinite if exactly one is."""
        starts = range(self.cells)[first:last]
        ends = slice(starts.start + self.cells - 1, starts.stop + self.cells - 1)
        differences = {}
        for name, values in self.edges.items():
            if name not in KEPT:
                start, end = values[starts.start : starts.stop], values[ends]
                with np.errstate(invalid="ignore", over="ignore"):
                    apart = np.nan_to_num(np.abs(start - end), nan=np.inf, posinf=np.inf)
                apart[(start == end) | (np.isnan(start) & np.isnan(end))] = 0
                differences[name] = apart
        return differences

    def _extent(self, cell: int) -> slice:
        return slice(cell * self.layout.steps, min((cell + 1) * self.layout.steps, len(self.tokens)))


def largest(differences: Mapping[str, Array]) -> NDArray[np.float32]:
    """Returns the largest difference of any unit for each of n cells: float32 (n). differences: see
    `ChunkBatch.differences`."""
    of_tensors = [units.max(axis=tuple(range(1, units.ndim))) for units in differences.values()]
    of_cells: NDArray[np.float32] = np.max(of_tensors, axis=0)
    return of_cells


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a sequence ran so far.

    chunks: the number of chunks; 1 if the sequence ran in order. rounds: 1, plus 1 for every repeated cell. warm_up:
    the fewest tokens of warm-up in any segment. residual: the largest difference between the two states at a joint,
    over all units and all remaining joints. It is 0 if there are no joints, and the run is then exact. joints: for each
    state tensor's name, the largest difference of each unit at any joint. places: the positions of the joints. norms:
    the LayerNorms after each token (see `Readout`), float32 (n, columns) for each part of the sequence, of which each
    is one `Piece`. None if the graph does not output them.
    """

    chunks: int = 1
    rounds: int = 1
    warm_up: int | None = None
    residual: float = 0.0
    joints: dict[str, Array] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    norms: tuple[NDArray[np.float32], ...] | None = ()

    @property
    def apart(self) -> int | None:
        """The fewest tokens between two joints. None if there are not two joints."""
        return int(np.diff(self.places).min()) if len(self.places) > 1 else None

    def with_norms(self, norms: NDArray[np.float32] | None) -> ChunkPlan:
        """Returns the plan with the LayerNorms of the next tokens."""
        return replace(self, norms=None if self.norms is None or norms is None else (*self.norms, norms))

    def then(self, segment: ChunkBatch, start: int, repeated: int) -> ChunkPlan:
        """Returns the plan after one more segment, which begins at `start`. `repeated` is the number of its repeated
        cells."""
        apart, warm_up = segment.differences(), segment.layout.warm_up
        joints = {
            name: np.maximum(units.max(axis=0, initial=0), self.joints.get(name, 0.0)) for name, units in apart.items()
        }
        residuals = largest(apart)
        return ChunkPlan(
            chunks=self.chunks + segment.layout.chunks - 1,
            rounds=self.rounds + repeated,
            warm_up=warm_up if self.warm_up is None else min(warm_up, self.warm_up),
            residual=float(residuals.max(initial=self.residual)),
            joints=joints,
            places=(*self.places, *(start + (1 + np.flatnonzero(residuals)) * segment.layout.steps).tolist()),
            norms=self.norms,
        ).with_norms(segment.norms)


@dataclass(frozen=True, slots=True)
class Piece:
    """Progress of a run. `done`: the number of tokens run so far. `logprobs`: float64 (n), the log-probabilities of the
    next n tokens, which follow those of earlier pieces; None until the whole segment of these tokens has run.
    `row`: the output of the last run, if the tokens ran in order."""

    done: int
    plan: ChunkPlan
    logprobs: NDArray[np.float64] | None = None
    row: Row | None = None

    @property
    def hiddens(self) -> NDArray[np.float32] | None:
        """The output layer's input after each token of `logprobs`, float32 (n, H). None if the tokens did not run in
        order, or if the graph does not output it."""
        if self.row is None or self.logprobs is None:
            return None
        hiddens = self.row.output(HIDDENS)
        return None if hiddens is None else hiddens[: len(self.logprobs)]


Judge = Callable[[ChunkPlan], Awaitable[bool]]


class ChunkedRunner:
    """Runs long sequences of one model, as parallel chunks or in order."""

    def __init__(self, manifest: Manifest, batcher: Batcher, pool: StatePool, throughput: ThroughputProfile) -> None:
        self._batcher = batcher
        self._pool = pool
        self._throughput = throughput
        self._reach = manifest.architecture.reach

    def seconds(self, tokens: int, role: Role = "advance", limit: float = 0.0) -> float | None:
        """Returns the expected seconds of `advance` or `scan` over `tokens` tokens. Assumes that all segments take
        equal time for each token. None: the tokens run in order."""
        layout = self._layout(role, tokens, limit)
        return None if layout is None else layout.seconds * max(1.0, tokens / SEGMENT_TOKENS)

    async def advance(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, read: int, write: int, binding: bool = False
    ) -> None:
        """Runs tokens from the state in slot `read`. The results are bit-identical to those of a run in order. Writes
        the last state to slot `write`."""
        pieces = self.run("advance", tokens, None, ticket, 0.0, read=read, write=write, binding=binding)
        async with aclosing(pieces):
            async for _ in pieces:
                pass

    async def run(
        self,
        role: Role,
        tokens: NDArray[np.int64],
        targets: NDArray[np.int64] | None,
        ticket: Ticket,
        limit: float | None,
        judge: Judge | None = None,
        *,
        read: int,
        write: int,
        binding: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """Runs tokens (n) with the graph `advance`, or with the graph `scan` and targets (n). Yields after each run.

        `read` is the slot of the state before the first token, and `write` the slot for the state after the last token.
        The difference of the two states at each joint is at most `limit`. If it is None, the tokens run in order. If
        `judge` returns False for the plan after a segment, the segment's cells run again until the states at every
        joint are equal, and so do those of later segments. The caller must close the generator.
        """
        plan, start = ChunkPlan(), 0
        while start < len(tokens):
            begin = write if start else read
            layout = None if limit is None else self._layout(role, len(tokens) - start, limit)
            stop = min(start + (IN_ORDER[role] if layout is None else layout.chunks * layout.length), len(tokens))
            part = None if targets is None else targets[start:stop]
            if layout is None or limit is None:
                work = Work(role, tokens[start:stop], part, read=begin, write=write, binding=binding)
                row = await self._batcher.submit(work, ticket)
                logprobs = None if row.logprobs is None else row.logprobs[: stop - start].astype(np.float64)
                norms = row.output(EVERY_NORMS)
                plan = plan.with_norms(None if norms is None else norms[: stop - start])
                yield Piece(stop, plan, logprobs, row)
            else:
                segment = ChunkBatch(role, layout, tokens[start:stop], part, self._pool.memory)
                with ExitStack() as held:
                    slots = [held.enter_context(self._pool.lease()) for _ in range(layout.chunks)]
                    await self._warm_up(tokens, start, layout, slots, ticket)
                    done = start
                    for column in range(layout.cells):
                        cells = segment.column(column)
                        writes = slots[: len(cells)]
                        reads = [begin, *writes[1:]] if column == 0 else writes
                        works = segment.begin(cells, reads, writes, binding=binding)
                        segment.ended(cells, writes, await self._batcher.submit_all(works, ticket))
                        done += sum(work.length for work in works)
                        yield Piece(done, plan)
                    repeated = await self._repair(segment, limit, slots[0], ticket)
                    after = plan.then(segment, start, repeated)
                    if judge is not None and after.residual and not await judge(after):
                        limit = 0.0
                        repeated += await self._repair(segment, limit, slots[0], ticket)
                        after = plan.then(segment, start, repeated)
                    plan = after
                segment.restore(segment.cells - 1, write)
                if repeated > REPEATED_CELLS * segment.cells:
                    limit = None
                yield Piece(stop, plan, segment.logprobs)
            start = stop

    def _layout(self, role: Role, tokens: int, limit: float) -> ChunkLayout | None:
        """Returns the layout of the next segment of a sequence that has `tokens` tokens left to run. None: a run in
        order is faster."""
        seen = self._throughput.warm_up(limit)
        if seen is None:
            return None
        paces = self._throughput.pace(role), self._throughput.pace("advance")
        return lay_out(tokens, max(seen, self._reach, 1), role, *paces)

    async def _warm_up(
        self, tokens: NDArray[np.int64], start: int, layout: ChunkLayout, slots: Sequence[int], ticket: Ticket
    ) -> None:
        """Warms up every chunk except the first: runs the tokens before the chunk from the zero state."""
        starts = [start + chunk * layout.length for chunk in range(1, layout.chunks)]
        for back in range(layout.warm_up, 0, -layout.warm_up_steps):
            end = max(back - layout.warm_up_steps, 0)
            first = back == layout.warm_up
            await self._batcher.submit_all(
                [
                    Work("advance", tokens[at - back : at - end], read=ZERO if first else slot, write=slot, chunk=True)
                    for at, slot in zip(starts, slots[1:], strict=True)
                ],
                ticket,
            )

    async def _repair(self, segment: ChunkBatch, limit: float, slot: int, ticket: Ticket) -> int:
        """Runs each cell again, from the state at the end of the previous cell, if the difference at the joint before
        the cell exceeds `limit`. Returns the number of repeated cells. Their states use `slot`."""
        residuals, repeated = largest(segment.differences()), 0
        for cell in range(1, segment.cells):
            if residuals[cell - 1] > limit:
                segment.restore(cell - 1, slot)
                (work,) = segment.begin([cell], [slot], [slot], binding=False)
                segment.ended([cell], [slot], [await self._batcher.submit(work, ticket)])
                # the repeated cell has another last state, from which the next cell did not start
                residuals[cell : cell + 1] = largest(segment.differences(cell + 1, cell + 2))
                repeated += 1
        return repeated
