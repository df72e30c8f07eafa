"""Tests of the server process: its startup, errors at its startup, and its shutdown, before which the server answers
every accepted request."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import uvloop

from tests.service.conftest import SocketServer
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.live_server import (
    BUNDLE,
    ROOT,
    TIMEOUT_S,
    LiveServer,
    environment,
    live_server,
    run,
    starting_server,
)
from tests.service.problems import assert_problem
from tests.service.shipped import PATHS
from tests.service.versions import put
from wane.cli import main
from wane.service import server as process
from wane.service.app import Application
from wane.service.observability import logs
from wane.service.server import configured, say_ready
from wane.service.settings import Settings, SettingsError


@pytest.fixture
def bundle(tmp_path: Path, http: httpx.Client) -> Path:
    """A copy of the default model's bundle. Tests corrupt the copy."""
    name = http.get("/v1/models").json()["data"][0]["id"]
    root = Settings.read(environment()).bundles
    return Path(shutil.copytree(root / name, tmp_path / name))


def test_the_description_of_the_api_is_built_before_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first reader would otherwise make every other request wait for a tenth of a second."""
    described: list[object] = []

    def stop(app: Application, *_: object, **__: object) -> None:
        described.append(app.openapi_schema)
        raise SettingsError("the server does not start")

    monkeypatch.setattr(process, "configured", stop)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    with pytest.raises(SettingsError):
        process.run(Settings())
    assert described != [None]


async def test_sigterm_finishes_accepted_requests_and_refuses_new_requests(
    server: SocketServer, engine: FakeEngine, registry: FakeRegistry
) -> None:
    engine.wait = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        accepted = asyncio.create_task(client.post("/v1/predict", json={"tokens": [1]}))
        await engine.waiting.wait()
        server.handle_exit(signal.SIGTERM, None)
        await registry.draining.wait()

        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert_problem(await client.post("/v1/predict", json={"tokens": [1]}), 503, "unavailable")
        server.handle_exit(signal.SIGTERM, None)  # A second SIGTERM must have no effect.
        assert not server.should_exit

        engine.wait.set()
        assert (await accepted).status_code == 200
    await server.draining_is_over()
    assert server.should_exit


async def test_a_server_is_unready_but_answers_during_the_shutdown_delay(
    server: SocketServer, registry: FakeRegistry
) -> None:
    server.notice_s = 3600
    server.handle_exit(signal.SIGTERM, None)
    await registry.leaving.wait()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.post("/v1/predict", json={"tokens": [1]})).status_code == 200
    assert not registry.draining.is_set()
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and server.force_exit
    assert server.draining is not None
    server.draining.cancel()


async def test_a_second_interrupt_does_not_wait(
    server: SocketServer, engine: FakeEngine, registry: FakeRegistry
) -> None:
    engine.wait = asyncio.Event()
    server.handle_exit(signal.SIGINT, None)
    await registry.draining.wait()
    assert not server.should_exit
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and server.force_exit
    engine.wait.set()
    await server.draining_is_over()


async def test_a_request_that_outlasts_the_shutdown_is_answered_503(
    server: SocketServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.config.timeout_graceful_shutdown = 0
    engine.wait = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        asking = asyncio.create_task(client.post("/v1/predict", json={"tokens": [1]}))
        await engine.waiting.wait()
        server.should_exit = True
        document = assert_problem(await asking, 503, "unavailable")
    engine.wait.set()
    assert "stopping" in document["detail"]
    (fields,) = [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]
    assert (fields["status"], fields["error"]) == (503, "unavailable")
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stopped_server_exits_with_0() -> None:
    with live_server(WANE_BUNDLES=BUNDLE) as server:
        assert httpx.get(f"{server.url}/readyz").json()["ready"] is True
        assert server.stop() == 0
        server.read_until("draining")
        server.read_until("stopped")


def test_the_command_uses_uvloop(app: Application) -> None:
    assert configured(app).get_loop_factory() is uvloop.new_event_loop


def test_a_connection_answers_and_refuses_on_uvloop(live: LiveServer) -> None:
    # the other tests of connections use asyncio's event loop
    url = httpx.URL(live.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port), TIMEOUT_S) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nhost: wane\r\n\r\nnot HTTP\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert re.findall(rb"HTTP/1\.1 (\d+) ", received) == [b"200", b"400"]
    live.read_until("refused", reason="malformed")


def test_the_log_has_one_json_line_for_each_request(live: LiveServer, http: httpx.Client) -> None:
    http.post("/v1/predict", json={"input": "The"}, headers={"x-request-id": "in-the-log"})
    line = live.read_until("request", request_id="in-the-log")
    assert (line["method"], line["path"], line["status"], line["level"]) == ("POST", "/v1/predict", 200, "info")
    assert line["model"] and line["mode"] and line["time"].endswith("+00:00")


def test_the_device_in_use_is_in_readyz_and_in_every_answer(http: httpx.Client) -> None:
    device = http.get("/readyz").json()["device"]
    assert device in ("cpu", "cuda")
    assert http.post("/v1/predict", json={"input": "The"}).json()["device"] == device


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WANE_PROT", "80"), ("WANE_MAX_BATCH_SIZE", "many"), ("WANE_PORT", "65536"), ("WEB_CONCURRENCY", "2")],
)
def test_an_invalid_setting_ends_the_process_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["serve"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and variable in message


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"WANE_BUNDLES": "/nowhere"}, "/nowhere"), ({"WANE_BUNDLES": BUNDLE, "WANE_DEFAULT_MODEL": "gpt"}, "'gpt'")],
)
def test_missing_models_end_the_process_with_a_message(settings: dict[str, str], named: str) -> None:
    assert_ends_with_message(run("serve", "--port", "0", env=environment(**settings)), named)


def assert_ends_with_message(ended: subprocess.CompletedProcess[str], named: str) -> None:
    """Checks that the process failed, that its error message contains the text `named`, and that it printed no
    traceback."""
    assert ended.returncode == 2
    message = ended.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ") and named in message
    assert "Traceback" not in ended.stderr


def flip_a_byte(bundle: Path) -> str:
    weights = bundle / str(json.loads((bundle / "manifest.json").read_text())["weights"])
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return weights.name


def remove_a_file(bundle: Path) -> str:
    (bundle / "window.onnx").unlink()
    return "window.onnx"


def write_from_the_future(bundle: Path) -> str:
    manifest = bundle / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 7}))
    return "schema_version is 7"


@pytest.mark.parametrize("spoil", [flip_a_byte, remove_a_file, write_from_the_future])
def test_a_corrupt_bundle_ends_the_process_with_a_message(bundle: Path, spoil: Callable[[Path], str]) -> None:
    named = spoil(bundle)
    assert_ends_with_message(run("serve", "--port", "0", "--bundles", str(bundle)), named)


def test_a_missing_device_ends_the_process(live: LiveServer, http: httpx.Client) -> None:
    if http.get("/readyz").json()["device"] == "cuda":
        pytest.skip("this machine has a CUDA device")
    assert_ends_with_message(run("serve", "--port", "0", "--device", "cuda"), "CUDA")


def test_requests_wait_for_models_that_are_being_loaded() -> None:
    """A user sends requests before the models are loaded if the user pastes all commands of the README at once."""
    names = [path.name for path in PATHS]

    def ask(name: str) -> tuple[tuple[int, int, int], str]:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            card = client.get(f"/v1/models/{name}")
            answer = client.post("/v1/predict", json={"model": name, "tokens": [5, 6, 7]})
            ready = client.get(f"/v2/models/{name}/ready")
            return (card.status_code, answer.status_code, ready.status_code), answer.json()["model"]

    patient = starting_server(WANE_REQUEST_TIMEOUT_MS=str(1000 * TIMEOUT_S))
    with patient as server, ThreadPoolExecutor(len(names)) as pool:
        url = server.read_until("listening")["url"]
        answers = pool.map(ask, reversed(names))
        assert httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"] == "gated-stable-64"
        assert list(answers) == [((200, 200, 200), name) for name in reversed(names)]
        server.read_until("ready")
        document = httpx.get(f"{url}/readyz").json()
        assert (document["loading"], document["failed"], len(document["models"])) == ([], [], len(names))


def test_a_server_stopped_while_it_loads_exits_with_0() -> None:
    with starting_server() as server:
        server.read_until("listening")
        assert server.stop() == 0
        server.read_until("stopped")
    assert "Traceback" not in "".join(server.said)


@pytest.mark.slow
def test_a_fifo_among_the_bundles_stops_neither_a_load_nor_the_end(tmp_path: Path) -> None:
    for path in PATHS[:2]:
        shutil.copytree(path, tmp_path / path.name)
    manifest = tmp_path / PATHS[1].name / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with starting_server(WANE_BUNDLES=str(tmp_path), WANE_DEFAULT_MODEL=PATHS[0].name) as server:
        server.wait_until_ready()
        refused = httpx.post(f"{server.url}/v2/repository/models/{PATHS[1].name}/load", timeout=TIMEOUT_S)
        assert "manifest.json: must be a regular file" in refused.json()["error"]
        assert server.stop() == 0


BLOCKED = """
import asyncio, sys, time
from wane.cli import main
from wane.service.registry.registry import ModelRegistry
ModelRegistry.index = lambda self: asyncio.to_thread(time.sleep, 10**6)
sys.exit(main(sys.argv[1:]))
"""
"""A server whose disk does not answer when the server lists the bundles."""


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_disk_does_not_answer() -> None:
    settings = environment(WANE_BUNDLES=BUNDLE, WANE_DRAIN_TIMEOUT_MS="100")
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, "serve", "--port", "0"],
        cwd=ROOT,
        env=settings,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = LiveServer(process)
    try:
        server.wait_until_ready()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v2/repository/index", json={}, timeout=0.5)
        assert server.stop() == 0
        assert server.read_until("the process ends although a thread still runs")
    finally:
        server.kill()


def test_a_terminal_shows_the_url_when_the_server_is_ready() -> None:
    terminal, output = os.openpty()
    with starting_server(stdout=output, WANE_BUNDLES=str(PATHS[0])) as server:
        os.close(output)
        url = server.read_until("listening")["url"]
        with os.fdopen(terminal, encoding="utf-8") as screen:
            assert screen.readline() == f"ready: {url}\n"
            assert httpx.post(f"{url}/v1/predict", json={"tokens": [5]}, timeout=TIMEOUT_S).status_code == 200


def test_the_line_for_a_terminal_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log lines of other threads appear on the same terminal. A second write for the line break could come after
    them, because PYTHONUNBUFFERED turns every write into a system call."""

    class Terminal(io.StringIO):
        writes: ClassVar[list[str]] = []

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    say_ready(["http://127.0.0.1:8000"])
    assert Terminal.writes == ["ready: http://127.0.0.1:8000\n"]


