from __future__ import annotations

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
        await bench.engine.drain()
        await bench.engine.close()
        slab = bench.engine._slab
        slab.check_integrity()
        assert slab.used_bytes == len(slab) * slab.slot_bytes, "a request kept its state"


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A bench with the usual settings."""
    return make_bench()
