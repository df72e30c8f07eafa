from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.service.shipped import PATHS, opened
from wane.service.runners.subprocess import RunnerLost, SubprocessRunner

PATH = PATHS[0]
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def shadow_process() -> Iterator[SubprocessRunner]:
    runner = SubprocessRunner(PATH)
    yield runner
    runner.kill()
    runner.wait()


def test_a_run_in_the_subprocess_is_bit_identical(shadow_process: SubprocessRunner) -> None:
    bundle, here = opened(PATH)
    tokens = np.array([[2, 3, 4]])
    state = {tensor.name: np.zeros((1, *tensor.shape), np.float32) for tensor in bundle.manifest.state}
    for role in ("window", "advance"):
        feeds = {"tokens": tokens, "lengths": np.array([3]), **(state if role == "advance" else {})}
        expected, found = here.run(role, feeds), shadow_process.run(role, feeds)
        assert set(found) == set(expected)
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()


def test_a_run_adds_its_processor_time(shadow_process: SubprocessRunner) -> None:
    before_s = shadow_process.cpu_s
    shadow_process.run("window", {"tokens": np.full((1, 64), 2), "lengths": np.array([64])})
    assert shadow_process.cpu_s > before_s


def test_a_failed_run_raises_its_error_and_the_next_run_succeeds(shadow_process: SubprocessRunner) -> None:
    with pytest.raises(RuntimeError, match="lengths"):
        shadow_process.run("window", {"tokens": np.array([[2, 3]])})
    assert "logits" in shadow_process.run("window", {"tokens": np.array([[2, 3]]), "lengths": np.array([2])})


def test_the_process_runs_at_idle_priority(shadow_process: SubprocessRunner) -> None:
    shadow_process.run("window", {"tokens": np.array([[2]]), "lengths": np.array([1])})
    assert os.sched_getscheduler(shadow_process.process.pid) == os.SCHED_IDLE


def test_a_run_after_the_process_was_killed_raises_runner_lost() -> None:
    runner = SubprocessRunner(PATH)
    runner.kill()
    with pytest.raises(RunnerLost):
        runner.run("window", {"tokens": np.array([[2]]), "lengths": np.array([1])})
    runner.wait()


def test_the_process_exits_when_its_input_is_closed() -> None:
    runner = SubprocessRunner(PATH)
    runner.run("window", {"tokens": np.array([[2]]), "lengths": np.array([1])})
    runner.asked.close()
    assert runner.process.wait(TIMEOUT_S) == 0
    runner.wait()
