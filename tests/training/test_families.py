"""Tests the experiments of training/experiments/families: one network of each family of the sources, of equal size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from tests.training.corpora import experiment
from wane.models.weights import weight_shapes
from wane.training.config import Experiment
from wane.training.run import train

FAMILIES = sorted((Path(__file__).parents[2] / "training" / "experiments" / "families").glob("*.toml"))


def test_the_families_are_of_equal_size_and_budget() -> None:
    read = {path.stem: Experiment.read(path) for path in FAMILIES}
    assert len(read) == 13
    for name, family in read.items():
        architecture = family.model.architecture(2048)
        assert 1_300_000 <= sum(map(math.prod, weight_shapes(architecture).values())) <= 1_500_000, name
        assert family.name == name
        assert family.training.steps == 3000
        assert 2040 <= family.training.batch * family.training.chunk <= 2060, name


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_a_family_is_trained(path: Path, tmp_path: Path) -> None:
    small = experiment(Experiment.read(path).model, steps=2, batch=2, evaluate_every=2)
    train(small, None, tmp_path / "run", None, "none", Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses and all(math.isfinite(loss) for loss in losses)
