from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.service.engine.fakes import Bench


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Bench]]:
    """Makes benches, and ends them: by then no slot may be in use but by a resident state."""
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.runner.gate.set()
        bench.shadow_runner.gate.set()
        await bench.engine.drain()
        await bench.engine.close()
        bench.engine._slab.check_integrity(idle=True)


@pytest.fixture
async def travel(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the event loop's clock forward by so many seconds, at once."""
    loop = asyncio.get_running_loop()
    real, moved_s = loop.time, [0.0]

    def forward(seconds: float) -> None:
        moved_s[0] += seconds

    monkeypatch.setattr(loop, "time", lambda: real() + moved_s[0])
    return forward


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A bench with the usual settings."""
    return make_bench()
