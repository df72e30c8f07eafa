"""Tests that the debug log of the real server contains no key and no password."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.service.live_server import BUNDLE, TIMEOUT_S, environment, live_server, run
from tests.service.sessions.stores.redis_server import free_port
from wane.service.auth.keys import make_key

KEY = "hush-this-is-of-the-environment"
NO_LINE = "it must begin with NAME:sha256: and 64 hexadecimal digits in lower case"
PASSWORD = "hush-this-is-of-the-store"


def test_no_key_and_no_password_is_logged(tmp_path: Path) -> None:
    made, kept = make_key("bob", ["rate=1", "burst=2"])
    file = tmp_path / "keys"
    file.write_text(f"{kept.line()}\n")
    store = f"redis://user:{PASSWORD}@127.0.0.1:{free_port()}/0"
    settings = {
        "WANE_API_KEYS": f"alice:{KEY}",
        "WANE_API_KEYS_FILE": str(file),
        "WANE_STORE": store,
        "WANE_BUNDLES": BUNDLE,
    }
    with live_server("--log-level", "debug", **settings) as server:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            for key in (KEY, made, f"{KEY}x"):
                bearer = {"authorization": f"Bearer {key}"}
                for _ in range(3):
                    client.get("/v1/models", headers=bearer)
                client.get("/v1/models", params={"key": key}, headers=bearer)
                client.get("/", auth=("me", key))
                # This request fails, because the store is unreachable.
                client.post("/v1/sessions", json={"session": "demo"}, headers=bearer)
                client.post("/v1/predict", content=f'{{"{key}": '.encode(), headers=bearer)
        stream = f"ws{server.url.removeprefix('http')}/v1/sessions/demo/stream"
        for key in (KEY, f"{KEY}x"):
            offered = [Subprotocol("wane"), Subprotocol(f"bearer.{key}")]
            with connect(stream, subprotocols=offered) as socket, pytest.raises(ConnectionClosed):
                while True:
                    socket.recv()
        file.write_text(f"alice:{KEY}\n{made}\n")
        server.read_until(f"the keys stay as they are: {file}, line 1: {NO_LINE}")
        assert server.stop() == 0
        server.read_until("stopped")
    log = "".join(server.said)
    assert '"key":"alice"' in log and "unauthorized" in log and "rate_limited" in log
    for secret in (KEY, made, PASSWORD, kept.digest.hex()):
        assert secret not in log


@pytest.mark.parametrize(
    "settings",
    [
        {"WANE_API_KEYS": f"alice {KEY}"},
        {"WANE_API_KEYS": f"alice:{KEY}:root"},
        {"WANE_STORE": f"http://u:{KEY}@h"},
        {"WANE_API_KEYS": f"alice:{KEY}", "WANE_PORT": "none"},
    ],
)
def test_a_startup_error_contains_no_secret(settings: dict[str, str]) -> None:
    ended = run("serve", env=environment(**settings))
    assert ended.returncode == 2 and "error: WANE_" in ended.stderr
    assert KEY not in ended.stdout + ended.stderr


def test_an_invalid_key_file_is_fatal_at_startup(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}\n")
    ended = run("serve", "--api-keys-file", str(file))
    assert ended.returncode == 2 and f"error: {file}, line 1: it must begin with NAME:sha256:" in ended.stderr
    assert KEY not in ended.stderr


def test_wane_key_prints_the_line_and_the_key(tmp_path: Path) -> None:
    made = run("key", "alice", "--scope", "use+metrics", "--rate", "5")
    assert made.returncode == 0
    assert made.stdout.startswith("alice:sha256:") and made.stdout.endswith(" scope=metrics+use rate=5\n")
    key = made.stderr.split()[-1]
    assert key.startswith("wane_") and key not in made.stdout
    assert run("key", "a/b").stderr == "error: a name must be 1 to 64 letters, digits and . _ -\n"
    file = tmp_path / "keys"
    file.write_text(made.stdout)
    with live_server(WANE_API_KEYS_FILE=str(file), WANE_BUNDLES=BUNDLE) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        report = run("report", server.url, env=environment(WANE_API_KEY=key))
        assert report.returncode == 0 and "Latency" in report.stdout
        refused = run("report", server.url)
        assert refused.returncode == 2 and "401" in refused.stderr
