"""Tests that the commands of the README and the quick start print the output on the page, and that the README's client
continues its session after a crash of the server."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.docs.transcript import FENCE, TIMEOUT_S, parse, run
from tests.service.live_server import BUNDLE, starting_server

ROOT = Path(__file__).parents[2]
ADDRESSES = ("127.0.0.1:8000", "localhost:8000")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_commands_of_a_page_print_what_it_says(page: str) -> None:
    commands = parse((ROOT / page).read_text(encoding="utf-8"))
    assert any(command.background for command in commands), f"no command of {page} starts a server"
    port = str(free_port())

    def spell(text: str) -> str:
        for address in ADDRESSES:
            text = text.replace(address, address.replace("8000", port))
        return text

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])
    environment = {**inherited, "PATH": path, "WANE_PORT": port, "NO_COLOR": "1", "COLUMNS": "80"}
    run(commands, ROOT, environment, spell)


def test_the_readme_is_short_and_shows_the_client_of_the_example() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    (client,) = [block["body"] for block in FENCE.finditer(text) if block["info"] == "python"]
    _, _, shown = client.partition("RETRY = ")
    assert shown in (ROOT / "examples" / "session_client.py").read_text(encoding="utf-8")


def test_the_client_of_the_readme_survives_a_killed_server() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        client = importlib.import_module("session_client")
    finally:
        sys.path.remove(str(ROOT / "examples"))
    tokens = [int(token) for token in np.random.default_rng(5).integers(2, 2000, 24)]
    options = ("--port", str(free_port()), "--bundles", BUNDLE)
    with starting_server(*options) as server:
        server.wait_until_ready()
        session = client.Session(server.url, "survivor")
        for token in tokens[:12]:
            session.step(token)
        server.kill()
    with starting_server(*options) as server:
        for token in tokens[12:]:
            answer = session.step(token)
        server.wait_until_ready()
        body = {"tokens": tokens, "mode": "recurrent"}
        session.http.close()
        whole = httpx.post(f"{server.url}/v1/predict", json=body, timeout=TIMEOUT_S).json()
    assert answer["position"] == len(tokens)
    assert answer["error_bound"] == 0.0
    assert answer["predictions"][0]["token_id"] == whole["predictions"][0]["token_id"]
    assert answer["predictions"][0]["logprob"] == pytest.approx(whole["predictions"][0]["logprob"], abs=1e-4)
