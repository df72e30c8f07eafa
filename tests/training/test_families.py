"""Tests the experiments of training/experiments/families: one network of each family of the sources, of equal size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from tests.training.corpora import experiment
from wane.models.weights import weight_shapes
from wane.training.config import Experiment, ModelConfig
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


GATED = {"kind": "gated", "units": 8}


def test_contraction_is_the_cap_of_the_gates_of_each_recurrent_layer() -> None:
    convolution = {"kind": "convolution", "units": 8, "kernel_size": 2}
    model = ModelConfig.model_validate({"layers": [convolution, GATED, GATED], "contraction": [0.5, 0.75]})
    assert [layer.cap for layer in model.architecture(9).layers] == [1, 0.5, 0.75]
    assert model.architecture(9).embedding == 8


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "the layers are missing"),
        ({"cell": "gated"}, "the layers are missing"),
        ({"cell": "convolution", "hidden": 8}, "needs its own table"),
        ({"layers": [GATED], "hidden": 8}, "hidden is a key of each layer"),
        ({"layers": [GATED], "units": 8}, "units is a key of each layer"),
        ({"layers": [GATED | {"gate_cap": 0.5}], "contraction": 0.9}, "give either"),
        ({"layers": [GATED, GATED], "contraction": [0.9]}, "1 numbers, but the network has 2 recurrent layers"),
        ({"layers": [{"kind": "tape", "units": 8}]}, "tape"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_layers_that_do_not_fit_together_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(keys)
