"""Tests the contenders: their files, requests and answers."""

from __future__ import annotations

import contextlib
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.bench.baseline import Baseline
from benchmarks.bench.contenders import (
    BARE,
    HANDLER,
    LSTM,
    PEERS,
    SCAN,
    SHIPPED,
    STEP_PATH,
    WANE,
    Contender,
    contenders,
    peer_names,
    wanes,
)
from benchmarks.bench.loads import NotUnderstood, Stage, loads_of, step_request
from benchmarks.bench.process import ServerFailed, ServerProcess
from benchmarks.bench.subjects import MODELS
from benchmarks.bench.wire import WrongAnswer, check_ranked, window_answer, window_body
from benchmarks.peers.step_model import StepModel
from benchmarks.peers.window_model import WindowModel
from tests.benchmarks.bench.stub import ok, serving
from wane.models.bundle_checks import read_manifest

FOLDERS = sorted(path.name for path in PEERS.iterdir() if path.is_dir() and path.name != "__pycache__")
SERVERS = [name for name, contender in contenders().items() if contender.peer]


def test_all_required_peers_are_contenders() -> None:
    assert peer_names() == ["bentoml", "litserve", "mlserver", "mosec", "ray"]
    assert peer_names("sessions") == ["fastapi-sessions", "mosec-sessions"]
    assert peer_names("handler") == [HANDLER]
    assert {contender.peer for contender in contenders().values()} == {"", *FOLDERS}


@pytest.mark.parametrize("name", SERVERS)
def test_a_peer_has_a_server_and_requirements(name: str) -> None:
    peer = contenders()[name]
    assert any((PEERS / peer.peer / file).is_file() for file in ("server.py", "sessions.py"))
    assert peer.requirements is not None
    requirements = peer.requirements.read_text().splitlines()
    ranges = [line for line in requirements if not line.startswith("#")]
    assert all("<" in line for line in ranges), "a requirement has no upper version limit"
    assert any(line.startswith(peer.package) for line in ranges)
    assert peer.programs.parts[-3:] == ("peers", peer.peer, "bin")


def test_a_peer_s_largest_batch_equals_wane_s() -> None:
    """Checks the settings file of MLServer, which contains the batch size as a number. The other peers import the batch
    size as a constant."""
    settings = tomllib.loads(
        "settings = " + (PEERS / "mlserver" / "model-settings.json").read_text().replace("\n", " ").replace('":', '" =')
    )["settings"]
    assert settings["max_batch_size"] == 64


def test_a_long_sequence_of_an_lstm_has_a_native_baseline() -> None:
    lstm, gated = ({load.name for load in loads_of(contenders()[SCAN], model)} for model in (LSTM, SHIPPED))
    assert lstm - gated == {"state-native", "score-native"}
    assert {"state-parallel", "score-parallel"} <= gated


@pytest.mark.parametrize("name", [WANE, BARE, *SERVERS])
def test_every_contender_has_loads_at_64_and_1_connections(name: str) -> None:
    names = [load.name for load in loads_of(contenders()[name], LSTM)]
    assert len(names) == len(set(names))
    assert any(load.endswith("-64") for load in names) and any(load.endswith("-1") for load in names)


def test_a_command_has_its_bundle_and_port_but_none_of_this_process_s_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANE_THREADS", "2")
    wane = contenders()[WANE]
    arguments = wane.arguments(Path("some/bundle"), [1234, 1, 2])
    assert arguments[1:4] == ["-m", "wane", "serve"]
    assert "--bundles=some/bundle" in arguments and "--port=1234" in arguments
    variables = wane.variables(Path("some/bundle"), [1234, 1, 2], {})
    assert variables["BENCH_PORT"] == "1234"
    assert "WANE_THREADS" not in variables


def test_a_server_gets_the_addresses_of_its_services() -> None:
    plain, redis, traced = wanes()
    assert (plain.services, redis.services, traced.services) == ([], ["redis"], ["collector"])
    variables = redis.variables(Path("b"), [1, 2, 3], {"redis": "redis://here"})
    assert variables["WANE_STORE"] == "redis://here"
    variables = traced.variables(Path("b"), [1, 2, 3], {"collector": "http://here"})
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://here"
    assert variables["OTEL_TRACES_SAMPLER_ARG"] == "0.01"


def test_a_baseline_has_the_same_settings_and_interpreter(tmp_path: Path) -> None:
    baseline = Baseline(tmp_path, "service")
    for ours in wanes():
        theirs = baseline.of(ours)
        assert theirs.name == ours.name.replace(WANE, "baseline")
        assert (theirs.environment, theirs.programs) == (ours.environment, ours.programs)
        assert theirs.arguments(tmp_path, [1, 2, 3])[1:4] == ["-m", "service", "serve"]
        assert theirs.variables(tmp_path, [1, 2, 3], dict.fromkeys(theirs.services, ""))["PYTHONPATH"] == str(tmp_path)
        assert [load.name for load in loads_of(theirs, LSTM)] == [load.name for load in loads_of(ours, LSTM)]


