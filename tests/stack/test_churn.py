"""Runs `benchmarks.soak` for half a minute. During this time, clients create, use and delete sessions, sessions expire,
and hostile clients attack the server.

`python -m benchmarks.soak --minutes 10 --hostile` runs for ten minutes. Only the long run can show whether memory stays
constant.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import run
from benchmarks.soak.attacks import ATTACKS
from tests.stack.conftest import Figures

pytestmark = [pytest.mark.stack, pytest.mark.slow]

MINUTES = 0.5
MEASURED_S = 3.0
SHARE = 0.4
GROWTH = 1.1  # resident memory may grow by this factor, because it is not yet constant after half a minute


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_check_of_the_soak_fails_during_attacks(tmp_path: Path, figures: Figures, workers: int) -> None:
    log = tmp_path / "log"
    result = await asyncio.to_thread(run, MINUTES, SHARE, log, hostile=True, measured_s=MEASURED_S, workers=workers)
    memory = result["resident_mib"]
    figures(actions=result["actions"], states=result["states"], hostile=result["hostile"], resident_mib=memory)
    assert result["wrong"] == []
    assert result["failed"] == []
    assert result["counted_differently"] == []
    assert set(result["hostile"]) == {attack.__name__ for attack in ATTACKS}
    assert memory["end"] <= GROWTH * memory["settled"]
    assert "Traceback" not in log.read_text()
