"""Tests `benchmarks.start` with the smallest shipped model."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from itertools import pairwise

import pytest

from benchmarks import start
from benchmarks.start import BUNDLES, FIGURES, ROOT, Client, Subject, measure


def test_a_start_is_measured_from_the_new_process_to_its_answers_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SETTLED_S", 0.0)
    monkeypatch.setattr(start, "CONNECTIONS", 2)
    found = measure(Subject("wane", [sys.executable, "-m", "wane", "serve"], ROOT), BUNDLES / "rnn-stable", 0.5)
    assert found.keys() == FIGURES.keys()
    in_order = ("idle_anonymous_mib", "idle_mib")
    assert all(0 < found[less] < found[more] for less, more in [*pairwise(in_order), ("first_s", "ready_s")])
    assert found["load_mib"] > found["load_anonymous_mib"] > 0
    assert found["answers"] > 0


def test_a_server_that_exits_before_it_answers_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="does not answer POST /v1/predict"):
        measure(Subject("none", [sys.executable, "-c", ""], ROOT), BUNDLES / "rnn-stable", 0.0)


def test_the_status_is_zero_if_no_server_answers() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with closing(Client(bound.getsockname()[1])) as client:
            assert client.ask("GET", "/readyz") == (0, {})