@pytest.mark.parametrize("name", [WANE, HANDLER, *peer_names()])
def test_a_request_contains_the_window(name: str) -> None:
    assert "4,5,6]" in window_body(contenders()[name].wire, [4, 5, 6])


def test_a_step_names_its_session_in_its_path_or_in_its_body() -> None:
    assert step_request(STEP_PATH, "a", {"tokens": [7]}) == ("/v1/sessions/a/tokens", '{"tokens":[7]}')
    assert step_request("/inference", "a", {"tokens": [7]}) == ("/inference", '{"session":"a","tokens":[7]}')


def test_a_bulk_call_that_a_server_does_not_support_raises_not_understood(tmp_path: Path) -> None:
    said = b'{"detail":"format: there is no such field"}'
    refusal = b"HTTP/1.1 422 No\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
    with serving(lambda number, body: refusal if b'"format"' in body else ok(b"{}")) as stub:
        server = SimpleNamespace(url=f"http://127.0.0.1:{stub.port}")
        with contextlib.ExitStack() as stack:
            stage = Stage(contenders()[WANE], tmp_path, read_manifest(MODELS[SHIPPED]), 0, stack, cast(Any, server))
            loads = {load.name: load for load in loads_of(stage.contender, SHIPPED)}
            loads["batched-64"].prepare(stage)
            with pytest.raises(NotUnderstood, match="answered 422: format: there is no such field"):
                loads["columns-64"].prepare(stage)


def test_a_peer_s_sessions_keep_their_states() -> None:
    """Sends a sequence token by token, in batches with another sequence. Compares the last answer with the prediction
    from a window of the same tokens."""
    bundle = MODELS[SHIPPED]
    model, tokens = StepModel(bundle), [0, 9, 11, 4]
    for token in tokens:
        (answer, _) = model.step(["a", "b"], [token, 5])
    (ranked,) = WindowModel(bundle).ranked([tokens])
    check_ranked([(int(one["token_id"]), float(one["probability"])) for one in answer], ranked)


@pytest.mark.parametrize(
    ("wire", "answer"),
    [
        ("tokens", b'{"predictions": [{"token_id": 3, "probability": 0.5}]}'),
        ("wane", b'{"predictions": [{"token_id": 3, "token": "a", "probability": 0.5, "logprob": -0.7}]}'),
        ("windows", b'[[{"token_id": 3, "probability": 0.5}]]'),
        ("oip", b'{"outputs": [{"name": "token_id", "data": [3]}, {"name": "probability", "data": [0.5]}]}'),
    ],
)
def test_an_answer_is_parsed_in_every_format(wire: str, answer: bytes) -> None:
    assert window_answer(wire, answer) == [(3, 0.5)]  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"predictions": [{}]}', b'{"predictions": 3}'])
def test_an_invalid_answer_is_reported(answer: bytes) -> None:
    with pytest.raises(WrongAnswer, match="no predictions"):
        window_answer("tokens", answer)


def test_a_different_order_or_probability_is_a_wrong_answer() -> None:
    expected = [(1, 0.5), (2, 0.25)]
    check_ranked([(1, 0.50001), (2, 0.25)], expected)
    for given in ([(2, 0.5), (1, 0.25)], [(1, 0.51), (2, 0.25)], [(1, 0.5)]):
        with pytest.raises(WrongAnswer, match="the model's is"):
            check_ranked(given, expected)


@pytest.mark.parametrize(("kind", "answer"), [("wane", [(7, 0.5), (3, 0.1)]), ("windows", [(7, 0.5), (1, 0.2)])])
def test_wane_lists_another_token_in_place_of_the_unknown_word(kind: str, answer: list[tuple[int, float]]) -> None:
    stage = SimpleNamespace(contender=SimpleNamespace(kind=kind), names=SimpleNamespace(unlisted=(1,)))
    Stage.check(stage, answer, [(7, 0.5), (1, 0.2)])  # type: ignore[arg-type]
    with pytest.raises(WrongAnswer):
        Stage.check(stage, [(8, 0.5), *answer[1:]], [(7, 0.5), (1, 0.2)])  # type: ignore[arg-type]


HUNG_S = 120.0

STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, __file__], start_new_session=True)
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_server_that_stops_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    ends = Contender("ends", "Ends", "windows", (sys.executable, "-c", "raise SystemExit('no such model')"))
    with ServerProcess(ends, tmp_path, tmp_path / "log") as server, pytest.raises(ServerFailed, match="no such model"):
        server.wait_ready("/", "{}")


def test_all_processes_of_a_server_are_stopped_even_if_they_ignore_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.bench.process.STOPPED_WITHIN_S", 0.1)
    program, log = tmp_path / "stubborn.py", tmp_path / "log"
    program.write_text(STUBBORN)
    command = (sys.executable, str(program), "child")
    with ServerProcess(Contender("s", "S", "windows", command), tmp_path, log) as server:
        while len(pids := log.read_text().split()) < 2:
            assert server.cpu_seconds() >= 0
    guard = time.monotonic() + HUNG_S  # A killed process may still run for a moment.
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < guard, left
        time.sleep(0.01)


def _runs(pid: str) -> bool:
    """Returns whether the process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
