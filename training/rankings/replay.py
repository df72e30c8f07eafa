"""Replays the sessions of a split through a running server, step by step, and ranks the next events in its answers.

Each event of a session is one step, which names the event as a shop would. The answer after a judged position lists
the first LISTED events, which is all that the metrics know of a method. They are compared by name, so the served model
may have its events in another order. The request names the events that the protocol does not rank (`exclude`), because
the server remembers only a session's last events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wane.client import Wane, WaneError
from wane.client.options import StepOptions, Unknown
from wane.models.vocabulary import UNK, Vocabulary
from wane.training.config import DataConfig
from wane.training.errors import RunError
from wane.training.evaluate_events import Judge
from wane.training.rankings.metrics import LISTED, Judged

ELSEWHERE = -2
"""Stands in a list for an event that the run's vocabulary lacks."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The server's answers: what it ranked, the duration of each step in seconds, and the model version that answered
    the first and the last step."""

    judged: Judged
    durations_s: NDArray[np.float64]
    wall_s: float
    versions: tuple[str, ...]

    def describe(self) -> str:
        """Returns a sentence about the server's model and speed."""
        p50, p90, p99 = np.percentile(self.durations_s, [50, 90, 99]) * 1000
        return (
            f"served by {' and '.join(self.versions)}: {len(self.durations_s):,} steps in {self.wall_s:,.1f} s, one "
            f"after another: {len(self.durations_s) / self.wall_s:,.0f} steps a second; latency p50 {p50:.2f} ms, p90 "
            f"{p90:.2f} ms, p99 {p99:.2f} ms"
        )


def replay(
    judge: Judge, vocabulary: Vocabulary, data: DataConfig, url: str, model: str | None, advance: Callable[[int], None]
) -> Replay:
    """Replays the sessions with a judged position, up to the last of these. `model`: the name of the served model, or
    None for the default model. `advance` is called after every step. Raises RunError if the server refuses a step or
    cannot be reached, or if its model lacks an event."""
    lists = np.full((judge.count, LISTED), -1)
    durations: list[float] = []
    versions: list[str] = []
    unknown: Unknown = "token" if data.unknown == "token" else "refuse"
    started = time.perf_counter()
    try:
        with Wane(url) as wane:
            for events, places in judge.sessions_to_replay():
                names = [vocabulary.token(event) for event in events.tolist()]
                with wane.session(model=model, unknown=unknown) as session:
                    for at, name in enumerate(names, start=1):
                        row = places.get(at)
                        options: StepOptions = {"top_k": 1 if row is None else LISTED}
                        left_out = [one for one in dict.fromkeys(names[:at][judge.left_out]) if one != UNK]
                        if left_out and row is not None:
                            options["exclude"] = left_out
                        before = time.perf_counter()
                        answer = session.append([name], **options)  # the vocabulary of no server has an event <unk>
                        durations.append(time.perf_counter() - before)
                        advance(1)
                        if lacked := [one for one in answer.unknown if one != UNK]:
                            raise ValueError(f"the vocabulary of {answer.model} lacks the event {lacked[0]!r}")
                        if row is not None:
                            found = [vocabulary.event_id(one.token) for one in answer.predictions]
                            lists[row, : len(found)] = [ELSEWHERE if one is None else one for one in found]
                        if not versions or versions[-1] != f"{answer.model} {answer.model_version}":
                            versions.append(f"{answer.model} {answer.model_version}")
    except (WaneError, ValueError) as error:
        raise RunError(f"--server {url}: {error}") from error
    wall_s = time.perf_counter() - started
    return Replay(judge.of_lists(lists), np.array(durations), wall_s, tuple(dict.fromkeys(versions)))
