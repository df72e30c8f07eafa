from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.service.alone import alone, resident_bytes
from tests.service.shipped import PATHS, each_bundle, opened
from wane.models.bundle import Bundle
from wane.service.batching.batch import MOST_POSITIONS
from wane.service.runners.onnx import CPU, CUDA, OnnxRunner
from wane.service.runners.runner import DeviceError


class NoSession:
    """A fake inference session that always uses the CPU, whatever device is requested."""

    asked: list[object]

    def __init__(self, path: Path, options: object, providers: list[object]) -> None:
        type(self).asked = providers

    def get_providers(self) -> list[str]:
        return [CPU]

    def get_outputs(self) -> list[object]:
        return []


@each_bundle
def test_a_run_returns_every_output_by_name_and_shape(path: Path) -> None:
    bundle, runner = opened(path)
    state = {tensor.name: np.zeros((3, *tensor.shape), np.float32) for tensor in bundle.manifest.state}
    assert runner.device == "cpu"
    outputs = runner.run("step", {"tokens": np.array([1, 2, 3]), **state})
    architecture = bundle.manifest.architecture
    assert outputs["logits"].shape == (3, architecture.vocabulary_size)
    assert outputs["hidden"].shape == (3, architecture.hidden)
    assert {name for name in outputs if name.startswith("next.")} == {f"next.{name}" for name in state}


@each_bundle
def test_cuda_fails_if_it_is_not_installed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(DeviceError, match=r"no CUDA provider.*onnxruntime-gpu instead of onnxruntime"):
        OnnxRunner(opened(path)[0], "cuda", threads=1)
    assert OnnxRunner(opened(path)[0], "auto", threads=1).device == "cpu"


@each_bundle
def test_cuda_fails_and_auto_uses_the_cpu_if_cuda_does_not_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", NoSession)
    bundle = Bundle.read(path)  # not `opened`, which would keep a runner with the fake session for other tests
    with pytest.raises(DeviceError, match="did not start"):
        OnnxRunner(bundle, "cuda", threads=1)
    assert NoSession.asked == [(CUDA, {"device_id": 0, "use_tf32": "0"}), CPU]
    assert OnnxRunner(bundle, "auto", threads=1).device == "cpu"
    assert "did not start" in caplog.text


async def run_the_largest_batch_of_each_runner() -> None:
    """Runs the largest allowed batch of the graph "scan", which takes the most memory, in each of two runners of one
    bundle."""
    bundle = Bundle.open(PATHS[0])
    state = {tensor.name: np.zeros((64, *tensor.shape), np.float32) for tensor in bundle.manifest.state}
    tokens = np.ones((64, MOST_POSITIONS["scan"] // 64), np.int64)
    feeds = {"tokens": tokens, "targets": tokens, "lengths": np.full(64, tokens.shape[1]), **state}
    runners = [OnnxRunner(bundle, "cpu", threads=1) for _ in range(2)]
    before = [resident_bytes()]
    for runner in runners:
        runner.run("scan", feeds)
        before.append(resident_bytes())
    first, second = before[1] - before[0], before[2] - before[1]
    assert first > 15e6, "the first run must take more than 15 MB, because its logits alone have 17 MB"
    assert second < first / 4, f"the first run took {first:,} bytes, and the second run took another {second:,} bytes"


def test_graphs_share_one_arena() -> None:
    alone(run_the_largest_batch_of_each_runner)
