"""Tests that the commands of the README and the quick start print the output on the page, and that the code of the
README and of the client's page runs."""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.transcript import FENCE, parse, run
from tests.service.live_server import live_server

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


def program(page: str) -> list[str]:
    """Returns the Python blocks of a page, with the client of this checkout instead of the distribution's."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block["body"] for block in FENCE.finditer(text) if block["info"] == "python"]
    return [block.replace("wane_client", "wane.client") for block in blocks if "openai" not in block]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_python_code_of_the_readme_and_of_the_clients_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """In the readme's example of two servers, no server listens at the first address."""
    first, two_servers = program("README.md")
    page = "\n".join(program("docs/client.md"))
    with live_server("--bundles", str(ROOT / "models" / "bundles" / "gated-stable-64")) as server:
        for block in (first, two_servers.replace(":8000", f":{free_port()}").replace(":8001", ":8000"), page):
            exec(compile(block.replace("http://127.0.0.1:8000", server.url), "page", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == " the"
    assert [line.split()[0] for line in printed[1:5]] == ["1", "2", "3", "4"]
    assert "unknown_model 404 there is no model 'unknown'" in "\n".join(printed)


def test_the_commands_of_the_clients_page_are_those_of_its_distribution() -> None:
    built = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text(encoding="utf-8"))
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (built["project"]["name"], built["tool"]["setuptools"]["packages"]) == ("wane-client", ["wane_client"])
    assert built["project"]["version"] == whole["version"]
    assert {*built["project"]["dependencies"], *built["project"]["optional-dependencies"]["stream"]} <= {
        *whole["dependencies"]
    }
