"""Compares the baselines with the published recommendation lists of rn5l/session-rec and the published figures of
bolcom/serenade, and reads the published files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wane.models.networks import Network
from wane.training.config import DataConfig, ModelConfig
from wane.training.data import Corpus, load_corpus
from wane.training.evaluate_events import Judge, sessions_of
from wane.training.rankings.baselines import Vmis, baselines_of

DATA = Path(os.environ.get("WANE_DATA", "missing"))
pytestmark = [
    pytest.mark.skipif(
        not (DATA / "rsc15-100k").is_dir(),
        reason="set WANE_DATA to a folder with published data",
    ),
]

SESSIONS = 99
"""session-rec stores its lists for the first 387 positions of the test: those of the first 99 sessions of the file."""

PUBLISHED = {
    "V-SkNN": (0.610, 0.334),
    "sequential rules": (0.561, 0.328),
    "association rules": (0.592, 0.316),
}
"""Recall and MRR at 20, computed from the stored lists."""


def rsc15(folder: Path, **keys: object) -> Corpus:
    given = {
        "kind": "events",
        "path": folder,
        "columns": {"session": "SessionId", "time": "Time", "item": "ItemId"},
        "start": "zero",
        **dict.fromkeys(("train", "valid", "test"), "train.tsv"),
    }
    return load_corpus(DataConfig.model_validate(given | keys))


def judge_of(corpus: Corpus, split: str = "test") -> Judge:
    return Judge(Network(ModelConfig(cell="gru", hidden=2).architecture(corpus.vocabulary.size)), corpus, split)


def test_rules_and_neighbours_reach_the_published_numbers(tmp_path: Path) -> None:
    header, *rows = (DATA / "rsc15-100k" / "test.tsv").read_text().splitlines()
    first = list(dict.fromkeys(row.split("\t")[0] for row in rows))[:SESSIONS]
    chosen = [row for row in rows if row.split("\t")[0] in set(first)]
    (tmp_path / "first.tsv").write_text("\n".join([header, *chosen]) + "\n")
    (tmp_path / "train.tsv").symlink_to(DATA / "rsc15-100k" / "train.tsv")
    corpus = rsc15(tmp_path, test="first.tsv")
    judge = judge_of(corpus)
    baselines = baselines_of(sessions_of(corpus, "train"), corpus.vocabulary.size)
    methods = {name: judge.of_baseline(baselines[name]) for name in PUBLISHED}
    found = judge.rankings(methods, [])
    assert (found.positions, found.sessions) == (387, SESSIONS)
    for name, (recall, mrr) in PUBLISHED.items():
        assert found.methods[name].recall[20] == pytest.approx(recall, abs=0.025), name
        assert found.methods[name].mrr[20] == pytest.approx(mrr, abs=0.025), name


def test_vmis_reaches_the_published_numbers_of_serenade() -> None:
    """Serenade leaves the session's last event out of its lists, as the protocol `next_other` does."""
    splits = {split: f"{split}.txt" for split in ("train", "valid", "test")}
    corpus = rsc15(DATA / "serenade-example", protocol="next_other", **splits)
    train, size = sessions_of(corpus, "train"), corpus.vocabulary.size
    searched, usual = Vmis(train, size), Vmis(train, size, recent=500, neighbours=50, last=2)

    def reached(vmis: Vmis, split: str) -> tuple[float, float]:
        judge = judge_of(corpus, split)
        found = judge.rankings({"VMIS-kNN": judge.of_baseline(vmis)}, []).methods["VMIS-kNN"]
        return found.recall[20], found.mrr[20]

    assert judge_of(corpus).count == 931
    assert reached(usual, "test") == pytest.approx((0.6402, 0.3277), abs=0.01)
    assert reached(searched, "test")[1] == pytest.approx(0.3401, abs=0.01)
    assert reached(searched, "valid")[1] == pytest.approx(0.3197, abs=0.01)


@pytest.mark.parametrize(
    ("name", "users", "items", "tests"),
    [("ml-1m", 6_040, 3_416, 6_040), ("beauty", 52_204, 57_289, None), ("video", 31_013, 23_715, None)],
)
def test_lines_of_items_are_read_whole(name: str, users: int, items: int, tests: int | None) -> None:
    path = DATA / "leave-one-out" / f"{name}.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()]
    corpus = load_corpus(DataConfig(kind="events", path=path, layout="leave_one_out"))
    assert len(sessions_of(corpus, "train").begins) == len(lines) == users
    assert len({item for parts in lines for part in parts for item in part.split()}) == items
    given = sum(bool(test) for *_, test in lines)
    assert len(sessions_of(corpus, "test").begins) + corpus.missed["test"] == given == (tests or given)
    assert f"of {users:,} sessions, {sum(not valid for _, valid, _ in lines):,} have no validation item" in str(
        corpus.notes
    )
