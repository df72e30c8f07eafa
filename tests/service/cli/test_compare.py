"""Tests of `wane compare` and `wane report` against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from rich.progress import Progress

from tests.service.live_server import TIMEOUT_S, LiveServer, live_server
from tests.service.versions import make_eventful, put
from wane.cli import main
from wane.client import Agreement, Certificate, Model, VocabularyFacts, Wane
from wane.service.cli.compared_input import SAMPLE, ComparedInput
from wane.service.cli.connect import CommandError, connect
from wane.service.cli.measure import (
    COMPARED_POSITIONS,
    PHASES,
    AgreementSummary,
    choose,
    measure,
)

PNG = b"\x89PNG\r\n\x1a\n"
STEPS = 24


@pytest.fixture(scope="module")
def compared(live: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON document of one comparison over STEPS tokens of the sample text. The fixture also checks the plot."""
    folder = tmp_path_factory.mktemp("compared")
    files = ["--json", str(folder / "compared.json"), "--plot", str(folder / "compared.png")]
    assert main(["compare", live.url, "--tokens", str(STEPS), *files]) == 0
    document: dict[str, Any] = json.loads((folder / "compared.json").read_text())
    assert (folder / "compared.png").read_bytes().startswith(PNG)
    return document


def test_both_modes_are_timed_in_every_phase(compared: dict[str, Any]) -> None:
    assert set(compared["latency"]) == {"recurrent", "window"}
    for phases in compared["latency"].values():
        assert set(phases) == set(PHASES)
        for quantiles in phases.values():
            assert 0 <= quantiles["p50"] <= quantiles["p90"] <= quantiles["p99"]
        assert phases["compute"]["p50"] < phases["total"]["p50"] < phases["round_trip"]["p50"]


def test_agreement_is_counted_over_every_token(compared: dict[str, Any]) -> None:
    agreement = compared["agreement"]
    assert agreement["compared"] == compared["steps"] == STEPS
    assert 0 <= agreement["top1_proved_rate"] <= agreement["top1_match_rate"] <= 1
    assert 0 <= agreement["total_variation_mean"] <= agreement["total_variation_max"] <= 1


def test_agreement_is_shown_for_each_window_size(compared: dict[str, Any]) -> None:
    sizes = [line["window"] for line in compared["windows"]]
    assert sizes == sorted(set(sizes)) and compared["k"] in sizes and 1 in sizes
    assert {line["agreement"]["compared"] for line in compared["windows"]} == {COMPARED_POSITIONS}
    # A window that includes the first token gives the recurrent model's answer.
    for line in compared["windows"]:
        if line["window"] >= STEPS:
            assert line["agreement"]["total_variation_max"] < 1e-5
            assert line["agreement"]["top1_match_rate"] == 1


def test_a_comparison_deletes_its_sessions(compared: dict[str, Any], http: httpx.Client) -> None:
    (report,) = [one for one in http.get("/v1/report").json()["models"] if one["model"] == compared["model"]]
    assert report["agreement"]["compared"] >= STEPS
    assert report["modes"]["recurrent"]["requests"] >= STEPS


