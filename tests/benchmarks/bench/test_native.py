"""Tests that the graph with the native LSTM operator computes the same function as the bundle."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest


def test_the_operator_s_states_and_log_probabilities_match_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.bench import lstm256
    from benchmarks.bench.native import NativeLstm
    from wane.models.bundle import Bundle
    from wane.models.reference import Reference

    monkeypatch.setattr(lstm256, "SAMPLE_TOKENS", 64)
    lstm256.export(tmp_path)
    bundle = Bundle.read(tmp_path / lstm256.NAME)
    tokens = np.random.default_rng(1).integers(256, size=41)
    native = NativeLstm(tmp_path / lstm256.NAME, threads=1)
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    state, expected = reference.zero_state(1), []
    for token, target in itertools.pairwise(tokens):
        logits, _, state = reference.step(token[None], state)
        expected.append(logits[0, target] - np.log(np.exp(logits[0]).sum()))
    np.testing.assert_allclose(native.score(tokens[:-1], tokens[1:]), expected, atol=1e-5)
    for ours, theirs in zip(native.state(tokens[:-1]), state.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
