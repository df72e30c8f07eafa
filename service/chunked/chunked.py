"""Runs a long sequence as parallel chunks.

The sequence is processed in segments of at most SEGMENT_TOKENS tokens, so that only one segment's states are held in
memory. Each segment is cut into chunks, which run in parallel. A *cell* is the part of a chunk in one run. The cells
pass through the scheduler like other work.

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

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Manifest, Role
from wane.service.batching.batch import Row, Work
from wane.service.batching.batcher import Batcher
from wane.service.batching.ticket import Ticket
from wane.service.chunked.layout import SEGMENT_TOKENS, ChunkLayout, ThroughputProfile, lay_out
from wane.service.runners.runner import EVERY_NORMS, HIDDENS, Array, StateMemory
from wane.service.state.pool import ZERO, StatePool


class ChunkBatch:
    """The states and log-probabilities of one segment's cells. The states stay on the runner's device.

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
        self.logprobs = np.empty(len(tokens) if role == "scan" else 0)
        self.norms: NDArray[np.float32] | None = None  # the LayerNorms after every token, if the graph outputs them
        self._memory = memory
        # The state from which cell g starts is in slot g of this memory, and the state at its end in slot cells + g.
        self._edges = memory.scratch(2 * cells)
        self._joints = range(1, cells), range(cells, 2 * cells - 1)  # the slots of the two states at each joint

    def column(self, part: int) -> range:
        """Returns the cells with number `part` of all chunks. The last chunks may be too short to have such a cell."""
        return range(part, self.cells, self.layout.cells)

    def work(self, cell: int, read: int, write: int, *, binding: bool) -> Work:
        """Returns the work item that runs a cell from the state in slot `read`."""
        at = self._extent(cell)
        targets = None if self.targets is None else self.targets[at]
        return Work(self.role, self.tokens[at], targets, read=read, write=write, binding=binding, chunk=True)

    def started(self, cells: range, slots: Sequence[int]) -> None:
        """Stores the states from which cells start. They are in `slots` of the model's memory."""
        self._edges.copy(cells, self._memory, slots)

    def ended(self, cells: range, slots: Sequence[int], rows: list[Row]) -> None:
        """Stores the states at the end of cells, and the cells' log-probabilities. The states are in `slots` of the
        model's memory."""
        self._edges.copy([self.cells + cell for cell in cells], self._memory, slots)
        for cell, row in zip(cells, rows, strict=True):
            at = self._extent(cell)
            if row.logprobs is not None:
                self.logprobs[at] = row.logprobs[: at.stop - at.start]
            norms = row.output(EVERY_NORMS)
            if norms is not None:
                if self.norms is None:
                    self.norms = np.empty((len(self.tokens), norms.shape[-1]), np.float32)
                self.norms[at] = norms[: at.stop - at.start]

    def continued(self, cell: int) -> None:
        """Stores that `cell` starts from the state at the end of the previous cell."""
        self._edges.copy([cell], self._edges, [self.cells + cell - 1])

    def load_end(self, cell: int, pool: StatePool, slot: int) -> None:
        """Copies the state at the end of a cell to a slot of the pool."""
        pool.copy(self.cells + cell, slot, self._edges)

    def residual(self, cell: int) -> float:
        """Returns the difference between the two states at the joint before `cell`, in the unit in which it is largest.
        `cell` must not be the first cell. Returns 0 if there is no joint."""
        return self._edges.differences([cell], [self.cells + cell - 1]).item(0)

    def residuals(self) -> NDArray[np.float64]:
        """Returns `residual` of every cell, and 0 for the first cell: float64 (cells)."""
        found = np.zeros(self.cells)
        if self.cells > 1:
            found[1:] = self._edges.differences(*self._joints)
        return found

    def joints(self) -> dict[str, Array]:
        """Returns, for each tensor's name, the largest difference of each unit at any joint: (*shape). This is empty if
        there is only one cell."""
        return self._edges.unit_differences(*self._joints) if self.cells > 1 else {}

    def _extent(self, cell: int) -> slice:
        return slice(cell * self.layout.steps, min((cell + 1) * self.layout.steps, len(self.tokens)))


IN_ORDER: dict[Role, int] = {"advance": 512, "scan": 256}
"""The number of tokens in one run of a sequence that runs in order."""

REPEATED_CHUNKS = 0.25
"""Limit on the number of repeated cells per chunk. If a segment exceeds the limit, the warm-up of the next segments is
doubled."""

