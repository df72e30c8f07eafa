"""Replays test sessions through a server, and compares its answers with the evaluation from files."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.service.live_server import live_server
from tests.training.test_layouts import put
from wane.models.vocabulary import Vocabulary
from wane.training.cli import main
from wane.training.config import DataConfig
from wane.training.errors import RunError
from wane.training.rankings.metrics import LISTED
from wane.training.rankings.replay import ELSEWHERE, replay

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

UNKNOWN = """unknown = "token"
vocabulary_size = 36
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
        text = text.replace('layout = "leave_one_out"', 'time_unit = "s"\ntest_share = 0.4\n' + UNKNOWN)
    (folder / "replayed.toml").write_text(text)
    run, bundles = folder / "run", folder / "bundles"
    assert main(["train", str(folder / "replayed.toml"), "--data", str(path), "--run", str(run)]) == 0
    assert main(["export", str(run), "--data", str(path), "--bundles", str(bundles)]) == 0
    return run, bundles


def with_reversed_vocabulary(run: Path) -> Path:
    """Returns a copy of a run whose events have their ids in the reversed order."""
    other = Path(shutil.copytree(run, run.with_name("other")))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    names = [name for name in ids if not name.startswith("<")]
    ids.update(dict(zip(names, reversed([ids[name] for name in names]), strict=True)))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    return other


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
        other_than = [*command, "--model", "replayed", "--protocol", "next_other"]
        assert main(other_than) == (2 if layout else 0)
        assert ("protocol cannot be next_other" in capsys.readouterr().err) == layout
        if not layout:  # no event of this data follows itself, so an event more is within each list
            without = json.loads((run / "served.json").read_text())["test"]
            assert without["protocol"] == "next_other"
            assert without["methods"]["served"] == without["methods"]["recurrent"]
            assert without["methods"]["served"]["mrr"]["20"] > saved["methods"]["recurrent"]["mrr"]["20"]
            assert main([*command, "--model", "replayed"]) == 0
            capsys.readouterr()
        assert main([*command, "--model", "other"]) == 2
        assert f"--server {server.url}" in capsys.readouterr().err
        other = with_reversed_vocabulary(run)
        assert main([command[0], str(other), *command[2:], "--model", "replayed"]) == 0
    found = json.loads((run / "served.json").read_text())["test"]
    assert found["protocol"] == ("leave_one_out" if layout else "next")
    assert found["positions"] == saved["positions"] > 20
    assert found["methods"]["served"] == found["methods"]["recurrent"] == saved["methods"]["recurrent"]
    assert found["methods"]["served"]["recall"]["20"] > 0
    reordered = json.loads((other / "served.json").read_text())["test"]["methods"]["served"]
    assert reordered == found["methods"]["served"]  # whatever the ids are
    lists = found["positions"]
    assert f"{lists:,} of {lists:,} lists of 20 events are those of the run" in printed
    assert re.search(r"steps a second; latency p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms", printed)
    assert main(["evaluate", str(run), "--data", data, "--server", "http://127.0.0.1:1"]) == 2


@pytest.mark.parametrize(("unknown", "lacked"), [("skip", ()), ("token", ("<unk>",)), ("token", ("7",))])
def test_an_event_that_only_one_of_the_vocabularies_has(
    monkeypatch: pytest.MonkeyPatch, unknown: Literal["skip", "token"], lacked: tuple[str, ...]
) -> None:
    """The run lacks "new", which keeps its place in the list; the server lacks 7, which ends the replay by name."""
    names = ["<eos>", "<unk>", "7", "8"]
    model = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    asked: list[dict[str, Any]] = []

    def append(events: list[str], **options: Any) -> SimpleNamespace:
        asked.append({"events": events, **options})
        listed = [SimpleNamespace(token=name, token_id=2) for name in ("8", "new", "7")]
        return SimpleNamespace(predictions=listed, model="m", model_version="1", unknown=lacked)

    def session(**options: Any) -> nullcontext[SimpleNamespace]:
        assert options["unknown"] == ("refuse" if unknown == "skip" else "token")
        return nullcontext(SimpleNamespace(append=append))

    monkeypatch.setattr("wane.training.rankings.replay.Wane", lambda url: nullcontext(SimpleNamespace(session=session)))
    judge: Any = SimpleNamespace(
        count=1,
        left_out=slice(None),
        sessions_to_replay=lambda: [(np.array([2, 1, 2]), {3: 0})],
        of_lists=lambda lists: lists,
    )
    data, vocabulary = DataConfig(kind="events", unknown=unknown), Vocabulary("events", str(model.to_str()))
    if lacked == ("7",):
        with pytest.raises(RunError, match="the vocabulary of m lacks the event '7'"):
            replay(judge, vocabulary, data, "http://a", None, lambda steps: None)
        return
    found: Any = replay(judge, vocabulary, data, "http://a", None, lambda steps: None).judged
    assert found[0].tolist() == [3, ELSEWHERE, 2, *[-1] * (LISTED - 3)]
    assert [one["events"] for one in asked] == [["7"], ["<unk>"], ["7"]]
    assert [one.get("exclude") for one in asked] == [None, None, ["7"]]