def test_the_sample_is_long_enough_for_the_default(http: httpx.Client) -> None:
    tokens = http.post("/v1/score", json={"input": SAMPLE.read_text(encoding="utf-8")}).json()["tokens"]
    assert len(tokens) >= 256


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gpt"], "'gpt'"),
        (["--window", "0"], "window"),
        (["--window", "100000"], "100000"),
        (["--tokens", "0"], "--tokens"),
        (["--plot", "plot.jpeg2"], "plot.jpeg2"),
        (["--file", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_error_of_an_impossible_comparison_has_the_reason(
    live: LiveServer, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["compare", live.url, "--tokens", "4", *arguments]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and named in message


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a model of events."""
    folder = tmp_path_factory.mktemp("bundles")
    make_eventful(put(folder, "1", name="clicks"))
    with live_server("--bundles", str(folder)) as server:
        yield server


def compare_sessions(server: LiveServer, folder: Path, lines: Sequence[object], *options: str) -> dict[str, Any]:
    """Runs `wane compare` over sessions, and returns its JSON document."""
    sessions, figures = folder / "sessions.jsonl", folder / "compared.json"
    sessions.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert main(["compare", server.url, "--file", str(sessions), "--json", str(figures), *options]) == 0
    document: dict[str, Any] = json.loads(figures.read_text())
    return document


def test_a_model_of_events_is_compared_over_the_sessions_of_a_file(
    shop: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sessions = [["event 5", "event 6", "event 7"], ["event 9", "event 5"]]
    lines = [sessions[0], {"session": "b", "events": sessions[1]}]
    figures = compare_sessions(shop, tmp_path, lines, "--window", "2")
    assert (figures["sequences"], figures["steps"], figures["unknown"]) == (2, 5, {})
    assert figures["agreement"]["compared"] == 5
    printed = capsys.readouterr().out
    assert "Compared 5 events of 2 sessions." in printed and "Left out" not in printed
    # Compares each session separately, because a window must not extend over two sessions.
    with Wane(shop.url, deadline_s=TIMEOUT_S) as client:
        agreements = [
            client.predict(events[:end], mode="both", window=2).agreement
            for events in sessions
            for end in range(1, len(events) + 1)
        ]
    expected = max(one.total_variation for one in agreements if one is not None)
    (found,) = [line["agreement"] for line in figures["windows"] if line["window"] == 2]
    assert found["compared"] == 5
    assert expected > 0.01 and found["total_variation_max"] == pytest.approx(expected, abs=1e-6)


def test_unknown_events_are_left_out_counted_and_named(
    shop: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known = [["event 5", "event 6"], ["event 9"]]
    mixed = [["socks", "event 5", "event 6", "socks"], ["hats"], {"events": ["event 9", 17]}]
    plain = compare_sessions(shop, tmp_path, known)
    capsys.readouterr()
    figures = compare_sessions(shop, tmp_path, mixed)
    printed = capsys.readouterr().out
    assert "Left out 4 events (57.1%) that the vocabulary lacks" in printed
    assert all(name in printed for name in ('"socks"', '"hats"', '"17"'))
    assert figures["unknown"] == {"socks": 2, "hats": 1, "17": 1}
    assert (figures["sequences"], figures["steps"]) == (plain["sequences"], plain["steps"]) == (2, 3)
    assert figures["agreement"] == plain["agreement"]


def test_only_the_first_events_are_compared(shop: LiveServer, tmp_path: Path) -> None:
    lines = [["event 5", "event 6"], ["event 7", "event 9", "event 5"], ["event 6"]]
    figures = compare_sessions(shop, tmp_path, lines, "--tokens", "3")
    assert (figures["sequences"], figures["steps"]) == (2, 3)


def test_a_model_of_events_asks_for_a_file(shop: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", shop.url]) == 2
    printed = capsys.readouterr()
    assert "model clicks reads events: name a file of sessions with --file sessions.jsonl" in printed.err
    assert not printed.out


def test_a_file_without_a_known_event_is_refused(
    shop: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sessions = tmp_path / "sessions.jsonl"
    sessions.write_text('["socks"]\n["hats", "socks"]\n', encoding="utf-8")
    assert main(["compare", shop.url, "--file", str(sessions)]) == 2
    printed = capsys.readouterr()
    assert 'the vocabulary of model clicks has none of the 3 events: "socks", "hats"' in printed.err
    assert not printed.out


def test_a_table_of_clicks_is_compared_as_it_is_trained_on(
    shop: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clicks, experiment, figures = tmp_path / "clicks.dat", tmp_path / "experiment.toml", tmp_path / "compared.json"
    clicks.write_text(
        "".join(f"{1.7e9 + at}::{name}::s{at % 2}\n" for at, name in enumerate(["event 5", "event 6"] * 2))
    )
    experiment.write_text('[data]\nkind = "events"\n[data.columns]\nsession = 3\ntime = 1\nitem = 2\n')
    files = ["--file", str(clicks), "--json", str(figures)]
    assert main(["compare", shop.url, *files, "--experiment", str(experiment)]) == 0
    found = json.loads(figures.read_text())
    assert (found["sequences"], found["steps"], found["unknown"]) == (2, 4, {})
    assert "read 4 events of 2 sessions from 4 lines" in capsys.readouterr().out
    assert main(["compare", shop.url, *files]) == 2
    assert "no columns 'session', 'time' and 'item' in the header" in capsys.readouterr().err
    experiment.write_text("[data.columns]\nsession = 0\n")
    assert main(["compare", shop.url, *files, "--experiment", str(experiment)]) == 2
    assert "data.columns.session.constrained-int: Input should be greater" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"], ids=["empty", "not UTF-8"])
def test_a_file_that_is_not_text_is_rejected(
    live: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    assert main(["compare", live.url, "--file", str(text)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
        ("nowhere", "'nowhere' is not the address of a server"),
    ],
)
def test_the_error_names_a_server_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], command: str, url: str, told: str
) -> None:
    assert main([command, url]) == 2
    assert told in capsys.readouterr().err.strip().splitlines()[-1]


def test_windows_are_measured_where_they_do_not_reach_the_start() -> None:
    agreement = asdict(Agreement(True, True, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    served = {"model": "m", "model_version": "1", "device": "cpu"}
    latency = {"queue_ms": 1.0, "compute_ms": 1.0, "total_ms": 1.0}
    line = {"mode": "both", "window": 2, "predictions": [], "state": "full", "error_bound": 0.0, "agreement": agreement}
    phases = {phase: {"p50_ms": 1.0, "p99_ms": 1.0} for phase in ("queue", "compute", "total")}
    compared = {**line, "latency": phases}
    comparison = {**served, "tokens": 1, "repeat": 1, "recurrent": compared, "windows": [compared, compared]}
    answer = {**served, **line, "latency": latency, "state_error_bound": 0.0, "top1_proved": True}
    answer |= {"position": 0, "models": [comparison]}
    sent: list[list[int]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/predict":
            sent.append(json.loads(request.content)["tokens"])
        if request.url.path.endswith("/tokens"):
            return httpx.Response(200, json=answer | {"position": json.loads(request.content)["expected_position"] + 1})
        return httpx.Response(200, json=answer)

    vocabulary, certificate = VocabularyFacts("bpe", 16, 0), Certificate(True, True, None)
    card = Model("m", "1", "cpu", "", "rnn", 4, 1, {}, vocabulary, certificate)
    with connect("http://wane", None, httpx.MockTransport(respond)) as client:
        found = measure(client, "http://wane", card, 2, ComparedInput([[5, 6, 7, 8], [9]]), Progress(disable=True))
    assert sent == [[5], [5, 6], [5, 6, 7], [6, 7, 8], [9]]
    # `k` is the size of the measured windows, and `model_k` is the model's default window size.
    assert (found.k, found.model_k) == (2, 4)


def test_a_server_without_models_is_reported() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"object": "list", "data": []}))
    with connect("http://wane", None, transport) as client, pytest.raises(CommandError, match="has no models"):
        choose(client, None)


def test_the_comparison_has_no_bound_if_one_pair_has_no_bound() -> None:
    pair = Agreement(True, False, 0.1, 0.0, 1.0, 0.0, None, 0.2)
    bounded = AgreementSummary.of([pair, replace(pair, error_bound=0.3)])
    assert bounded.error_bound == 0.3
    assert AgreementSummary.of([pair, replace(pair, error_bound=None)]).error_bound is None


def test_the_reports_of_replicas_are_merged_and_an_unreachable_replica_is_named(
    live: LiveServer, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = http.post("/v1/predict", json={"tokens": [1]}).json()
    again = live.url.replace("127.0.0.1", "localhost")  # another URL of the same server
    assert main(["report", live.url, again, "--json"]) == 0
    merged = json.loads(capsys.readouterr().out)
    once = http.get("/v1/report").json()
    of_one, of_two = (
        next(model for model in report["models"] if model["model"] == asked["model"]) for report in (once, merged)
    )
    assert (merged["replicas"], of_two["replicas"]) == (2, 2)
    assert of_two["modes"]["recurrent"]["requests"] == 2 * of_one["modes"]["recurrent"]["requests"] > 0
    absent = "http://127.0.0.1:1"
    assert main(["report", live.url, absent]) == 2
    printed = capsys.readouterr()
    assert "1 replicas" in printed.out and f"1 of 2 servers are not included: {absent} does not" in printed.err
    assert main(["report", live.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0].keys() == once["models"][0].keys()


@contextmanager
def other_server(page: bytes) -> Iterator[str]:
    """Yields the URL of a server that answers every GET request with `page`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            """Discards the log line."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


PAGES = {
    "a page": (b"<html>statistics of a proxy</html>", "the body is not JSON"),
    "nothing": (b"", "an object is expected, not None"),
    "another's JSON": (b'{"device": "cpu"}', "models: the field is missing"),
    "a list": (b"[]", "an object is expected, not []"),
    "other types": (b'{"device": "cpu", "models": [{"model": 5}]}', "models[0].model: a text is expected, not 5"),
    "brackets without end": (b"[" * 100_000, "the body is not JSON"),
}


@pytest.mark.parametrize(("page", "why"), PAGES.values(), ids=PAGES)
def test_a_url_that_is_not_a_wane_server_is_named_and_the_other_servers_are_reported(
    live: LiveServer, capsys: pytest.CaptureFixture[str], page: bytes, why: str
) -> None:
    with other_server(page) as url:
        assert main(["report", url, live.url + "/", live.url, "--json"]) == 2
        printed = capsys.readouterr()
        assert json.loads(printed.out)["replicas"] == 1
        assert f"1 of 2 servers are not included: {url} does not answer GET /v1/report as" in printed.err
        assert why in printed.err
        assert main(["report", url]) == 2
        printed = capsys.readouterr()
        assert not printed.out and printed.err.startswith(f"error: {url} does not answer GET /v1/report as Wane does: ")
        assert main(["compare", url]) == 2
        assert f"error: {url} does not answer GET /v1/models as Wane does: " in capsys.readouterr().err


def test_a_report_that_cannot_be_merged_is_named_and_skipped(
    live: LiveServer, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    http.post("/v1/predict", json={"tokens": [1]}).raise_for_status()
    other = http.get("/v1/report").json()
    for model in other["models"]:
        for mode in model["modes"].values():
            mode["latency"]["queue"]["buckets"][0]["le_ms"] = 1e-9
    with other_server(json.dumps(other).encode()) as url:
        assert main(["report", live.url, url, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["replicas"] == 1
    assert f"1 of 2 servers are not included: {url}: the replicas' histograms" in printed.err
