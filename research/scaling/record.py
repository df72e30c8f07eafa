"""Records the result of each step: when the step was due, its latency, and whether the state was rebuilt or the step
was refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Record:
    """The results of steps. Times are in seconds.

    due_s: when each answered step was due.
    taken_s: the latency of each answered step.
    rebuilt: whether the state of each answered step was rebuilt.
    refused: the number of refused steps.
    refused_s: when each refused step was due.
    asked: the number of steps that have become due.
    """

    due_s: list[float] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    rebuilt: list[bool] = field(default_factory=list)
    refused: int = 0
    refused_s: list[float] = field(default_factory=list)
    asked: int = 0

    def ask(self) -> None:
        """Counts a step that is due."""
        self.asked += 1

    def answer(self, due_s: float, now_s: float, refused: bool, rebuilt: bool) -> None:
        """Records the end of a step."""
        if refused:
            self.refused += 1
            self.refused_s.append(due_s)
            return
        self.due_s.append(due_s)
        self.taken_s.append(now_s - due_s)
        self.rebuilt.append(rebuilt)

    @property
    def answered(self) -> int:
        """The number of answered steps."""
        return len(self.due_s)

    def between(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """Summarises the steps that were due between two times: the number and the rate of answered steps, the latency
        percentiles in ms, the number of rebuilt states, and the share of refused steps."""
        due, taken, rebuilt = self.arrays()
        chosen = (due >= begin_s) & (due < end_s)
        refused = np.array(self.refused_s)
        lost = int(((refused >= begin_s) & (refused < end_s)).sum())
        count = int(chosen.sum())
        p50, p99 = (1e3 * np.percentile(taken[chosen], (50, 99))).tolist() if count else (None, None)
        return {
            "steps": count,
            "steps_per_s": count / (end_s - begin_s),
            "p50_ms": p50,
            "p99_ms": p99,
            "resident_p99_ms": p99_ms(taken[chosen & ~rebuilt]),
            "rebuilt_p99_ms": p99_ms(taken[chosen & rebuilt]),
            "rebuilt": int(rebuilt[chosen].sum()),
            "refused_share": lost / max(lost + count, 1),
        }

    def over_time(self, begin_s: float, end_s: float, slice_s: float) -> list[dict[str, Any]]:
        """Returns the summary of `between` for each time slice, with the slice's middle as `at_s`."""
        starts = np.arange(begin_s, end_s - slice_s / 2, slice_s)
        return [{"at_s": float(at + slice_s / 2), **self.between(at, at + slice_s)} for at in starts]

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Returns three arrays in the order of the answers: when each step was due, its latency in seconds, and whether
        its state was rebuilt."""
        return np.array(self.due_s), np.array(self.taken_s), np.array(self.rebuilt, bool)


def p99_ms(taken_s: NDArray[np.float64]) -> float | None:
    """Returns the 99th percentile in ms of latencies in seconds, or None if there are no latencies."""
    return float(1e3 * np.percentile(taken_s, 99)) if len(taken_s) else None
