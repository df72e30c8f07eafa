"""Tests that the page goes from a torch class to a running session, as it is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.service.live_server import TIMEOUT_S, live_server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_network.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_goes_from_a_torch_class_to_a_session(tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "python", "bash", "python"]
    network, export, commands, client = (text for _, text in blocks)
    assert len(export.strip().splitlines()) + len(commands.strip().splitlines()) <= 10
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-c", network + export)
    imported, serve = commands.strip().splitlines()
    assert "not certified" in python("-m", *imported.split())
    assert serve == "wane serve --bundles bundles"
    with live_server("--bundles", str(tmp_path / "bundles")) as server:
        text = client.replace("wane_client", "wane.client").replace("http://127.0.0.1:8000", server.url)
        assert python("-c", text).strip() in ("view", "cart", "buy")
        (card,) = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT_S).json()["data"]
    assert card["id"] == "mine" and "error_bound is null" in card["certificate"]["reason"]

    (tmp_path / "sessions.jsonl").write_text((json.dumps(["view", "cart", "view", "buy"]) + "\n") * 60)
    (audited,) = re.findall(r"^    (wane audit .*)$", PAGE, re.MULTILINE)
    printed = python("-m", *audited.split(), "--positions", "20", "--max-window", "16")
    assert "of which everything below is measured" in printed
