from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from research.stability_price import CAPS, distance, main, plan
from tests.training.corpora import REAL_TEXT
from wane.training.config import Experiment

BASE = """
name = "{name}"
[model]
cell = "{cell}"
hidden = 8
[data]
kind = "text"
vocabulary_size = 300
[training]
steps = {steps}
batch = 4
chunk = 8
learning_rate = 2e-2
warmup = 2
evaluate_every = 10
checkpoint_every = 5
threads = 1
"""


class Command:
    """Runs `research.stability_price` on the licence's text. The command writes into `folder`."""

    def __init__(self, folder: Path, steps: int = 20) -> None:
        self.folder, self.runs, self.steps = folder, folder / "runs", steps

    def experiments(self) -> dict[str, Path]:
        paths = {"gated": self.folder / "gated.toml", "rnn": self.folder / "rnn.toml"}
        for (name, path), cell in zip(paths.items(), ("gated", "rnn_tanh"), strict=True):
            path.write_text(BASE.format(name=name, cell=cell, steps=self.steps))
        return paths

    def __call__(self, *options: str) -> int:
        words = ["--data", REAL_TEXT, "--runs", self.runs, "--json", self.folder / "found.json", *options]
        words += ["--figures", self.folder / "figures", "--longest-window", "64"]
        for name, path in self.experiments().items():
            words += [f"--{name}", path]
        return main([str(word) for word in words])

    def found(self) -> dict[str, list[dict[str, Any]]]:
        record: dict[str, list[dict[str, Any]]] = json.loads((self.folder / "found.json").read_text())
        return record

    def written(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self.runs.glob("*/checkpoint.pt")}


@pytest.mark.slow
def test_the_command_trains_missing_runs_and_reports_finished_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path)
    assert command("--report") == 0
    assert command.found()["prices"] == command.found()["distances"] == []

    assert command() == 0
    found = command.found()
    prices = found["prices"]
    assert {(p["family"], p["lambda"]) for p in prices} == {(f, cap) for f in ("gated", "rnn") for cap in CAPS}
    assert len(prices) == 2 * (len(CAPS) + 2 * 2)
    for point in prices:
        if point["lambda"] is not None:
            assert max(point["factors"]) <= point["lambda"] * (1 + 1e-6)  # the certificate rounds the cap to float32
            assert point["k"] is None or 1 <= point["k"] <= 64
    assert any(point["k"] is not None for point in prices)
    assert len(found["distances"]) == 4
    for along in found["distances"]:
        assert along["steps"] == list(range(21))
        assert along["between"][0] == along["recurrent_moved"][0] == 0
        # the first chunk starts from the zero state in both regimes
        assert along["between"][1] == 0 < along["recurrent_moved"][1]
        assert all(apart > 0 for apart in along["between"][2:])
    for name in ("stability_price.png", "weight_distance.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 10_000

    # A further call trains no run. After a run was deleted, the next call trains only this run, with the same result.
    before = command.written()
    assert command() == 0
    assert command.written() == before
    gone = next(path for path in before if path.parent.name == "rnn-0.9-seed1")
    gone.unlink()
    assert command() == 0
    assert {path for path, when in command.written().items() if before[path] != when} == {gone}
    again = command.found()
    for point, before_point in zip(again["prices"], prices, strict=True):
        assert {**point, "train_wall_s": 0} == {**before_point, "train_wall_s": 0}
    assert again["distances"] == found["distances"]


def test_every_run_of_the_plan_has_a_unique_name_and_the_first_seed_is_first(tmp_path: Path) -> None:
    bases = {name: Experiment.read(path) for name, path in Command(tmp_path).experiments().items()}
    runs = plan(bases)
    assert len({run.name for run in runs}) == len(runs) == 2 * len(CAPS) + 6 + 8
    assert {run.training.seed for run in runs[:-8]} == {1}
    twins = [run for run in runs if run.training.regime == "truncated"]
    for twin in twins:
        [recurrent] = [run for run in runs if run.name == twin.name.replace("-truncated", "")]
        assert twin.model == recurrent.model
        assert twin.training.model_copy(update={"regime": "recurrent"}) == recurrent.training


def test_the_distance_is_euclidean_over_all_tensors() -> None:
    one = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    other = {"a": torch.full((2, 2), 3.0), "b": torch.tensor([0.0, 8.0, 0.0])}
    assert distance(one, other) == 10
