from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.sessions.stores.redis_server import RedisServer, redis_server
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.redis import RedisStore
from wane.service.settings import Settings

MakeStore = Callable[..., Awaitable[RedisStore]]


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server that the tests share, except the tests that stop or fill their server. Every test uses its own
    namespace."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server for one test."""
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def make_store(request: pytest.FixtureRequest) -> AsyncIterator[MakeStore]:
    """A function that opens a store at an address. `changes` are settings. The fixture closes the stores after the
    test."""
    stores: list[RedisStore] = []
    usual: dict[str, Any] = {"session_ttl_s": 100.0, "session_budget_bytes": 2**20, "store_timeout_ms": 5000}
    usual |= {"store_namespace": f"t{id(request.node)}"}

    async def make(
        url: str,
        session_history_tokens: int = 4,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        **changes: Any,
    ) -> RedisStore:
        settings = Settings(store=url, **{**usual, **changes})
        stores.append(RedisStore(settings, session_history_tokens, metrics or Metrics(), clock))
        await stores[-1].open()
        return stores[-1]

    yield make
    for store in stores:
        await store.close()
