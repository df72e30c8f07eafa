"""How a long sequence is cut into chunks that run side by side: as many as are quickest by what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.manifest import Role
from service.engine.batch import MOST_POSITIONS
from service.engine.paces import Pace

SEGMENT_TOKENS = 65_536
"""Tokens whose chunks run side by side, at most: a longer sequence takes one segment after another."""

FEWEST_TOKENS = 64
"""Tokens of a chunk, at least; and twice its warm-up."""

RUN_SECONDS = 0.025
"""What one run should take at most, so that other requests' turns come."""

FEWEST_STEPS = 16
"""Tokens that every chunk goes on by in a run, at least."""

WORTHWHILE = 0.9
"""Chunks are run side by side where that is expected to take less than this share of the time in order."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`chunks` of `cells` times `steps` tokens each, the last perhaps of fewer; every chunk but the first is warmed up
    over the `warm_up` tokens before it, in pieces of `warm_up_steps`. A cell is what one run takes of a chunk.
    `seconds`: what all of it is expected to take."""

    chunks: int
    cells: int
    steps: int
    warm_up: int
    warm_up_steps: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def length(self) -> int:
        """Tokens of a chunk."""
        return self.cells * self.steps


def lay_out(tokens: int, warm_up: int, role: Role, pace: Pace, warm_up_pace: Pace) -> Layout | None:
    """The quickest layout of the next segment of a sequence of which `tokens` are left. None: in order is quickest.

    `role`: what the chunks are run by; the paces are its, and that of `advance`, which warms up.
    """
    tokens = min(tokens, SEGMENT_TOKENS)
    best = WORTHWHILE * pace.get(1, 0.0) * tokens
    found: Layout | None = None
    for width, seconds in pace.items():
        length = -(-tokens // width)
        if width == 1 or width not in warm_up_pace or length < max(2 * warm_up, FEWEST_TOKENS):
            continue
        taken = seconds * tokens + warm_up_pace[width] * warm_up * (width - 1)
        if taken < best:
            best = taken
            most = _steps(role, width, seconds)
            cells = -(-length // most)
            steps = -(-length // cells)
            chunks = -(-tokens // (cells * steps))
            found = Layout(chunks, cells, steps, warm_up, _steps("advance", width, warm_up_pace[width]), taken)
    return found


def _steps(role: Role, width: int, seconds: float) -> int:
    """Tokens that each of `width` chunks goes on by in a run."""
    most = MOST_POSITIONS[role] // width
    return max(1, min(most, max(FEWEST_STEPS, int(RUN_SECONDS / (seconds * width)))))
