"""Tests the attack on stacks of all kinds of layers: it finds a bound that lacks one of its terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from research.stack_attack import RUNS, examine, random_stack
from wane.models.certificate.cells import attention, convolution
from wane.models.certificate.cells.gated import GatedLayer
from wane.models.certificate.cells.gru import GruLayer
from wane.models.certificate.cells.lru import LruLayer
from wane.models.certificate.cells.lstm import LstmLayer
from wane.models.certificate.recurrent import RecurrentLayer
from wane.models.layer_registry import KINDS, Kind

SEEDS: dict[Kind, int] = {
    "linear": 1,
    "rnn_tanh": 1,
    "rnn_relu": 1,
    "gru": 210,
    "lstm": 19,
    "gated": 7,
    "leaky": 1,
    "lru": 6,
    "convolution": 9,
    "attention": 7,
}
"""Seeds of stacks with a layer of each kind. Their bounds are false without the term that a test removes."""
PROOFS: dict[Kind, Any] = {
    "linear": RecurrentLayer,
    "rnn_tanh": RecurrentLayer,
    "rnn_relu": RecurrentLayer,
    "gru": GruLayer,
    "lstm": LstmLayer,
    "gated": GatedLayer,
    "leaky": GatedLayer,
    "lru": LruLayer,
}
"""The class with the proofs of each kind with fading memory."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_pair_is_above_its_bound(kind: Kind) -> None:
    assert kind in [layer.kind for layer in random_stack(SEEDS[kind], kind)[0].layers]
    found = examine(SEEDS[kind], kind)
    assert found["pairs"] >= 8 * 4 * RUNS
    assert found["above"] == 0


@pytest.mark.parametrize(("kind", "module"), [("attention", attention), ("convolution", convolution)])
def test_the_attack_finds_a_bound_without_the_weights_of_a_finite_layer(
    kind: Kind, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_bias_alone(cell: Any, inputs: Any) -> Any:
        bias = np.abs(cell.tensors["bias"])
        return bias[-cell.layer.units :] if module is attention else bias[: cell.layer.units]

    monkeypatch.setattr(module, "furthest", of_bias_alone)
    assert examine(SEEDS[kind], kind)["above"] > 0


@pytest.mark.parametrize("kind", PROOFS)
def test_the_attack_finds_a_bound_without_what_comes_from_the_layer_below(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = PROOFS[kind]
    step = proofs.step
    monkeypatch.setattr(proofs, "step", lambda self, errors, fed: step(self, errors, None))
    assert examine(SEEDS[kind], kind)["above"] > 0
