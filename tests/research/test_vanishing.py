"""Tests the attack on the rounding of residual gated networks: it finds a bound that lacks one of its terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from research.vanishing import BELOW, TOKENS, attacked, examine
from wane.models.certificate.admissible import ComputedRows
from wane.models.manifest import Readout

ABOVE_SEED, BELOW_SEED = 2, 58
"""Seeds of models that are false without the term that the test removes."""

FRONT_SEED = 17
"""The seed of a model with a convolution block."""


@pytest.mark.parametrize("seed", [ABOVE_SEED, BELOW_SEED, FRONT_SEED])
def test_no_pair_is_above_its_bound(seed: int) -> None:
    found = examine(seed)
    assert found["pairs"] == TOKENS**3
    assert found["above"] == 0


def test_the_attack_finds_a_bound_that_does_not_read_the_answers_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    between = Readout.between_all

    def of_usual_norms(self: Readout, norms: Any, joints: float = 0.0) -> Any:
        return between(self, np.concatenate([norms[:, :1], np.minimum(norms[:, 1:], 1)], axis=1), joints)

    monkeypatch.setattr(Readout, "between_all", of_usual_norms)
    assert examine(ABOVE_SEED)["above"] > 0


def test_the_attack_finds_a_bound_of_exact_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = ComputedRows._wider
    monkeypatch.setattr(ComputedRows, "_wider", lambda *arguments: 0 * wider(*arguments))
    _, weights = attacked(BELOW_SEED)
    assert np.ptp(weights["embedding.weight"][BELOW]) < 1e-5 * weights["embedding.weight"][BELOW].max()
    assert examine(BELOW_SEED)["above"] > 0