REPEATED_CELLS = 0.5
"""Limit on the repeated fraction of a segment's cells. If a segment exceeds the limit, the rest of the sequence runs in
order."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Describes how a sequence ran so far.

    chunks: the number of chunks; 1 if the sequence ran in order. rounds: 1, plus 1 for every repeated cell. warm_up:
    the fewest tokens of warm-up in any segment. residual: the largest difference between the two states at a joint,
    over all units and all remaining joints. It is 0 if there are no joints, and the run is then exact. joints: for each
    state tensor's name, the largest difference of each unit at any joint. apart: the fewest tokens between two joints.
    latest: the position of the last joint. norms: the LayerNorms after each token (see `Readout`), float32 (n, columns)
    for each part of the sequence. None if the graph does not output them.
    """

    chunks: int = 1
    rounds: int = 1
    warm_up: int | None = None
    residual: float = 0.0
    joints: dict[str, Array] = field(default_factory=dict)
    apart: int | None = None
    latest: int | None = None
    norms: tuple[NDArray[np.float32], ...] | None = ()

    def with_norms(self, norms: NDArray[np.float32] | None) -> ChunkPlan:
        """Returns the plan with the LayerNorms of the next tokens."""
        return replace(self, norms=None if self.norms is None or norms is None else (*self.norms, norms))

    def then(self, segment: ChunkBatch, start: int, repeated: int) -> ChunkPlan:
        """Returns the plan after one more segment, which begins at `start`. `repeated` is the number of its repeated
        cells."""
        residuals, joints = segment.residuals(), segment.joints()
        places = (start + np.flatnonzero(residuals) * segment.layout.steps).tolist()
        if self.latest is not None:
            places.insert(0, self.latest)
        gaps = [after - before for before, after in pairwise(places)]
        warm_up = segment.layout.warm_up
        return ChunkPlan(
            chunks=self.chunks + segment.layout.chunks - 1,
            rounds=self.rounds + repeated,
            warm_up=warm_up if self.warm_up is None else min(warm_up, self.warm_up),
            residual=max(self.residual, float(residuals.max())),
            joints=self.joints
            | {name: np.maximum(value, self.joints.get(name, 0.0)) for name, value in joints.items()},
            apart=min([*gaps, *([] if self.apart is None else [self.apart])], default=None),
            latest=places[-1] if places else None,
            norms=self.norms,
        ).with_norms(segment.norms)


@dataclass(frozen=True, slots=True)
class Piece:
    """Progress of a run. `done`: the number of tokens run so far. `logprobs`: float64 (n), the log-probabilities of the
    next n tokens, which follow those of earlier pieces; None until the whole segment of these tokens has run. `row`:
    the output of the last run, if the tokens ran in order."""

    done: int
    plan: ChunkPlan
    logprobs: NDArray[np.float64] | None = None
    row: Row | None = None

    @property
    def hiddens(self) -> NDArray[np.float32] | None:
        """The output layer's input after each token of `logprobs`, float32 (n, H). None if the tokens did not run in
        order, or if the graph does not output it."""
        found = None if self.row is None or self.logprobs is None else self.row.output(HIDDENS)
        return None if found is None or self.logprobs is None else found[: len(self.logprobs)]


@dataclass(frozen=True, slots=True)
class Demand:
    """Limits the joints of a run. The difference of the two states at each joint must be at most `limit`. If `judge` is
    given and returns False for the plan, cells run again until the two states at every joint are equal.

    `enough`: if the warm-up has at least this number of tokens, any difference at a joint is accepted.
    """

    limit: float
    judge: Callable[[ChunkPlan], Awaitable[bool]] | None = None
    enough: int | None = None


EXACT = Demand(0.0)


