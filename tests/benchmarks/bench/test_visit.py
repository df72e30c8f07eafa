"""Tests a visit, which measures one contender with one model in one round, with real servers and services."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest

from benchmarks.bench import wrk
from benchmarks.bench.baseline import Baseline
from benchmarks.bench.contenders import ROOT, contenders
from benchmarks.bench.open_loop import summary
from benchmarks.bench.results import Timed
from benchmarks.bench.visit import visit
from benchmarks.bench.wrk import Requests

pytestmark = pytest.mark.stack

REQUESTS = 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces wrk with a function that sends a few requests. Returns the list of the servers to which requests were
    sent, in order."""
    urls: list[str] = []

    def drive(url: str, requests: Requests, connections: int, seconds: float) -> Timed:
        urls.append(url)
        with httpx.Client(base_url=url, trust_env=False) as client:
            for path, body in itertools.islice(requests, REQUESTS):
                client.post(path, content=body, headers={"content-type": "application/json"}).raise_for_status()
        return summary([0.001] * REQUESTS, 1.0)

    monkeypatch.setattr(wrk, "drive", drive)
    return urls


@pytest.mark.parametrize("name", ["wane-redis", "wane-traced"])
def test_a_server_and_its_baseline_alternate_and_have_their_own_services(
    name: str, asked: list[str], tmp_path: Path
) -> None:
    ours = contenders()[name]
    theirs = Baseline(ROOT, "wane").of(ours)
    visits = visit([ours, theirs], ROOT / "models" / "bundles" / "rnn-stable", 1, 1.0, tmp_path)
    assert [found.contender for found in visits] == [ours.name, theirs.name]
    for found in visits:
        assert (found.model, found.round, list(found.loads)) == ("rnn-stable", 1, ["session-64"])
        assert found.loads["session-64"].items == REQUESTS
        assert found.loads["session-64"].server_cpu_s is not None
    warmed, measured, other_warmed, other_measured = asked
    assert warmed == measured != other_warmed == other_measured
