"""Tests that the batches of an epoch contain each session once, and completely: from the session's first input to its
end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.corpora import event_corpus, event_experiment
from wane.models.manifest import Start
from wane.training.data import Corpus
from wane.training.group import ALONE, Group
from wane.training.lanes import Batch, SessionLanes, TextLanes
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder
from wane.training.sessions import Sessions

CPU = torch.device("cpu")


def random_sessions(start: Start, count: int = 70) -> Sessions:
    random = np.random.default_rng(2)
    parts = [random.integers(1, 9, random.integers(1, 20)) for _ in range(count)]
    stream = np.concatenate([np.append([0], part) for part in parts] + [[0]])
    return Sessions(stream, 0, start)


def read(lanes: SessionLanes, first: int, steps: int) -> list[tuple[int, ...]]:
    """Returns the inputs and the last target of each session in `steps` batches. The inputs of a session in several
    batches are joined."""
    open_lanes: dict[int, list[int]] = {}
    ended = []
    for step in range(first, first + steps):
        batch = lanes.batch(step, CPU)
        assert batch.real is not None
        if batch.fresh:
            ended += list(open_lanes.values())
            open_lanes = {}
        for lane in range(batch.inputs.shape[1]):
            real = batch.real[:, lane]
            if real.any():
                known = open_lanes.setdefault(lane, [])
                known[-1:] = batch.inputs[real, lane].tolist()
                known.append(int(batch.targets[real, lane][-1]))
    return sorted(tuple(session) for session in [*ended, *open_lanes.values()])


@pytest.mark.parametrize("start", ["token", "zero"])
def test_every_epoch_has_every_session_once_from_its_first_input_to_its_end(start: Start) -> None:
    sessions = random_sessions(start)
    edges = np.flatnonzero(sessions.stream == 0)
    skipped = 1 if start == "zero" else 0
    expected = sorted(tuple(sessions.stream[begin + skipped : end + 1].tolist()) for begin, end in pairwise(edges))
    lanes = SessionLanes(ALONE, sessions, width=6, chunk=5, shuffle_seed=4)
    assert read(lanes, 0, lanes.steps) == expected


def test_a_resumed_run_reads_the_same_batches() -> None:
    sessions = random_sessions("token")
    whole, resumed = (SessionLanes(ALONE, sessions, 6, 5, 4) for _ in range(2))
    steps = list(range(3 * whole.steps))
    batches = [whole.batch(step, CPU) for step in steps]
    for step in (steps[-1], 2, whole.steps + 1):
        assert torch.equal(resumed.batch(step, CPU).inputs, batches[step].inputs)
    assert not torch.equal(batches[0].inputs, batches[whole.steps].inputs)


def test_two_processes_share_the_lanes_of_one() -> None:
    sessions = random_sessions("token", 40)
    alone = SessionLanes(ALONE, sessions, 5, 7, 1)
    both = [SessionLanes(Group(rank, 2), sessions, 5, 7, 1) for rank in range(2)]
    for step in range(2 * alone.steps):
        one: Batch = alone.batch(step, CPU)
        parts = [lanes.batch(step, CPU) for lanes in both]
        assert torch.equal(torch.cat([part.inputs for part in parts], 1), one.inputs)
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert parts[0].tokens == one.tokens
        assert one.share == 1
        assert one.real is not None
        assert one.tokens == int(one.real.sum())


def test_positions_are_the_places_of_the_inputs_in_the_stream() -> None:
    sessions = random_sessions("zero")
    lanes = SessionLanes(ALONE, sessions, 4, 8, None)
    seen = []
    for step in range(lanes.steps):
        batch = lanes.batch(step, CPU)
        positions = batch.chosen_positions()
        assert np.array_equal(sessions.stream[positions], batch.chosen(batch.inputs).numpy())
        assert np.array_equal(sessions.stream[positions + 1], batch.chosen(batch.targets).numpy())
        seen.append(positions)
    assert np.array_equal(np.sort(np.concatenate(seen)), sessions.inputs())


def test_a_texts_lanes_carry_their_state_to_the_end_of_the_stream() -> None:
    lanes = TextLanes(ALONE, np.arange(50), 3, 4, "train")
    batch = lanes.batch(5, CPU)  # the second batch of the second epoch
    assert (lanes.steps, batch.fresh, batch.tokens, batch.share) == (4, False, 12, 1)
    assert batch.inputs[:, 0].tolist() == [4, 5, 6, 7]
    assert batch.targets[:, 2].tolist() == [37, 38, 39, 40]
    assert batch.chosen_positions()[:, 1].tolist() == [20, 21, 22, 23]
    assert lanes.batch(4, CPU).fresh


@pytest.mark.parametrize("start", ["token", "zero"])
def test_a_resumed_training_on_events_has_the_same_losses(tmp_path: Path, start: Start) -> None:
    corpus: Corpus = event_corpus(start=start)
    chosen = event_experiment(steps=12, negatives=5)
    losses = [progress.loss for progress in Trainer(chosen, corpus, RunFolder(tmp_path / "whole")).run()]
    cut = Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run()
    first = [next(cut).loss for _ in range(6)]
    rest = [progress.loss for progress in Trainer(chosen, corpus, RunFolder(tmp_path / "cut")).run()]
    assert first + rest == losses
