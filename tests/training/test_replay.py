"""Replays test sessions through a server, and compares its answers with the evaluation from files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.service.live_server import live_server
from tests.training.test_layouts import put
from wane.training.cli import main

pytestmark = pytest.mark.train

EXPERIMENT = """
name = "replayed"
[model]
cell = "gated"
hidden = 12
block = "residual"
cache = 8
[data]
kind = "events"
start = "{start}"
layout = "leave_one_out"
[training]
steps = 4
batch = 8
chunk = 8
warmup = 1
evaluate_every = 4
checkpoint_every = 4
threads = 1
device = "cpu"
"""


def trained(folder: Path, start: str, layout: bool) -> tuple[Path, Path]:
    """Trains and exports a small model. Returns the run folder and the folder of bundles."""
    random = np.random.default_rng(6)
    path, text = folder / "users.csv", EXPERIMENT.format(start=start)
    users = [random.permutation(40)[: random.integers(3, 9)].tolist() for _ in range(60)]
    if layout:
        put(path, [f"{' '.join(map(str, items[:-2]))},{items[-2]},{items[-1]}" for items in users])
    else:
        rows = [f"{user},{user * 100 + at},{item}" for user, items in enumerate(users) for at, item in enumerate(items)]
        put(path, ["session,time,item", *rows])
        text = text.replace('layout = "leave_one_out"', 'time_unit = "s"\ntest_share = 0.4')
    (folder / "replayed.toml").write_text(text)
    run, bundles = folder / "run", folder / "bundles"
    assert main(["train", str(folder / "replayed.toml"), "--data", str(path), "--run", str(run)]) == 0
    assert main(["export", str(run), "--data", str(path), "--bundles", str(bundles)]) == 0
    return run, bundles


@pytest.mark.parametrize(("start", "layout"), [("zero", True), ("token", False)])
def test_what_is_served_is_what_was_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str, layout: bool
) -> None:
    run, bundles = trained(tmp_path, start, layout)
    data = str(tmp_path / "users.csv")
    saved = json.loads((run / "rankings.json").read_text())["test"]
    capsys.readouterr()
    with live_server("--bundles", str(bundles)) as server:
        command = ["evaluate", str(run), "--data", data, "--positions", "all", "--server", server.url]
        assert main([*command, "--model", "replayed"]) == 0
        printed = capsys.readouterr().out
        assert main([*command, "--model", "other"]) == 2
        assert f"--server {server.url}" in capsys.readouterr().err
    found = json.loads((run / "served.json").read_text())["test"]
    assert found["protocol"] == ("leave_one_out" if layout else "next")
    assert found["positions"] == saved["positions"] > 20
    assert found["methods"]["served"] == found["methods"]["recurrent"] == saved["methods"]["recurrent"]
    assert found["methods"]["served"]["recall"]["20"] > 0
    lists = found["positions"]
    assert f"{lists:,} of {lists:,} lists of 20 events are those of the run" in printed
    assert re.search(r"steps a second; latency p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms", printed)
    assert main(["evaluate", str(run), "--data", data, "--server", "http://127.0.0.1:1"]) == 2