class ChunkedRunner:
    """Runs long sequences of one model, as parallel chunks or in order."""

    def __init__(self, manifest: Manifest, batcher: Batcher, pool: StatePool, throughput: ThroughputProfile) -> None:
        self._batcher = batcher
        self._pool = pool
        self._throughput = throughput
        self._reach = manifest.architecture.reach

    def layout(self, role: Role, tokens: int, demand: Demand, least: int = 0) -> ChunkLayout | None:
        """Returns the layout of the next segment of a sequence that has `tokens` tokens left to run. None: a run in
        order is faster.

        `least`: the minimum number of tokens of warm-up. `demand.enough` may be smaller, and is then used.
        """
        seen = self._throughput.warm_up(demand.limit)
        known = [one for one in (None if seen is None else max(seen, least), demand.enough) if one is not None]
        if not known:
            return None
        warm_up = max(min(known), self._reach, 1)
        return lay_out(tokens, warm_up, role, self._throughput.pace(role), self._throughput.pace("advance"))

    def seconds(self, tokens: int, role: Role = "advance", demand: Demand = EXACT) -> float | None:
        """Returns the expected seconds of `advance` or `scan` over `tokens` tokens. None: the tokens run in order."""
        first = self.layout(role, tokens, demand)
        segments, rest = divmod(tokens, SEGMENT_TOKENS)
        if first is None or not segments:
            return None if first is None else first.seconds
        last = self.layout(role, rest, demand)
        in_order_s = rest * self._throughput.pace(role)[1]
        return segments * first.seconds + (in_order_s if last is None else last.seconds)

    async def advance(
        self, tokens: NDArray[np.int64], ticket: Ticket, *, read: int, write: int, binding: bool = False
    ) -> None:
        """Runs tokens from the state in slot `read`. The results are bit-identical to those of a run in order. Writes
        the last state to slot `write`."""
        pieces = self.run("advance", tokens, None, ticket, EXACT, read=read, write=write, binding=binding)
        async with aclosing(pieces):
            async for _ in pieces:
                pass

    async def run(
        self,
        role: Role,
        tokens: NDArray[np.int64],
        targets: NDArray[np.int64] | None,
        ticket: Ticket,
        demand: Demand | None,
        *,
        read: int,
        write: int,
        binding: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """Runs tokens (n) with the graph `advance`, or with the graph `scan` and targets (n). Yields after each run.

        `read` is the slot of the state before the first token, and `write` the slot for the state after the last token.
        If `demand` is None, the tokens run in order. The caller must close the generator.
        """
        plan, start, least = ChunkPlan(), 0, 0
        while start < len(tokens):
            here = write if start else read
            layout = None if demand is None else self.layout(role, len(tokens) - start, demand, least)
            size = IN_ORDER[role] if layout is None else layout.chunks * layout.length
            stop = min(start + size, len(tokens))
            part = None if targets is None else targets[start:stop]
            if layout is None or demand is None:
                work = Work(role, tokens[start:stop], part, read=here, write=write, binding=binding)
                row = await self._batcher.submit(work, ticket)
                logprobs = None if row.logprobs is None else row.logprobs[: stop - start].astype(np.float64)
                norms = row.output(EVERY_NORMS)
                plan = plan.with_norms(None if norms is None else norms[: stop - start])
                yield Piece(stop, plan, logprobs, row)
            else:
                segment = ChunkBatch(role, layout, tokens[start:stop], part, self._pool.memory)
                with ExitStack() as held:
                    slots = [held.enter_context(self._pool.lease()) for _ in range(layout.chunks)]
                    again = held.enter_context(self._pool.lease())
                    await self._warm_up(tokens, start, layout, slots, ticket)
                    done = start
                    for column in range(layout.cells):
                        done += await self._column(segment, column, here, slots, ticket, binding=binding)
                        yield Piece(done, plan)
                    covered = demand.enough is not None and layout.warm_up >= demand.enough
                    limit = math.inf if covered else demand.limit
                    repeated = await self._repair(segment, limit, again, slots[-1], ticket)
                    after = plan.then(segment, start, repeated)
                    if demand.judge is not None and after.residual and not await demand.judge(after):
                        repeated += await self._repair(segment, 0.0, again, slots[-1], ticket)
                        after = plan.then(segment, start, repeated)
                    plan = after
                    self._pool.copy(slots[-1], write)
                if repeated > REPEATED_CELLS * segment.cells:
                    demand = None
                elif repeated > REPEATED_CHUNKS * layout.chunks:
                    least = 2 * layout.warm_up
                yield Piece(stop, plan, segment.logprobs if role == "scan" else None)
            start = stop

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

    async def _column(
        self, segment: ChunkBatch, column: int, here: int, slots: Sequence[int], ticket: Ticket, *, binding: bool
    ) -> int:
        """Runs the next cell of every chunk. Returns the number of tokens run. `here` is the slot of the state from
        which the first chunk starts."""
        cells = segment.column(column)
        writes = slots[: len(cells)]
        reads = [here, *writes[1:]] if column == 0 else writes
        segment.started(cells, reads)
        works = [
            segment.work(cell, read, write, binding=binding and index == 0)
            for index, (cell, read, write) in enumerate(zip(cells, reads, writes, strict=True))
        ]
        rows = await self._batcher.submit_all(works, ticket)
        segment.ended(cells, writes, rows)
        return sum(work.length for work in works)

    async def _repair(self, segment: ChunkBatch, limit: float, again: int, last: int, ticket: Ticket) -> int:
        """Runs each cell again, from the state at the end of the previous cell, if the difference at the joint before
        the cell exceeds `limit`.

        Returns the number of repeated cells. `again` is the slot for the states of repeated cells. `last` is the last
        chunk's slot.
        """
        residuals, repeated, resumed = segment.residuals(), 0, -1
        for cell in range(1, segment.cells):
            # The difference at the joint after a repeated cell is computed again, because the repeated cell has another
            # last state.
            if (segment.residual(cell) if cell == resumed else residuals[cell]) <= limit:
                continue
            if cell != resumed:
                segment.load_end(cell - 1, self._pool, again)
            end = last if cell == segment.cells - 1 else again
            row = await self._batcher.submit(segment.work(cell, again, end, binding=False), ticket)
            segment.continued(cell)
            segment.ended(range(cell, cell + 1), [end], [row])
            repeated, resumed = repeated + 1, cell + 1
        return repeated
