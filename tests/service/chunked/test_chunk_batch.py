from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from wane.service.batching.batch import Row
from wane.service.chunked.chunked import ChunkBatch, ChunkPlan, largest
from wane.service.chunked.layout import ChunkLayout
from wane.service.runners.onnx_device import Device, DeviceMemory
from wane.service.runners.outputs import Outputs
from wane.service.runners.runner import HIDDEN, Shapes, StateMemory

LAYOUT = ChunkLayout(chunks=3, cells=2, steps=4, warm_up=3, warm_up_steps=3)
TOKENS = np.arange(21)  # six cells; a cell is the part of a chunk that one run reads; the last cell has one token
SHAPES: Shapes = {"s": (1,), HIDDEN: (2,)}


def device_memory(shapes: Shapes, capacity: int) -> DeviceMemory:
    return DeviceMemory(shapes, capacity, Device("cpu", threads=1))


@pytest.fixture(params=[StateMemory, device_memory], ids=["host", "device"])
def memory(request: pytest.FixtureRequest) -> StateMemory:
    """Memory with twelve slots. A state has one unit."""
    make: Callable[[Shapes, int], StateMemory] = request.param
    return make(SHAPES, 12)


def put(memory: StateMemory, values: Sequence[float]) -> range:
    """Writes one state for each value to the first slots. Returns the slots."""
    states = np.array(values, np.float32)[:, None]
    memory.write(np.arange(len(values)), {"next.s": states, HIDDEN: np.zeros((len(values), 2), np.float32)})
    return range(len(values))


def start(segment: ChunkBatch, memory: StateMemory, cells: range, *values: float) -> None:
    segment.begin(cells, put(memory, values), range(len(values)), binding=False)


def end(segment: ChunkBatch, memory: StateMemory, cells: range, *values: float) -> None:
    # The result rows have no outputs, like those of the graph "advance".
    segment.ended(cells, put(memory, values), [Row(Outputs({}), row) for row in range(len(values))])


def residuals(segment: ChunkBatch, first: int = 1, last: int | None = None) -> list[float]:
    found: list[float] = largest(segment.differences(first, last)).tolist()
    return found


@pytest.fixture
def segment(memory: StateMemory) -> ChunkBatch:
    """A segment (a part of a long sequence) of three chunks with two cells each. At the start of the second chunk, the
    chunk's state differs a little from the end state of the previous chunk. At the start of the third chunk the
    difference is large."""
    made = ChunkBatch("advance", LAYOUT, TOKENS, None, memory)
    start(made, memory, range(6), 0.0, 1.0, 2.5, 3.0, 9.0, 5.0)
    end(made, memory, range(6), 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    return made


def test_cells_are_numbered_along_the_sequence_and_run_column_after_column(segment: ChunkBatch) -> None:
    assert segment.cells == 6
    assert [list(segment.column(part)) for part in range(2)] == [[0, 2, 4], [1, 3, 5]]
    works = segment.begin(range(6), [0] * 6, [0] * 6, binding=True)
    assert [work.length for work in works] == [4, 4, 4, 4, 4, 1]
    assert [work.binding for work in works] == [True, False, False, False, False, False]
    (work,) = segment.begin([3], [7], [8], binding=False)
    assert isinstance(work.tokens, np.ndarray) and work.tokens.tolist() == [12, 13, 14, 15]
    assert (work.role, work.targets, work.read, work.write) == ("advance", None, 7, 8)
    short = ChunkBatch("advance", LAYOUT, TOKENS[:17], None, StateMemory(SHAPES, 1))
    assert [list(short.column(part)) for part in range(2)] == [[0, 2, 4], [1, 3]]


def test_the_states_differ_where_a_cell_does_not_start_from_the_end_of_the_previous_cell(segment: ChunkBatch) -> None:
    assert residuals(segment) == [0.0, 0.5, 0.0, 5.0, 0.0]
    assert residuals(segment, 2, 5) == [0.5, 0.0, 5.0]
    assert residuals(segment, 6, 7) == []
    assert ChunkPlan().then(segment, 100, 0).joints["s"].tolist() == [5.0]
    assert ChunkPlan().then(segment, 100, 0).places == (108, 116)


def test_repeating_a_cell_moves_the_difference_to_the_end_of_the_cell(segment: ChunkBatch, memory: StateMemory) -> None:
    segment.restore(3, 7)
    segment.begin([4], [7], [7], binding=False)
    end(segment, memory, range(4, 5), 4.75)
    assert residuals(segment) == [0.0, 0.5, 0.0, 0.0, 0.25]


def test_non_finite_states_are_equal_or_infinitely_far_apart(segment: ChunkBatch, memory: StateMemory) -> None:
    start(segment, memory, range(1, 5), np.inf, np.nan, np.inf, 1.0)
    end(segment, memory, range(4), np.inf, np.nan, -np.inf, np.nan)
    assert residuals(segment) == [0.0, 0.0, np.inf, np.inf, 0.0]
    assert ChunkPlan().then(segment, 0, 0).joints["s"].tolist() == [np.inf]


def test_a_segment_of_one_cell_has_no_joints(memory: StateMemory) -> None:
    segment = ChunkBatch("advance", LAYOUT, TOKENS[:3], None, memory)
    start(segment, memory, range(1), 2.0)
    end(segment, memory, range(1), 3.0)
    assert residuals(segment) == []
    plan = ChunkPlan().then(segment, 0, 0)
    assert (plan.residual, plan.joints["s"].tolist(), plan.places) == (0.0, [0.0], ())
