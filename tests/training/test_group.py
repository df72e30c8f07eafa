"""Compares a run of several processes, which torchrun starts, with the same run of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.corpora import REAL_TEXT, text_corpus
from tests.training.group_cases import ALIKE, DROPOUT, HANDED_ON, NOISY, STOP, trained
from wane.training.config import Experiment
from wane.training.device import choose_device
from wane.training.errors import LostError, RunError
from wane.training.group import ALONE, Group
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
LOSS, WEIGHT = 2e-5, 2e-4
"""The tolerances of the loss and of the weights after thirty steps. They are not 0, because several processes add the
terms of a sum in another order than one process does."""

EXPERIMENT = f"""
name = "long"
[model]
cell = "lstm"
hidden = 16
contraction = 0.9
[data]
kind = "text"
path = "{REAL_TEXT}"
vocabulary_size = 300
[training]
steps = 1_000_000
batch = 5
chunk = 8
schedule = "constant"
evaluate_every = 50
checkpoint_every = 10
threads = 1
"""


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """Returns the process id of each rank."""
    found: dict[str, int] = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        found |= {entry.removeprefix("RANK="): int(child) for entry in environment if entry.startswith("RANK=")}
    return found


@contextmanager
def torchrun(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs torchrun with two processes of one thread each while the `with` block runs. At the end of the block, kills
    the processes that are still running."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            for child in children(process).values() if process.poll() is None else ():
                os.kill(child, signal.SIGKILL)
            process.kill()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def records(folder: Path) -> list[dict[str, Any]]:
    """Returns a run's log without its timings and without an incomplete last line."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in whole]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RunFolder(folder).load("checkpoint.pt")["network"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the runs of `group_cases.py`, trained with two processes. A single process has trained the
    first steps of the run `HANDED_ON`."""
    folder = tmp_path_factory.mktemp("together")
    trained(ALIKE[HANDED_ON], text_corpus(), folder / HANDED_ON, ALONE, STOP)
    with torchrun(ROOT / "tests/training/group_cases.py", folder) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    return folder


def seen(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"rank-{rank}.json").read_text())  # type: ignore[no-any-return]


def assert_alike(found: Path, alone: Path) -> None:
    """Asserts that two runs are equal within the tolerances: their logs, the decisions in their last checkpoints (such
    as the best step), their weights and their states."""
    for one, other in zip(records(found), records(alone), strict=True):
        assert one == pytest.approx(other, abs=LOSS), (one, other)
    saved, expected = (RunFolder(folder).load("checkpoint.pt") for folder in (found, alone))
    for key in ("step", "best_step", "decay_start", "end", "data"):
        assert saved[key] == expected[key]
    for name, tensor in expected["network"].items():
        assert torch.allclose(saved["network"][name], tensor, rtol=0, atol=WEIGHT), name
    for tensor, other in zip(saved["state"], expected["state"], strict=True):
        assert torch.allclose(tensor, other, rtol=0, atol=WEIGHT)


@pytest.mark.parametrize("name", [name for name in ALIKE if name != HANDED_ON])
def test_two_processes_train_like_one_process(together: Path, tmp_path: Path, name: str) -> None:
    alone = trained(ALIKE[name], text_corpus(), tmp_path / name, ALONE)
    for rank in (0, 1):
        assert seen(together, rank)["losses"][name] == pytest.approx(alone, abs=LOSS)
    assert_alike(together / name, tmp_path / name)


def test_a_run_can_change_its_number_of_processes(together: Path, tmp_path: Path) -> None:
    chosen, corpus = ALIKE[HANDED_ON], text_corpus()
    whole = trained(chosen, corpus, tmp_path / "whole", ALONE)
    by_two = seen(together, 0)["losses"][HANDED_ON]
    assert by_two == pytest.approx(whole[STOP - 1 :][:STOP], abs=LOSS)
    last = Trainer(chosen, corpus, RunFolder(together / HANDED_ON))
    assert last.step == 20
    assert [progress.loss for progress in last.run()] == pytest.approx(whole[20:], abs=LOSS)
    assert_alike(together / HANDED_ON, tmp_path / "whole")


def test_every_process_has_bitwise_equal_losses(together: Path) -> None:
    assert seen(together, 0)["losses"] == seen(together, 1)["losses"]
    assert seen(together, 0)["refused"] == seen(together, 1)["refused"]


def test_dropout_differs_between_processes_and_repeats_in_a_resumed_run(together: Path) -> None:
    first, other = (seen(together, rank)["noise"] for rank in (0, 1))
    assert first[0] == first[2] != first[1]
    assert other[0] == other[2] != other[1]
    assert not {*first[0], *first[1]} & {*other[0], *other[1]}
    losses = seen(together, 0)["losses"]
    assert losses["dropout"] == losses[NOISY]
    assert records(together / "dropout") == records(together / NOISY)
    for name, tensor in weights(together / "dropout").items():
        assert torch.equal(tensor, weights(together / NOISY)[name])


def test_dropout_changes_the_losses_as_much_with_two_processes_as_with_one(together: Path, tmp_path: Path) -> None:
    alone = trained(DROPOUT, text_corpus(), tmp_path, ALONE)
    found = seen(together, 0)["losses"]["dropout"]
    assert found != pytest.approx(alone, abs=LOSS)
    assert sum(found) / len(found) == pytest.approx(sum(alone) / len(alone), rel=0.02)


def test_fewer_lanes_than_processes_are_refused_without_creating_a_folder(together: Path) -> None:
    message = "RunError: training.batch = 1 for 2 processes: each process needs at least one sequence"
    assert seen(together, 0)["refused"]["narrow"] == message
    assert not (together / "narrow").exists()


def test_an_error_of_one_process_is_raised_in_all_with_its_rank(together: Path) -> None:
    refused = seen(together, 1)["refused"]
    assert refused["first"] == "DataError: no such file"
    assert refused["other"] == "RunError: rank 1: no device here"


def test_diverged_weights_stop_the_run_at_its_next_evaluation(together: Path) -> None:
    refused = seen(together, 0)["refused"]["drift"]
    assert refused == "RunError: rank 1 and rank 0 have different weights after step 20: do the machines differ?"
    assert max(record["step"] for record in records(together / "drift")) < 20


@pytest.mark.slow
def test_a_run_resumes_after_a_kill_and_after_an_interrupt(tmp_path: Path) -> None:
    experiment, folder = tmp_path / "long.toml", tmp_path / "run"
    experiment.write_text(EXPERIMENT)
    command = ("-m", "--", "wane", "train", experiment, "--run", folder)

    def past(step: int) -> bool:
        return any(record["step"] >= step for record in records(folder))

    with torchrun("--max-restarts=1", *command) as killed:
        wait_until(lambda: past(50), killed)
        os.kill(children(killed)["1"], signal.SIGKILL)
        begun_again = max(record["step"] for record in records(folder)) + 100
        wait_until(lambda: past(begun_again), killed)
        os.kill(children(killed)["1"], signal.SIGKILL)
        output, _ = killed.communicate(timeout=TIMEOUT_S)
    assert killed.returncode == 1
    assert "error: rank 0 of 2 lost the connection to another" in output or "rank 0 of 2 was stopped by its" in output
    named = output[output.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in named and "(SIGKILL)" in named
    step = RunFolder(folder).load("checkpoint.pt")["step"]
    assert step >= begun_again - 10

    with torchrun(*command) as interrupted:
        wait_until(lambda: past(step + 50), interrupted)
        interrupted.send_signal(signal.SIGINT)
        output, _ = interrupted.communicate(timeout=TIMEOUT_S)
    assert interrupted.returncode != 0
    assert "2 processes, from step" in output
    assert output.count("stopped; run the same command again to resume from the last checkpoint") == 1
    assert "error:" not in output

    start = RunFolder(folder).load("checkpoint.pt")["step"]
    chosen = Experiment.read(experiment)
    losses = [progress.loss for progress in islice(Trainer(chosen, text_corpus(), RunFolder(folder)).run(), 3)]
    assert start >= step + 40
    assert all(loss < records(folder)[0]["loss"] for loss in losses)
    starts = [origin.hardware.endswith("1 thread(s), 2 processes") for origin in RunFolder(folder).origins()]
    assert starts == [True, True, True]
    assert RunFolder(folder).origins()[0].command == (
        "torchrun --nproc-per-node 2 -m -- wane train long.toml --run run"
    )


def test_lanes_are_divided_completely_and_evenly() -> None:
    for size in range(1, 9):
        for count in range(20):
            shares = [Group(rank, size).share(count) for rank in range(size)]
            assert [lane for share in shares for lane in range(count)[share]] == list(range(count))
            widths = [share.stop - share.start for share in shares]
            assert max(widths) - min(widths) <= 1


def test_a_broken_connection_is_distinguished_from_other_errors() -> None:
    broken = RuntimeError("[/a/gloo/transport/tcp/pair.cc:5] Read error [10.0.0.1]:5: Connection reset by peer. It is")
    reason = (
        r"^rank 1 of 2 lost the connection to another process: Read error \[10\.0\.0\.1\]:5: Connection reset by peer$"
    )
    with pytest.raises(LostError, match=reason), Group(1, 2).heard():
        raise broken
    with pytest.raises(RuntimeError, match="out of memory"), Group(1, 2).heard():
        raise RuntimeError("out of memory")


def test_each_process_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("auto", Group(3, 4, 1, 2)) == torch.device("cuda", 1)
    assert choose_device("cpu", Group(3, 4, 1, 2)) == torch.device("cpu")
    with pytest.raises(RunError, match=r"3 processes for 2 CUDA device\(s\): each process needs its own"):
        choose_device("cuda", Group(0, 3, 0, 3))


def test_an_incomplete_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RunError, match=r"the other processes were not found: .*RANK expected"):
        Group.join()
