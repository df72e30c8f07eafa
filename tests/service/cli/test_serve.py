"""Tests that `wane serve` refuses an address or a session file before it loads a model."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from wane.cli import main
from wane.service import server


@pytest.fixture(autouse=True)
def _never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr(server, "run", run)


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot listen on 127.0.0.1, port {port}: Address already in use; stop the other server, or give "
        "another --port\n"
    )


@pytest.mark.parametrize("host", ["1.2.3.4.5", "192.0.2.1", "a" * 70])
def test_a_host_that_is_not_this_machine(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert host in error and error.count("\n") == 1


def test_a_session_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none" / "sessions"
    assert main(["serve", "--port", "0", "--session-file", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --session-file {file}: {tmp_path / 'none'} cannot be written to")
    with pytest.raises(AssertionError, match="the server was started"):
        main(["serve", "--port", "0", "--session-file", str(tmp_path / "sessions")])
    assert not list(tmp_path.iterdir())
