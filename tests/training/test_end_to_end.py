"""Runs the commands on a real text: train, kill -9, resume, export, serve and predict.

The commands that the test kills or stops run in separate processes.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from wane.cli import main
from wane.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300

EXPERIMENT = ROOT / "training" / "experiments" / "licence.toml"
ENDLESS = "steps = 1_000_000\n"


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error::SyntaxWarning", "-m", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function that runs a command in this process and returns its output."""
    monkeypatch.chdir(ROOT)

    def run(*arguments: object) -> str:
        status = main([*map(str, arguments)])
        output = "".join(capsys.readouterr())
        assert status == 0, output
        return output

    return run


def endless(experiment: str) -> str:
    """Returns the text of an experiment with a million steps and an absolute `data.path`, so that the file can be in
    any folder. The schedule is constant: it does not depend on the number of steps."""
    (steps,) = re.findall(r"^steps = \d+\n", experiment, re.MULTILINE)
    assert "schedule" not in experiment
    experiment = experiment.replace('"../../LICENSE"', f'"{ROOT / "LICENSE"}"')
    return experiment.replace(steps, f'{ENDLESS}schedule = "constant"\n')


def logged(folder: Path) -> dict[int, float]:
    """Returns the training loss of each step."""
    lines = (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: line["loss"] for line in whole if "loss" in line}


def wait_until(condition: object, process: subprocess.Popen[str]) -> None:
    assert callable(condition)
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_run_is_resumed_exported_and_served(tmp_path: Path, run: Callable[..., str]) -> None:
    whole, cut, experiment = tmp_path / "whole", tmp_path / "cut", tmp_path / "licence.toml"
    # The run never ends by itself, so the test always kills it before its end.
    experiment.write_text(endless(EXPERIMENT.read_text()))
    killed = start("wane", "train", experiment, "--run", cut)
    wait_until(lambda: (cut / "checkpoint.pt").exists() and max(logged(cut), default=0) >= 200, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT_S)
    assert killed.returncode == -signal.SIGKILL
    at = RunFolder(cut).load("checkpoint.pt")["step"]
    steps = at + 100
    experiment.write_text(experiment.read_text().replace(ENDLESS, f"steps = {steps}\n"))
    assert f"from step {at}" in run("train", experiment, "--run", cut)
    run("train", experiment, "--run", whole)
    assert logged(cut) == logged(whole)
    assert logged(cut)[steps] < logged(cut)[50]

    bundles = tmp_path / "bundles"
    exported = run("export", cut, "--bundles", bundles)
    assert "contractive" in exported
    exported = run("export", cut, "--bundles", tmp_path / "quantised", "--precision", "int8")
    assert "not certified: its graphs multiply in int8" in exported
    quantised = json.loads((tmp_path / "quantised" / "licence-int8" / "manifest.json").read_text())
    assert (quantised["name"], quantised["precision"], quantised["quality"]) == ("licence-int8", "int8", None)
    assert (cut / "evaluation.png").stat().st_size > 0
    manifest = json.loads((bundles / "licence" / "manifest.json").read_text())
    assert manifest["certificate"]["contractive"] is True
    assert manifest["provenance"]["steps"] == steps
    assert manifest["provenance"]["command"] == "wane train licence.toml --run cut"
    assert "path" not in manifest["provenance"]["config"]["data"]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start("wane", "serve", "--bundles", bundles, "--port", port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            wait_until(lambda: is_ready(client), server)
            answer = client.post("/v1/predict", json={"input": "You may reproduce and", "mode": "both"}).json()
        assert answer["model"] == "licence"
        assert len(answer["predictions"]) == 5
        assert answer["agreement"]["top1_match"] is True
        # The window covers the whole input, so the window mode and the recurrent mode agree.
        assert answer["agreement"]["total_variation"] < 1e-5
    finally:
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=TIMEOUT_S)
    assert server.returncode == 0, output


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no-such.toml"], "no-such.toml: No such file or directory"),
        (["evaluate", "no-such-run"], "no-such-run is not a run folder"),
        (["export", "no-such-run", "--bundles", "x"], "no-such-run is not a run folder"),
        (["train", "[/b].toml"], "[/b].toml: No such file or directory"),
        (["train", str(EXPERIMENT), "--data", "none.txt"], "none.txt: No such file or directory"),
        (
            ["train", str(EXPERIMENT), "--data", __file__, "--tokenizer", "none.json"],
            "--tokenizer none.json cannot be read",
        ),
        (["evaluate", "run", "--positions", "0"], "'0' is not a positive integer"),
        (["export", "run", "--bundles", "x", "--version", "v2"], "'v2' is not a version"),
    ],
)
def test_invalid_input_is_reported_in_one_line_with_exit_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(arguments)
    except SystemExit as ended:  # argparse raises SystemExit for some of the arguments
        status = ended.code
    assert status == 2
    assert message in "".join(capsys.readouterr())
