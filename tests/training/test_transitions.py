"""Compares the mixture with transition tables with a simple implementation of its definition."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.test_layouts import put
from tests.training.test_ranking import QUERIES, SIZE, train
from wane.models.bundle import Bundle, BundleError
from wane.models.networks import Network
from wane.models.transitions import LENGTHS, PARTS
from wane.training.cli import main
from wane.training.config import DataConfig, ModelConfig
from wane.training.data import load_corpus
from wane.training.evaluate_events import fit_transitions
from wane.training.rankings.transitions import Counts, fit, lengths_of, mixed, recent_of
from wane.training.run_folder import RunFolder


def shares(lists: list[list[int]], query: list[int], part: str, backwards: float = 1) -> list[float]:
    """Returns the distribution of one part after `query`, as the module's docstring defines it. backwards: what an
    event before another counts."""
    after: dict[tuple[int, int], float] = defaultdict(float)
    near: dict[tuple[int, int], float] = defaultdict(float)
    for events in lists:
        for at, event in enumerate(events):
            for other in range(len(events)):
                if 0 < abs(other - at) <= 10:
                    near[event, events[other]] += (1 if other > at else backwards) / abs(other - at)
            if at:
                after[events[at - 1], event] += 1

    def share(table: dict[tuple[int, int], float], event: int, other: int) -> float:
        return table[event, other]

    if part == "next":
        found = [share(after, query[-1], event) for event in range(SIZE)]
    elif part == "near":
        found = [share(near, query[-1], event) for event in range(SIZE)]
    elif part == "before":
        earlier = query[-2:-10:-1]
        found = [sum(share(near, one, event) / lag for lag, one in enumerate(earlier, 1)) for event in range(SIZE)]
    else:
        ages = list(enumerate(reversed(query), start=1))
        found = [sum(1 / age for age, one in ages if one == event) for event in range(SIZE)]
    total = sum(found)
    return [value / total for value in found] if total else found


@pytest.mark.parametrize(("part", "backwards"), [*((part, 1.0) for part in PARTS[1:]), ("near", 0.2), ("before", 0.2)])
def test_each_part_equals_its_definition(part: str, backwards: float) -> None:
    sessions, lists = train()
    one = tuple(float(name == part) for name in PARTS)
    tables = Counts(sessions, SIZE, backwards).weighted((one,) * LENGTHS)  # type: ignore[arg-type]
    recent = recent_of([np.array(query) for query in QUERIES], SIZE)
    more = tables.added(*recent)
    found = np.zeros((len(QUERIES), SIZE))
    np.add.at(found, (more.row, more.event), more.probability)
    for row, query in enumerate(QUERIES):
        expected = shares(lists, query, part, backwards)
        assert found[row].tolist() == pytest.approx(expected, abs=1e-7)
        assert more.model[row] == (0 if any(expected) else 1)
        every = np.arange(SIZE)
        events, known = (np.repeat(values[row : row + 1], SIZE, 0) for values in recent)
        assert tables.parts_of(events, known, every)[1].tolist() == pytest.approx(expected, abs=1e-7)


def test_the_mixture_is_a_distribution_and_a_part_without_counts_leaves_its_weight_to_the_model() -> None:
    sessions, lists = train()
    weights, queries = ((0.4, 0.1, 0.2, 0.1, 0.2),) * LENGTHS, [np.array(query) for query in QUERIES]
    tables = Counts(sessions, SIZE).weighted(weights)
    model = np.log(np.random.default_rng(1).dirichlet(np.ones(SIZE), len(QUERIES)))
    found = np.exp(mixed(tables, queries, model))
    assert found.sum(1) == pytest.approx(np.ones(len(QUERIES)))
    for row, query in enumerate(QUERIES):
        parts = [shares(lists, query, part) for part in PARTS[1:]]
        left = 0.4 + sum(weight for weight, own in zip(weights[0][1:], parts, strict=True) if not any(own))
        expected = left * np.exp(model[row]) + weights[0][1:] @ np.array(parts)
        assert found[row].tolist() == pytest.approx(expected.tolist(), abs=1e-7)
    assert lengths_of(queries).tolist() == [0, 1, 0, 3, 3]


def test_the_fit_finds_the_weights_that_made_the_positions() -> None:
    random, made = np.random.default_rng(2), np.array([0.5, 0.1, 0.2, 0.15, 0.05])
    chosen = random.choice(len(PARTS), 4000, p=made)
    parts = np.where(np.arange(len(PARTS)) == chosen[:, None], 0.5, 1e-6)
    weights, loss = fit(parts, np.zeros(4000, np.int64))
    assert weights[0] == pytest.approx(made, abs=0.03)
    assert loss == pytest.approx(-np.log(parts @ np.array(weights[0])).mean())
    found, larger = fit(parts, np.zeros(4000, np.int64), ("model", "own"))
    assert larger > loss
    some = np.array(found)
    assert some[0, 1:4].tolist() == [0, 0, 0]
    assert some[0].sum() == pytest.approx(1)


@pytest.mark.parametrize(("has_order", "backwards"), [(True, 0.2), (False, 1.0)])
def test_the_fit_finds_whether_the_data_has_a_direction(tmp_path: Path, has_order: bool, backwards: float) -> None:
    """Each user reads seven items of a circle of 100 in their order, or seven of a group of 20 in any order."""
    torch.manual_seed(0)
    random, lines = np.random.default_rng(1), []
    for _ in range(150):
        if has_order:
            items = np.cumsum(random.integers(1, 12, 7)) + random.integers(0, 100)
        else:
            items = 20 * random.integers(0, 5) + random.permutation(20)[:7]
        *first, valid, test = (items % 100).tolist()
        lines.append(f"{' '.join(map(str, first))},{valid},{test}")
    path = put(tmp_path / "users.csv", lines)
    corpus = load_corpus(DataConfig(kind="events", path=path, layout="leave_one_out", start="zero"))
    network = Network(ModelConfig(cell="gru", hidden=2).architecture(corpus.vocabulary.size))
    assert fit_transitions(network, corpus, 300, None).backwards == backwards


EXPERIMENT = """
name = "small"
[model]
cell = "gru"
hidden = 4
[data]
kind = "events"
start = "zero"
time_unit = "s"
valid_share = 0.2
test_share = 0.2
[training]
steps = 2
batch = 8
chunk = 8
warmup = 1
evaluate_every = 2
checkpoint_every = 2
threads = 1
device = "cpu"
"""


def test_a_bundle_has_the_fitted_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(1)
    rows = [f"{at // 5},{at},{item}" for at, item in enumerate(random.integers(0, 30, 400))]
    data = put(tmp_path / "clicks.csv", ["session,time,item", *rows])
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    run, bundles = str(tmp_path / "run"), str(tmp_path / "bundles")
    given = ["--data", str(data)]
    export = ["export", run, *given, "--bundles", bundles]
    assert main(["train", str(tmp_path / "small.toml"), *given, "--run", run]) == 0
    assert main([*export, "--transitions"]) == 2
    assert "has no transitions.json: run `wane evaluate RUN --transitions`" in capsys.readouterr().err
    assert main(["evaluate", run, *given, "--transitions"]) == 0
    assert main(export) == 0  # without the tables, and with an evaluation without them
    plain = Bundle.read(tmp_path / "bundles" / "small").manifest
    assert main([*export, "--transitions", "--replace"]) == 0
    bundle = Bundle.read(tmp_path / "bundles" / "small")
    cache, tables = bundle.manifest.cache, bundle.transitions()
    assert plain.cache is None and cache is not None and cache.transitions is not None and tables is not None
    assert plain.quality is not None and bundle.manifest.quality is not None
    assert plain.quality.recurrent != bundle.manifest.quality.recurrent
    assert cache.transitions.weights == RunFolder(tmp_path / "run").transitions().with_model
    # A new version of the bundle keeps the tables. A damaged file is named.
    again = str(tmp_path / "again")
    assert main(["export", str(bundle.path), "--bundles", again]) == 0
    kept = Bundle.read(tmp_path / "again" / "small")
    assert kept.manifest.cache == cache
    assert (kept.path / "transitions.safetensors").read_bytes() == (
        bundle.path / "transitions.safetensors"
    ).read_bytes()
    (kept.path / "transitions.safetensors").write_bytes(b"nothing")
    with pytest.raises(BundleError, match=r"transitions\.safetensors: SHA-256 differs"):
        Bundle.read(kept.path)
    assert main(["export", str(bundle.path), "--bundles", again, "--transitions"]) == 2
    assert "is a bundle, whose tables are kept" in capsys.readouterr().err
