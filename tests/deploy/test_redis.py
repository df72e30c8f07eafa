"""Tests of the shipped configuration of Redis: its durability, and the permissions of Wane's user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError

from deploy.stack import secrets
from deploy.stack.local import ROOT
from tests.service.sessions.stores.redis_server import redis_server

STORES = ROOT / "service" / "sessions" / "stores"
PAGE = (ROOT / "docs" / "sessions.md").read_text(encoding="utf-8")
CONFIGURATION = dict(
    re.findall(r"^([a-z-]+) (.*)$", (ROOT / "deploy/redis/redis.conf").read_text(encoding="utf-8"), re.MULTILINE)
)


def test_redis_acknowledges_only_writes_that_are_on_its_disk_as_documented() -> None:
    assert CONFIGURATION["appendonly"] == "yes"
    assert CONFIGURATION["appendfsync"] == "always"
    assert "`appendonly yes`, `appendfsync always` (as in `deploy/redis/redis.conf`)" in PAGE


def test_wane_has_the_documented_permissions_that_it_uses_in_redis() -> None:
    listed = re.search(r"needs the commands (.*?); in a cluster", PAGE, re.DOTALL)
    assert listed is not None
    assert set(secrets.COMMANDS) == set(re.findall(r"\b[A-Z]{3,}\b", listed[1])) - {"API"}
    scripts = "".join(file.read_text(encoding="utf-8") for file in STORES.glob("*.lua"))
    sent = "".join((STORES / f"{name}.py").read_text(encoding="utf-8") for name in ("redis", "redis_pipeline"))
    used = {*re.findall(r"redis\.call\('([A-Z]+)'", scripts), *re.findall(r'(?:\(|return )"([A-Z]{3,})"[,)]', sent)}
    assert set(secrets.COMMANDS) == used


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a Redis server with the shipped users, and the folder with their passwords."""
    folder = tmp_path_factory.mktemp("redis")
    secrets.make(folder / "secrets")
    with redis_server(folder, ("--aclfile", str(folder / "secrets" / secrets.REDIS_ACL))) as server:
        yield server.port, folder / "secrets"


def client(shipped: tuple[int, Path], user: str | None = None, file: str = secrets.REDIS_PASSWORD) -> Redis:
    port, folder = shipped
    return Redis(port=port, username=user, password=(folder / file).read_text(encoding="utf-8").strip())


@pytest.mark.stack
@pytest.mark.parametrize(
    "command",
    [
        ("CONFIG", "GET", "maxmemory"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("PUBLISH", "wane:", "x"),
        ("GET", "other"),
        ("SET", "other", "1"),
        ("EVAL", "return redis.call('KEYS', '*')", "0"),
        ("EVAL", "return redis.call('GET', 'other')", "0"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", "other"),
    ],
    ids=" ".join,
)
def test_wane_has_no_undocumented_permissions_in_redis(shipped: tuple[int, Path], command: tuple[str, ...]) -> None:
    with client(shipped) as redis:
        redis.set("wane:default:{a}", "1")
        assert redis.ping() and redis.get("wane:default:{a}") == b"1"
        with pytest.raises(ResponseError, match=r"no permissions|can't (run|access)"):
            redis.execute_command(*command)


@pytest.mark.stack
def test_the_admin_of_redis_has_all_permissions_and_another_password(shipped: tuple[int, Path]) -> None:
    with client(shipped, "admin", secrets.ADMIN_PASSWORD) as redis:
        assert redis.config_get("maxmemory") and redis.acl_whoami() == "admin"
    with client(shipped, "admin") as redis, pytest.raises(AuthenticationError):
        redis.ping()
