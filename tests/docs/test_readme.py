"""The README's commands print the output that it shows."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.docs.transcript import parse, run

ROOT = Path(__file__).parents[2]
ADDRESSES = ("127.0.0.1:8000", "localhost:8000")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.slow
def test_the_readmes_commands_print_its_output() -> None:
    commands = parse((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any(command.background for command in commands), "the README starts a server"
    port = str(free_port())

    def spell(text: str) -> str:
        for address in ADDRESSES:
            text = text.replace(address, address.replace("8000", port))
        return text

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])
    environment = {**inherited, "PATH": path, "WANE_PORT": port, "NO_COLOR": "1", "COLUMNS": "80"}
    run(commands, ROOT, environment, spell)
