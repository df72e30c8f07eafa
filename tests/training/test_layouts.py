"""Trains on a small file of each published layout of session data, with the lines that docs/event_training.md has for
it. The files are generated with the layout's columns, and with other values."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from wane.training.cli import main
from wane.training.config import Experiment
from wane.training.data import Corpus, load_corpus

PAGE = Path(__file__).parents[2] / "docs" / "event_training.md"
BLOCK = re.compile(r"```toml\n# (\w+)[^\n]*\n(.*?)```", re.DOTALL)
LINES = {match[1]: match[2] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}

EXPERIMENT = """
name = "layout"
[model]
cell = "gru"
hidden = 4
[data]
kind = "events"
valid_share = 0.25
test_share = 0.25
[training]
steps = 1
batch = 2
chunk = 8
warmup = 1
evaluate_every = 1
checkpoint_every = 1
threads = 1
device = "cpu"
"""

SESSIONS = [["2097", "2098", "2099", "2097"], ["2098", "2099"], ["2099", "2097", "2098"], ["2097", "2099"]]
START_S = 1_400_000_000
"""The time of the first event. Sessions are a day apart, and their events half a minute."""

Click = tuple[int, str, float]


def clicks() -> list[Click]:
    """Returns the session, the item and the time of each event. The events of a session are in reversed order."""
    timed = [(at, list(enumerate(session))) for at, session in enumerate(SESSIONS)]
    return [(at, item, START_S + 86_400 * at + 30 * place) for at, events in timed for place, item in reversed(events)]


def iso(time: float, end: str) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%S") + end


def yoochoose(folder: Path) -> Path:
    rows = [f"{session + 1},{iso(time, '.277Z')},{item},0" for session, item, time in clicks()]
    return put(folder / "yoochoose-clicks.dat", rows)


def diginetica(folder: Path) -> Path:
    rows = ["sessionId;userId;itemId;timeframe;eventdate"]
    for session, item, time in clicks():
        elapsed = round(1000 * (time - START_S - 86_400 * session)) + 526_309
        rows.append(f"{session + 1};NA;{item};{elapsed};{iso(time, '')[:10]}")
    return put(folder / "train-item-views.csv", rows)


def retailrocket(folder: Path) -> Path:
    rows = [f"{1000 * time + 827:.0f},257597,view,{item}," for _, item, time in clicks()]
    return put(folder / "events.csv", ["timestamp,visitorid,event,itemid,transactionid", *rows])


def rees46(folder: Path) -> Path:
    rows = ["event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session"]
    for session, item, time in clicks():
        rows.append(f"{iso(time, ' UTC').replace('T', ' ', 1)},view,{item},2053013552326770905,,,33.20,5,b-{session}")
    rows.append("2019-10-01 00:00:00 UTC,view,3900821,2053013552326770905,,aqua,33.20,554748717,")
    path = folder / "2019-Oct.csv.gz"
    path.write_bytes(gzip.compress("".join(f"{row}\n" for row in rows).encode()))
    return path


def otto(folder: Path) -> Path:
    rows = []
    for session in range(len(SESSIONS)):
        own = [(item, time) for at, item, time in clicks() if at == session]
        events = [{"aid": int(item), "ts": 1000 * time, "type": "clicks"} for item, time in own]
        rows.append(json.dumps({"session": session, "events": events}))
    return put(folder / "otto-recsys-train.jsonl", rows)


def recbole(folder: Path) -> Path:
    rows = [f"7\t{item}\t{time}" for _, item, time in clicks()]
    return put(folder / "shop.inter", ["user_id:token\titem_id:token\ttimestamp:float", *rows])


def gru4rec(folder: Path) -> Path:
    rows = [f"{session}\t{item}\t{time:.3f}" for session, item, time in clicks()]
    return put(folder / "train_full.txt", ["SessionId\tItemId\tTime", *rows])


def put(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "YOOCHOOSE": yoochoose,
    "Diginetica": diginetica,
    "RetailRocket": retailrocket,
    "REES46": rees46,
    "OTTO": otto,
    "RecBole": recbole,
    "GRU4Rec": gru4rec,
}


def decoded(corpus: Corpus) -> list[list[str]]:
    """Returns the events of all sessions of a corpus, in the order of the splits."""
    texts = [corpus.vocabulary.token(token) for split in ("train", "valid", "test") for token in corpus.streams[split]]
    return [part.split() for part in " ".join(texts).split("<eos>") if part.strip()]


def test_the_page_has_the_lines_of_every_layout() -> None:
    assert set(LINES) == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = LAYOUTS[name](tmp_path)
    given = tomllib.loads(LINES[name])["data"]
    columns = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.pop("columns").items())
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    text = EXPERIMENT.replace('kind = "events"', f'kind = "events"\n{keys}') + f"[data.columns]\n{columns}\n"
    experiment = tmp_path / "layout.toml"
    experiment.write_text(text, encoding="utf-8")
    assert main(["train", str(experiment), "--data", str(path), "--run", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "read 11 events of 4 sessions from" in printed
    if name == "REES46":
        assert "2019-Oct.csv.gz: left out 1 of 13 lines: line 13: the value of 'user_session' is empty" in printed
    found = load_corpus(Experiment.read(experiment).data.model_copy(update={"path": path}))
    assert decoded(found) == SESSIONS


def test_the_message_about_other_data_names_the_file_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "layout.toml"
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    for name, item in (("monday", "a"), ("tuesday", "a"), ("other", "b")):
        rows = [f"s{at // 3},{START_S + at + len(name)},{item}{at % 3}" for at in range(24)]
        put(tmp_path / f"{name}.csv", ["session,time,item", *rows])
    command = ["train", str(experiment), "--run", str(tmp_path / "run"), "--data"]
    assert main([*command, str(tmp_path / "monday.csv")]) == 0
    for name in ("tuesday", "other"):  # the vocabulary of the run has no event of other.csv
        capsys.readouterr()
        assert main([*command, str(tmp_path / f"{name}.csv")]) == 2
        told = f"other data: {name}.csv is not the file on which the run was trained (monday.csv)"
        assert told in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "other.csv")]) == 2
    assert told in capsys.readouterr().err
    put(tmp_path / "monday.csv", ["session,time,item", *rows])
    assert main([*command, str(tmp_path / "monday.csv")]) == 2
    assert (
        "monday.csv is not the file on which the run was trained (its content has changed)" in capsys.readouterr().err
    )
