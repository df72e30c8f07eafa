"""Tests of the choice of the session store by the settings, and of the file with the store's password."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.sessions.stores.redis_server import RedisServer
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.factory import make_store
from wane.service.sessions.stores.redis import RedisStore
from wane.service.sessions.stores.store import StoreError
from wane.service.settings import Settings

PASSWORD = "a/b@c:d%"


@pytest.mark.stack
@pytest.mark.parametrize(
    "given, user, reached", [(f"{PASSWORD}\n", "", True), (PASSWORD, "default@", True), ("another", "", False)]
)
async def test_redis_gets_the_password_from_the_file(tmp_path: Path, given: str, user: str, reached: bool) -> None:
    file = tmp_path / "password"
    file.write_text(given)
    server = RedisServer(tmp_path, ("--requirepass", PASSWORD))
    server.start()
    try:
        settings = Settings(store=server.url.replace("//", f"//{user}"), store_password_file=file)
        store = make_store(settings, 8, Metrics())
        assert isinstance(store, RedisStore)
        await store.open()
        assert store.standing.reachable is reached
        await store.close()
    finally:
        server.kill()


def test_a_password_in_the_address_overrides_the_file(tmp_path: Path) -> None:
    settings = Settings(store="redis://:own@127.0.0.1:1/0", store_password_file=tmp_path / "none")
    assert isinstance(make_store(settings, 8, Metrics()), RedisStore)


def test_the_error_names_a_missing_password_file(tmp_path: Path) -> None:
    settings = Settings(store="redis://127.0.0.1:1/0", store_password_file=tmp_path / "none")
    with pytest.raises(StoreError, match=r"^store_password_file, .*none, cannot be read"):
        make_store(settings, 8, Metrics())
