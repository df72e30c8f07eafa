from __future__ import annotations

import numpy as np
import pytest

from wane.service.batching.batch import Row
from wane.service.chunked.chunked import ChunkBatch
from wane.service.chunked.layout import ChunkLayout
from wane.service.runners.outputs import Outputs

LAYOUT = ChunkLayout(chunks=3, cells=2, steps=4, warm_up=3, warm_up_steps=3)
TOKENS = np.arange(21)  # six cells; a cell is the part of a chunk that one run reads; the last cell has one token


def states(*values: float) -> dict[str, np.ndarray]:
    """Returns one row of state for each value. A state has one unit."""
    return {"s": np.array(values, np.float32)[:, None]}


def rows(count: int) -> list[Row]:
    """Returns result rows without outputs, like the result rows of the graph "advance"."""
    return [Row(Outputs({}), row) for row in range(count)]


@pytest.fixture
def segment() -> ChunkBatch:
    """A segment (a part of a long sequence) of three chunks with two cells each. At the start of the second chunk, the
    chunk's state differs a little from the end state of the previous chunk. At the start of the third chunk the
    difference is large."""
    made = ChunkBatch("advance", LAYOUT, TOKENS, None, states(0.0))
    made.started(range(6), states(0.0, 1.0, 2.5, 3.0, 9.0, 5.0))
    made.ended(range(6), states(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), rows(6))
    return made


def test_cells_are_numbered_along_the_sequence_and_run_column_after_column(segment: ChunkBatch) -> None:
    assert segment.cells == 6
    assert [list(segment.column(part)) for part in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [segment.work(cell, 0, 0, binding=False).length for cell in range(6)] == [4, 4, 4, 4, 4, 1]
    work = segment.work(3, 7, 8, binding=False)
    assert isinstance(work.tokens, np.ndarray) and work.tokens.tolist() == [12, 13, 14, 15]
    assert (work.role, work.targets, work.read, work.write) == ("advance", None, 7, 8)
    short = ChunkBatch("advance", LAYOUT, TOKENS[:17], None, states(0.0))
    assert [list(short.column(part)) for part in range(2)] == [[0, 2, 4], [1, 3]]


def test_the_states_differ_where_a_cell_does_not_start_from_the_end_of_the_previous_cell(segment: ChunkBatch) -> None:
    assert segment.residuals().tolist() == [0.0, 0.0, 0.5, 0.0, 5.0, 0.0]
    assert [segment.residual(cell) for cell in range(1, 6)] == [0.0, 0.5, 0.0, 5.0, 0.0]
    assert segment.joints()["s"].tolist() == [5.0]


def test_repeating_a_cell_moves_the_difference_to_the_end_of_the_cell(segment: ChunkBatch) -> None:
    segment.started(range(4, 5), segment.end(3))
    segment.ended(range(4, 5), states(4.75), rows(1))
    assert segment.residuals().tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 0.25]


def test_non_finite_states_are_equal_or_infinitely_far_apart(segment: ChunkBatch) -> None:
    segment.started(range(1, 5), states(np.inf, np.nan, np.inf, 1.0))
    segment.ended(range(4), states(np.inf, np.nan, -np.inf, np.nan), rows(4))
    assert segment.residuals().tolist() == [0.0, 0.0, 0.0, np.inf, np.inf, 0.0]
    assert segment.joints()["s"].tolist() == [np.inf]
