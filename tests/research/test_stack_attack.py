"""Tests the attack on stacks of all kinds of layers: it finds a bound that lacks one of its terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from research.stack_attack import RUNS, examine, random_stack
from wane.models.certificate.cells import attention, convolution
from wane.models.certificate.cells.gated import GatedLayer
from wane.models.certificate.cells.lru import LruLayer

SEEDS = {"attention": 9, "convolution": 32, "lru": 18, "leaky": 4}
"""Seeds of models that are false without the term that the test removes, by the kind of layer."""


@pytest.mark.parametrize("kind", SEEDS)
def test_no_pair_is_above_its_bound(kind: str) -> None:
    assert kind in [layer.kind for layer in random_stack(SEEDS[kind])[0].layers]
    found = examine(SEEDS[kind])
    assert found["pairs"] >= 8 * 4 * RUNS
    assert found["above"] == 0


@pytest.mark.parametrize(("kind", "module"), [("attention", attention), ("convolution", convolution)])
def test_the_attack_finds_a_bound_without_the_weights_of_a_finite_layer(
    kind: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_bias_alone(cell: Any, inputs: Any) -> Any:
        bias = np.abs(cell.tensors["bias"])
        return bias[-cell.layer.units :] if module is attention else bias[: cell.layer.units]

    monkeypatch.setattr(module, "furthest", of_bias_alone)
    assert examine(SEEDS[kind])["above"] > 0


@pytest.mark.parametrize(("kind", "proofs"), [("lru", LruLayer), ("leaky", GatedLayer)])
def test_the_attack_finds_a_bound_without_what_comes_from_the_layer_below(
    kind: str, proofs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = proofs.step
    monkeypatch.setattr(proofs, "step", lambda self, errors, fed: step(self, errors, None))
    assert examine(SEEDS[kind])["above"] > 0
