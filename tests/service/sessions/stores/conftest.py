from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.sessions.stores.redis_server import RedisServer, redis_server
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.redis import RedisStore

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


def settings_of(**changes: Any) -> dict[str, Any]:
    """Returns arguments for a `RedisStore`."""
    usual = {"namespace": "n", "session_history_tokens": 4, "ttl_s": 100.0, "budget_bytes": 2**20, "timeout_s": 5.0}
    return {**usual, "metrics": Metrics(), **changes}


@pytest.fixture
async def make_store(request: pytest.FixtureRequest) -> AsyncIterator[MakeStore]:
    """A function that opens a store at an address. The fixture closes the stores after the test."""
    stores: list[RedisStore] = []

    async def make(url: str, **changes: Any) -> RedisStore:
        stores.append(RedisStore(url, **settings_of(**{"namespace": f"t{id(request.node)}", **changes})))
        await stores[-1].open()
        return stores[-1]

    yield make
    for store in stores:
        await store.close()