def test_only_a_corrupt_bundle_that_is_required_stops_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    folder.mkdir()
    put(folder, "1", name="whole")
    named = flip_a_byte(put(folder, "1", name="corrupt"))
    chosen = ("--bundles", str(folder), "--default-model", "whole", "--session-file", str(tmp_path / "sessions"))
    with live_server(*chosen) as server:
        assert httpx.post(f"{server.url}/v1/sessions", json={"session": "kept"}).status_code == 201
        ready = httpx.get(f"{server.url}/readyz")
        assert (ready.status_code, [model["model"] for model in ready.json()["models"]]) == (200, ["whole"])
        (failed,) = ready.json()["failed"]
        assert failed["model"] == "corrupt" and f"corrupt/{named}: SHA-256 differs" in failed["reason"]
        assert httpx.get(f"{server.url}/v2/models/whole/ready").status_code == 200
        unknown = httpx.get(f"{server.url}/v2/models/corrupt/ready")
        assert unknown.status_code == 404 and named in unknown.json()["error"]
        assert any(named in line and '"warning"' in line for line in server.said)
        assert server.stop() == 0
    for arguments in (["--default-model", "corrupt"], ["--require-all"]):
        assert_ends_with_message(run("serve", "--port", "0", *chosen, *arguments), named)
    with live_server(*chosen) as server:
        assert httpx.get(f"{server.url}/v1/sessions/kept").status_code == 200
