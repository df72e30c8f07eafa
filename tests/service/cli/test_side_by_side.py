"""Tests of `wane compare` with several models, against real servers."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.bundles import edit_manifest
from tests.service.cli.test_compare import PNG
from tests.service.live_server import TIMEOUT_S, LiveServer, live_server
from tests.service.shipped import FOLDER
from tests.service.versions import make_eventful, put, retokenize
from wane.cli import main
from wane.client import Wane
from wane.models.bundle import Bundle
from wane.models.cache_mixture import CacheMixture
from wane.models.reference import Reference
from wane.service.cli.connect import CommandError
from wane.service.cli.load import Load
from wane.service.cli.side_by_side import WINDOW, smallest_k, spread_over

MODELS = ("rnn-stable", "gated-stable-64")
TOKENS = 80
TEXT = "The history of the town begins in the twelfth century , when a monastery was founded near the river . " * 8


def compare(url: str, folder: Path, *options: str) -> dict[str, Any]:
    """Runs `wane compare`, and returns its JSON document."""
    figures = folder / "figures.json"
    assert main(["compare", url, "--json", str(figures), *options]) == 0
    document: dict[str, Any] = json.loads(figures.read_text())
    return document


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with the two models."""
    folder = tmp_path_factory.mktemp("bundles")
    for name in MODELS:
        (folder / name).symlink_to(FOLDER / name)
    with live_server("--bundles", str(folder), "--default-model", MODELS[0]) as server:
        yield server


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(two: LiveServer, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of both models. The fixture also checks the plot."""
    folder = tmp_path_factory.mktemp("compared")
    options = [f"--model={name}" for name in MODELS]
    plot = folder / "models.png"
    document = compare(two.url, folder, *options, "--file", str(text), "--tokens", str(TOKENS), "--plot", str(plot))
    assert plot.read_bytes().startswith(PNG)
    return {one["model"]: one for one in document["models"]}


@pytest.mark.parametrize("name", MODELS)
def test_perplexities_are_those_of_the_oracle(found: dict[str, dict[str, Any]], name: str) -> None:
    """The oracle computes each distribution again, with the model's cache if it has one."""
    bundle = Bundle.read(FOLDER / name)
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    tokens = bundle.vocabulary.encode(TEXT)[:TOKENS]
    mixture = None
    if bundle.manifest.cache is not None:
        mixture = CacheMixture(bundle.manifest.cache, bundle.manifest.vocabulary.size)

    def after(rows: list[list[int]]) -> list[NDArray[np.float64]]:
        """Returns the output layer's input (rows, H) after each token of rows of equal length."""
        state, found = reference.zero_state(len(rows)), []
        for tokens_now in np.array(rows).T:
            hidden, state = reference.advance(tokens_now, state)
            found.append(hidden)
        return found

    def logprob(hidden: NDArray[np.float64], end: int) -> float:
        logits = reference.logits(hidden)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        if mixture is not None and end:
            cache = mixture.of(np.array(tokens[:end]))
            shares = cache.network[0] * shares + mixture.added(cache)[0]
        return math.log(shares[tokens[end]])

    read = [*bundle.manifest.start_tokens, *tokens]
    assert len(read) == TOKENS + 1
    whole = [logprob(hidden[0], end) for end, hidden in enumerate(after([read[:-1]]))]
    one = found[name]
    assert (one["tokens"], one["positions"]) == (TOKENS, TOKENS - 1)
    assert one["perplexity"] == pytest.approx(math.exp(-np.mean(whole)), rel=1e-4)
    for k in (1, 8):
        ends = range(k + 1, TOKENS)  # before, a window of k tokens is the whole text
        hidden = after([read[end + 1 - k : end + 1] for end in ends])[-1]
        lost = [whole[end] - logprob(hidden[row], end) for row, end in enumerate(ends)]
        assert one["by_k"][str(k)] == pytest.approx(one["perplexity"] * math.exp(sum(lost) / (TOKENS - 1)), rel=1e-4)


def test_the_facts_of_a_model_are_those_of_its_bundle(found: dict[str, dict[str, Any]]) -> None:
    for name, one in found.items():
        manifest = Bundle.read(FOLDER / name).manifest
        assert one["state_bytes"] == sum(4 * math.prod(each.shape) for each in manifest.state)
        assert 4 * one["weights"] <= (FOLDER / name / manifest.weights).stat().st_size < 4 * one["weights"] + 10_000
        assert (one["reach"], one["window"], one["family"]) == (None, WINDOW, manifest.architecture.family)


def test_latencies_and_rates_have_a_spread(found: dict[str, dict[str, Any]]) -> None:
    for one in found.values():
        for name in ("step_ms", "window_ms", "tokens_per_s"):
            assert 0 < one[name]["least"] <= one[name]["median"] <= one[name]["most"]


def test_the_share_proved_is_that_of_requests_with_prove(
    two: LiveServer, found: dict[str, dict[str, Any]], text: Path
) -> None:
    with Wane(two.url, deadline_s=TIMEOUT_S) as client:
        for name, one in found.items():
            tokens = [token for token in client.score(TEXT, model=name).tokens[:TOKENS] if token is not None]
            proofs = [
                client.predict(tokens[:end], model=name, mode="window", window=WINDOW, prove=True).top1_proved
                for end in range(WINDOW + 1, TOKENS)
            ]
            assert one["proved"] == pytest.approx(np.mean(proofs))


def test_the_sessions_are_deleted(two: LiveServer, found: dict[str, dict[str, Any]]) -> None:
    with Wane(two.url, deadline_s=TIMEOUT_S) as client:
        for model in client.report().models:
            if model.model in found:
                assert sum(model.sessions[kind] for kind in ("resident", "parked")) == 0


def test_models_of_events_are_compared_over_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bundles").mkdir()
    for name in ("clicks", "taps"):
        make_eventful(put(tmp_path / "bundles", "1", name=name))
    sessions = tmp_path / "sessions.jsonl"
    lines = [["event 5", "event 6", "socks", "event 7"], ["event 9", "event 5"]]
    sessions.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    with live_server("--bundles", str(tmp_path / "bundles")) as server:
        options = ["--model", "clicks", "--model", "taps", "--file", str(sessions), "--window", "2"]
        document = compare(server.url, tmp_path, *options)
    first, second = document["models"]
    assert document["same_tokens"] is True
    assert [first["model"], second["model"]] == ["clicks", "taps"]
    assert first["unknown"] == {"socks": 1} and first["positions"] == 3
    assert first["perplexity"] == second["perplexity"] and first["by_k"] == second["by_k"]
    printed = capsys.readouterr().out
    assert "clicks: read 6 events" in printed and "taps: read 6 events" in printed
    assert printed.count('Left out 1 events (16.7%) that the vocabulary lacks: "socks"') == 2


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with two models of text and two of events, all with different vocabularies."""
    folder = tmp_path_factory.mktemp("unlike") / "bundles"
    folder.mkdir()
    put(folder, "1", name="bpe")
    words = put(folder, "1", name="words")
    make_eventful(words, sorted(set(TEXT.split())))
    edit_manifest(words, "vocabulary", "kind", value="words")
    tokenizer = json.loads((words / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (words / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    retokenize(words)
    make_eventful(put(folder, "1", name="clicks"))
    make_eventful(put(folder, "1", name="taps"), ["socks"])
    with live_server("--bundles", str(folder), "--default-model", "bpe") as server:
        yield server


def test_models_with_different_vocabularies_read_the_same_text_and_are_not_ranked(
    unlike: LiveServer, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--model", "words", "--model", "bpe", "--window", "4", "--plot", str(tmp_path / "plot.png")]
    document = compare(unlike.url, tmp_path, *models, "--file", str(text), "--tokens", "20")
    words, bpe = document["models"]
    assert document["same_tokens"] is False
    with Wane(unlike.url, deadline_s=TIMEOUT_S) as client:
        tokens, longer = (
            len(client.score(" ".join(TEXT.split()[: words["tokens"] + more]), model="bpe").tokens) for more in (0, 1)
        )
    assert bpe["tokens"] == tokens <= 20 < longer and words["tokens"] < bpe["tokens"]
    printed = capsys.readouterr().out
    assert "Perplexity of different tokens" in printed and "cannot be compared with one another" in printed
    rows = [line.split()[0] for line in printed.splitlines() if line.strip().startswith(("words ", "bpe "))]
    assert rows == ["words", "bpe"] * 2


def test_models_that_lack_different_events_read_the_same_events(
    unlike: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = tmp_path / "sessions.jsonl"
    lines = [["event 50", "socks", "event 60"], ["event 90", "event 50", "event 70"]]
    sessions.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    options = ["--model", "clicks", "--model", "taps", "--file", str(sessions), "--window", "2", "--tokens", "5"]
    document = compare(unlike.url, tmp_path, *options)
    clicks, taps = document["models"]
    assert (clicks["tokens"], clicks["unknown"], taps["tokens"], taps["unknown"]) == (4, {"socks": 1}, 5, {})
    assert document["same_tokens"] is False and "cannot be compared" in capsys.readouterr().out


def test_models_of_text_and_of_events_have_no_input_in_common(
    unlike: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", unlike.url, "--model", "bpe", "--model", "taps"]) == 2
    assert "model taps reads events, but model bpe reads text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "rnn-stable"], "--model rnn-stable is given twice"),
        (["--model", "gpt"], "'gpt'"),
        (["--model", "gated-stable-64", "--window", "100000"], "--window is 100000, but model"),
    ],
    ids=["twice", "unknown", "window"],
)
def test_an_impossible_comparison_says_why(
    two: LiveServer, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["compare", two.url, "--tokens", "4", "--model", "rnn-stable", *arguments]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and named in message


def test_the_smallest_window_is_good_from_there_on() -> None:
    assert smallest_k({1: 90, 2: 40.2, 4: 41, 8: 40.3, 16: 40}, 40) == 8
    assert smallest_k({1: 90, 2: 41}, 40) is None
    assert smallest_k({}, 40) is None


def test_positions_are_spread_over_all_places() -> None:
    places = [(0, end) for end in range(9)]
    assert spread_over(places, 3) == [(0, 0), (0, 4), (0, 8)]
    assert spread_over(places, 20) == places
    assert spread_over([], 3) == []


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that sends these answers, one for each request, and then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    connection.recv(65_536)
                    connection.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([OK, b"HTTP/1.1 429 No\r\ncontent-length: 4\r\n\r\nfull"], "the server answered 429: full"),
        ([OK], "the server closed a connection"),
        ([b"what?"], "the server's answer is not HTTP"),
    ],
    ids=["refused", "closed", "no HTTP"],
)
def test_a_load_that_fails_says_why(answers: list[bytes], why: str) -> None:
    with answering(*answers) as url, pytest.raises(CommandError, match=why):
        load = Load(url)
        load.drive([[load.request("GET", "/healthz")] * 2])


def test_a_load_has_the_answers_in_order_and_sends_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANE_API_KEY", "secret")
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n"
    with answering(OK, chunked) as url:
        load = Load(url)
        request = load.request("POST", "/v1/x", {"a": 1})
        assert b"authorization: Bearer secret\r\n" in request and request.endswith(b'{"a":1}')
        (answers,), seconds = load.drive([[request] * 2])
    assert [answer.body for answer in answers] == [b"{}", b"[1]"]
    assert seconds > 0 and all(answer.ms > 0 for answer in answers)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(CommandError, match=f"{url} cannot be reached"):
        Load(url).drive([[b""]])
