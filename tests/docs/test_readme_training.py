"""Runs the commands of the README that train and serve a model of clicks, and those of the tutorial, which uses this
model. Compares their output with the two pages."""

from __future__ import annotations

import os
import re
import signal
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, free_port
from tests.docs.transcript import FENCE, Command, bash, compare, parse, run, scripts

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_test_runs_each_block() -> None:
    """The second group of commands audits a model that was trained outside Wane, and serves the resulting bundle.
    tests/training runs these commands."""
    own, outside = scripts(README)
    assert "training/experiments/shop.toml" in own[3]
    assert ["examples/outside_lstm.py" in outside[0], " audit " in outside[1]] == [True, True]
    assert len(outside) == 3 and outside[2] == own[-1]


@dataclass(frozen=True)
class Trained:
    """The folder that replaces `runs` in the commands, the output of the commands, and the environment they had."""

    folder: Path
    printed: str
    environment: dict[str, str]

    def spell(self, command: str) -> str:
        """Returns a command of a page with the folder, and with the Python that runs the tests."""
        return command.replace(".venv/bin/python", sys.executable).replace("runs/", f"{self.folder}/")

    def bash(self, command: str) -> str:
        """Runs a command of a page, and returns its output."""
        ended = bash(self.spell(command), ROOT, self.environment)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The shop after the README's commands that generate the clicks, and train, evaluate and export the model."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
    made = Trained(tmp_path_factory.mktemp("runs"), "", {**inherited, "NO_COLOR": "1", "COLUMNS": "200"})
    _, _, *commands, _ = scripts(README)[0]
    return replace(made, printed="".join(map(made.bash, commands)))


@pytest.mark.slow
def test_the_commands_that_train_a_model_of_clicks_reach_the_stated_scores(shop: Trained) -> None:
    environment_made, install, *_, serve = scripts(README)[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert environment_made == "python3 -m venv .venv"
    assert install == ".venv/bin/pip install -e '.[train]'" and "train" in extras
    best = re.search(r"recall@20 ([\d.]+)", shop.printed)
    assert best is not None
    reached = [float(best[1]), *(recall(row, shop.printed) for row in ("recurrent", "Markov", "V-SkNN"))]
    stated = re.search(
        r"recall@20 is ([\d.]+); .* is ([\d.]+)\. A Markov chain reaches ([\d.]+), .* ([\d.]+)\.\n", README
    )
    assert stated is not None
    model, optimum, *others = map(float, stated.groups())
    assert reached == pytest.approx([optimum, model, *others], abs=0.01)
    port = str(free_port())
    serving = Command(0, shop.spell(serve), "...\nready: http://127.0.0.1:...\n", background=True)
    environment = {**shop.environment, "WANE_PORT": port}
    run([serving, *parse(README, "shop")], ROOT, environment, lambda text: text.replace("8000", port))


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says_while_a_replica_is_killed(shop: Trained) -> None:
    """The tutorial trains with the README's commands, which the fixture has run. Then its blocks are run in order: its
    shell commands, and its Python code, whose output is the block of text after it."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    ports = {old: str(free_port()) for old in ("8000", "8001", "8002")}
    for old, port in ports.items():
        text = text.replace(old, port)
    done = scripts(README)[0][:-1]
    names: dict[str, object] = {"__name__": "tutorial"}
    printed, compared = "", 0
    try:
        for block in FENCE.finditer(text):
            line, kind, body = text.count("\n", 0, block.start()) + 1, block["info"], block["body"]
            if kind == "bash":
                for command in body.replace("\\\n", " ").splitlines():
                    if command in done:
                        done.remove(command)
                    else:
                        shop.bash(command)
                if "clickstream.py" in body:
                    printed = shop.bash("head -n 2 runs/shop/clicks.csv")
            elif kind == "python":
                output = StringIO()
                with redirect_stdout(output):
                    exec(compile(body.replace("wane_client", "wane.client"), "tutorial", "exec"), names)
                printed = output.getvalue()
            else:
                assert kind == "text"
                compare(Command(line, "the block before this one", body), printed)
                compared += 1
    finally:
        for file in shop.folder.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
    assert not done, "the tutorial leaves out a command of the README"
    assert compared == 5


def recall(row: str, printed: str) -> float:
    """Returns recall@20 of one row of the printed tables."""
    found = re.search(rf"^{row} +([\d.]+) ±", printed[printed.index("k = 20") :], re.MULTILINE)
    assert found is not None, f"the output has no row {row}"
    return float(found[1])
