"""Tests of a run of the benchmark: the order of its visits, its stored results, and its resumption. A visit measures
one contender with one model in one round, in its own process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.bench import run as run_module
from benchmarks.bench.baseline import Baseline
from benchmarks.bench.contenders import SHIPPED
from benchmarks.bench.run import Run, visit_path
from benchmarks.bench.subjects import facts

# A program that runs instead of the command of a visit. The program writes a visit without figures to the results. For
# the contender `fails`, it exits with the status 1 instead.
AROUND = """
import sys
from pathlib import Path
name, model, round_, folder = sys.argv[-4:]
with Path("{told}").open("a") as told:
    told.write(f"{{model}} {{name}} {{round_}}\\n")
if name == "{fails}":
    sys.exit(1)
visit = '{{"model":"%s","contender":"%s","round":%s,"version":"1","loads":{{}}}}'
for one in (name, "baseline") if "--baseline" in sys.argv and name == "wane" else (name,):
    Path(folder, f"{{model}}-{{one}}-{{round_}}.json").write_text(visit % (model, one, round_))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of two rounds of three contenders with one model, in a temporary folder."""
    monkeypatch.setattr(Run, "folder", lambda _: tmp_path)
    monkeypatch.setattr(run_module, "ROOT", tmp_path)
    return Run(["wane", "mosec", "fastapi"], ["lstm256"], rounds=2, seconds=1)


def go(run: Run, folder: Path, fails: str = "") -> tuple[list[str], list[str]]:
    """Executes the run once more. Returns the names of the failed visits, and a line for each executed visit."""
    told = folder / "told"
    told.write_text("")
    program = AROUND.format(told=told, fails=fails)
    failed = run.go([sys.executable, "-c", program], Console(quiet=True))
    return failed, told.read_text().splitlines()


def test_every_round_has_all_contenders_and_models_in_a_different_order() -> None:
    plan = Run(["a", "b", "c"], ["m", "n"], rounds=3, seconds=1).plan()
    assert len(plan) == len(set(plan)) == 18
    orders = [[name for round_, model, name in plan if (round_, model) == (number, "n")] for number in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_a_run_resumes_and_retries_failed_visits(run: Run, tmp_path: Path) -> None:
    failed, visited = go(run, tmp_path, fails="mosec")
    assert failed == ["lstm256-mosec-0", "lstm256-mosec-1"]
    assert len(visited) == 6
    assert len(run.visits()) == 4
    assert go(run, tmp_path) == ([], ["lstm256 mosec 0", "lstm256 mosec 1"])
    assert go(run, tmp_path) == ([], [])
    assert [(visit.round, visit.contender) for visit in run.visits()] == [
        (0, "wane"),
        (0, "mosec"),
        (0, "fastapi"),
        (1, "mosec"),
        (1, "fastapi"),
        (1, "wane"),
    ]


def test_a_visit_of_wane_without_its_baseline_is_repeated(run: Run, tmp_path: Path) -> None:
    beside = replace(run, names=["wane", "fastapi"], rounds=1, baseline=Baseline(tmp_path, "wane"))
    assert [one.name for one in beside.together("wane-redis")] == ["wane-redis", "baseline-redis"]
    for _ in range(2):
        assert go(beside, tmp_path) == ([], ["lstm256 wane 0", "lstm256 fastapi 0"])
        assert [visit.contender for visit in beside.visits()] == ["wane", "baseline", "fastapi"]
        for name in ("baseline", "fastapi"):
            visit_path(tmp_path, 0, "lstm256", name).unlink()


def test_a_run_with_another_baseline_has_another_folder(tmp_path: Path) -> None:
    """The name of the folder of the results depends on the code of the baseline, and not on the baseline's path."""
    folders = []
    for name, text in (("one", ""), ("two", ""), ("three", "changed = True")):
        (tmp_path / name / "service").mkdir(parents=True)
        (tmp_path / name / "service" / "engine.py").write_text(text)
        folders.append(Run(["wane"], [], 1, 1, baseline=Baseline(tmp_path / name, "wane")).folder())
    alone = Run(["wane"], [], 1, 1).folder()
    assert folders[0] == folders[1] != folders[2]
    assert alone not in folders


def test_the_shipped_model_is_described_by_its_layers() -> None:
    described = facts(SHIPPED)
    assert described["about"] == "2 x convolution of 256, 1 x gated of 576, vocabulary 2,048"
    assert len(described["weights"]) == 64
