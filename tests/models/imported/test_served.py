"""Tests that a server answers for imported graphs as onnxruntime does for the user's own file: predictions, sessions in
batches, rewinds, rebuilds, scores, new versions, and replicas that are killed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.models.bundles import WORDS, words_tokenizer
from tests.models.imported.graphs import CELLS, VOCABULARY, Oracle
from tests.service.live_server import TIMEOUT_S, LiveServer, live_server, post
from tests.service.sessions.stores.redis_server import redis_server
from wane.cli import main
from wane.models.bundle import Bundle, verify_graphs
from wane.models.imported.bundle import Import, Imported, import_graph
from wane.models.parity import log_softmax
from wane.models.vocabulary import Vocabulary
from wane.service.runners.onnx_device import DeviceRunner

MAX_WINDOW = 64
POLL = {"WANE_MODEL_POLL_INTERVAL_S": "1"}
EOS = 1


def write(folder: Path, graph: Path, name: str, pairs: dict[str, str], version: str = "1") -> Imported:
    """Imports a graph as the bundle `folder/name`."""
    tokenizer = words_tokenizer()
    asked = Import(
        path=graph,
        vocabulary=Vocabulary("words", tokenizer),
        tokenizer_json=tokenizer,
        name=name,
        version=version,
        window=16,
        max_window=MAX_WINDOW,
        start="token",
        command="wane import",
        pairs=pairs,
    )
    return import_graph(asked, folder / name)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for name, (make, _) in CELLS.items():
        make(folder / f"{name}.onnx")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def imported(graphs: Path, folder: Path) -> dict[str, Imported]:
    return {name: write(folder, graphs / f"{name}.onnx", name, pairs) for name, (_, pairs) in CELLS.items()}


@pytest.fixture(scope="module")
def server(imported: dict[str, Imported], folder: Path) -> Iterator[LiveServer]:
    with live_server(WANE_BUNDLES=str(folder), WANE_DEFAULT_MODEL="gru", **POLL) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        yield client


def oracle(graphs: Path, name: str) -> Oracle:
    return Oracle(graphs / f"{name}.onnx", CELLS[name][1])


def logprobs(own: Oracle, tokens: Sequence[int]) -> np.ndarray:
    """Returns the log-probabilities (V) of the next token, by onnxruntime on the user's own file."""
    found: np.ndarray = log_softmax(own.logits(tokens))[-1]
    return found


def agrees(answer: dict[str, Any], expected: np.ndarray) -> None:
    """Asserts that the listed tokens are the most probable ones but `<unk>`, with their log-probabilities."""
    found = {one["token_id"]: one["logprob"] for one in answer["predictions"]}
    best = [token for token in np.argsort(-expected) if token != 0][: len(found)]
    assert [*found] == best
    assert [*found.values()] == pytest.approx(expected[best].tolist(), abs=1e-5)


def exact(found: Imported) -> float | None:
    """Returns the error bound of an answer for which no token was left out."""
    return None if any("not bit-identical" in note for note in found.notes) else 0


def draw(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCABULARY, size=count).tolist()
    return tokens


@pytest.mark.parametrize("name", CELLS)
def test_an_imported_graph_answers_as_its_own_file_does(
    http: httpx.Client, graphs: Path, imported: dict[str, Imported], name: str
) -> None:
    own, tokens, ask = oracle(graphs, name), draw(3, 40), {"model": name, "top_k": 5}
    read = [EOS, *tokens]
    bound = exact(imported[name])
    assert bound == 0 or name in ("matrix-memory", "lonely", "odd")
    whole = post(http, "/v1/predict", tokens=tokens, mode="recurrent", **ask)
    agrees(whole, logprobs(own, read))
    assert whole["error_bound"] == bound
    assert post(http, "/v1/predict", tokens=tokens, mode="auto", **ask)["predictions"] == whole["predictions"]

    part = post(http, "/v1/predict", tokens=tokens, mode="window", window=7, **ask)
    agrees(part, logprobs(own, tokens[-7:]))
    assert part["error_bound"] is None and not part["top1_proved"]
    both = post(http, "/v1/predict", tokens=tokens, mode="both", window=7, **ask)
    assert both["agreement"]["error_bound"] is None

    session = f"/v1/sessions/{name}"
    post(http, "/v1/sessions", session=name, model=name)
    for start, end in ((0, 25), (25, 26), (26, 40)):
        answer = post(http, f"{session}/tokens", tokens=tokens[start:end], top_k=5)
        assert (answer["position"], answer["error_bound"]) == (end, bound)
        agrees(answer, logprobs(own, [EOS, *tokens[:end]]))
    post(http, f"{session}/rewind", position=30)
    other = draw(4, 6)
    again = post(http, f"{session}/tokens", tokens=other, top_k=5)
    agrees(again, logprobs(own, [EOS, *tokens[:30], *other]))

    scored = post(http, "/v1/score", model=name, tokens=tokens)
    every = log_softmax(own.logits(read))
    expected = [every[at, token] for at, token in enumerate(tokens)]
    assert scored["logprobs"] == pytest.approx(expected, abs=1e-5)
    for top_k in (None, 2, 2):  # from kept states
        again = post(http, "/v1/score", model=name, tokens=tokens, top_k=top_k)
        assert again["logprobs"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", CELLS)
def test_steps_of_many_sessions_in_one_request(http: httpx.Client, graphs: Path, name: str) -> None:
    own = oracle(graphs, name)
    past = {f"{name}-{n}": draw(10 + n, 3 + n) for n in range(9)}
    for session, tokens in past.items():
        post(http, "/v1/sessions", session=session, model=name)
        post(http, f"/v1/sessions/{session}/tokens", tokens=tokens)
    for token in (5, 6):
        steps = [{"session": session, "tokens": [token]} for session in past]
        answers = post(http, "/v1/sessions/tokens", steps=steps)["results"]
        for (session, tokens), answer in zip(past.items(), answers, strict=True):
            tokens.append(token)
            assert answer["session"] == session
            agrees(answer, logprobs(own, [EOS, *tokens]))


def test_the_models_page_says_what_an_imported_graph_lacks(http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    for name in CELLS:
        card = cards[name]
        assert card["family"] == "imported"
        assert card["parameters"]["rows"] == ("one by one" if name in ("lonely", "scalar") else "together")
        assert not card["certificate"]["certified"] and not card["certificate"]["contractive"]
        for words in ("layers are not known", "error_bound is null", "auto runs all tokens", "whole kept history"):
            assert words in card["certificate"]["reason"]
    assert [tensor["shape"] for tensor in cards["lstm"]["parameters"]["tensors"]] == [[2, 6], [2, 6]]
    assert [tensor["shape"] for tensor in cards["matrix-memory"]["parameters"]["tensors"]] == [[6, 6], [6]]


def replace(bundle: Path, other: Path, version: str) -> None:
    """Replaces a bundle by a version that has the graphs of another one."""
    made = bundle.with_name(f".{bundle.name}")
    shutil.copytree(other, made)
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps(manifest | {"name": bundle.name, "version": version}))
    shutil.rmtree(bundle)
    made.rename(bundle)


def test_sessions_continue_with_new_versions(
    graphs: Path, folder: Path, imported: dict[str, Imported], tmp_path: Path
) -> None:
    """The next version of each model has the graphs of another one."""
    others = dict(zip(imported, [*imported][1:] + [*imported][:1], strict=True))
    tokens = draw(7, 20)
    shutil.copytree(folder, tmp_path / "bundles")
    settings = {"WANE_BUNDLES": str(tmp_path / "bundles"), "WANE_DEFAULT_MODEL": "gru", **POLL}
    with live_server(**settings) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        for name in imported:
            post(http, "/v1/sessions", session=name, model=name)
            post(http, f"/v1/sessions/{name}/tokens", tokens=tokens)
        for name, other in others.items():
            replace(tmp_path / "bundles" / name, folder / other, "2")
        for name, other in others.items():
            deadline = time.monotonic() + TIMEOUT_S
            while post(http, "/v1/predict", model=name, tokens=[3])["model_version"] != "2":
                assert time.monotonic() < deadline
                time.sleep(0.2)
            answer = post(http, f"/v1/sessions/{name}/tokens", tokens=[4], top_k=5)
            assert answer["position"] == 21
            agrees(answer, logprobs(oracle(graphs, other), [EOS, *tokens, 4]))


@pytest.mark.stack
@pytest.mark.parametrize("policy", ["state", "tail"])
def test_a_killed_replica_loses_no_token_of_an_imported_graph(
    graphs: Path, folder: Path, imported: dict[str, Imported], tmp_path: Path, policy: str
) -> None:
    """Sessions move to another replica after SIGKILL. Their states come from Redis or are rebuilt from the history."""
    own = {name: oracle(graphs, name) for name in imported}
    pasts = {name: draw(20 + n, 5 + 7 * n) for n, name in enumerate(imported)}
    with redis_server(tmp_path / "redis") as redis:
        settings = {"WANE_BUNDLES": str(folder), "WANE_STORE": redis.url, "WANE_STORE_POLICY": policy}
        states = set()
        for round_number in range(2):
            with (
                live_server(WANE_DEFAULT_MODEL="gru", **settings) as server,
                httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
            ):
                for session, tokens in pasts.items():
                    if not round_number:
                        post(http, "/v1/sessions", session=session, model=session)
                        post(http, f"/v1/sessions/{session}/tokens", tokens=tokens)
                    for token in draw(30 + round_number, 3):
                        tokens.append(token)
                        answer = post(http, f"/v1/sessions/{session}/tokens", tokens=[token], top_k=5)
                        assert (answer["position"], answer["error_bound"]) == (len(tokens), exact(imported[session]))
                        agrees(answer, logprobs(own[session], [EOS, *tokens]))
                        states.add(answer["state"])
                server.kill()
    assert states == {"resident", "rebuilt"}


def test_a_state_whose_whole_past_is_not_kept_has_no_bound(graphs: Path, tmp_path: Path) -> None:
    """The history keeps MAX_WINDOW tokens. A rewind by more than the kept states is answered from them, without a
    bound, and equals the file's own answer from these tokens."""
    write(tmp_path, graphs / "gru.onnx", "gru", {})
    own, tokens = oracle(graphs, "gru"), draw(9, 3 * MAX_WINDOW)
    settings = {"WANE_BUNDLES": str(tmp_path), "WANE_SESSION_HISTORY_TOKENS": str(MAX_WINDOW)}
    with live_server(**settings) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        post(http, "/v1/sessions", session="long")
        post(http, "/v1/sessions/long/tokens", tokens=tokens)
        post(http, "/v1/sessions/long/rewind", position=len(tokens) - 10)
        answer = post(http, "/v1/sessions/long/tokens", tokens=[3], top_k=5)
    assert answer["error_bound"] is None
    kept = [*tokens[-MAX_WINDOW:-10], 3]
    agrees(answer, logprobs(own, kept))


@pytest.mark.parametrize("name", ["lstm", "lonely", "matrix-memory", "odd"])
def test_states_on_a_device_are_gathered_and_padded(imported: dict[str, Imported], folder: Path, name: str) -> None:
    """The runner of a GPU, on the CPU."""
    bundle = Bundle.read(folder / name)
    runner = DeviceRunner(bundle, "cpu", 1)
    try:
        assert verify_graphs(bundle, lambda role, feeds: dict(runner.run(role, feeds))) < 1e-5
    finally:
        runner.close()


def test_a_hostile_bundle_is_not_served(graphs: Path, tmp_path: Path) -> None:
    """The loader checks the operators of a bundle that somebody hands around."""
    write(tmp_path, graphs / "gru.onnx", "gru", {})
    change(tmp_path / "gru", "step.onnx", b"Identity", b"Evilness")
    with pytest.raises(Exception, match="no operator 'Evilness'"):
        Bundle.read(tmp_path / "gru")


def change(bundle: Path, name: str, old: bytes, new: bytes) -> None:
    """Changes a file of a bundle, and its hash in the manifest."""
    import hashlib

    data = (bundle / name).read_bytes()
    assert old in data
    (bundle / name).write_bytes(data.replace(old, new))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_the_service_needs_no_torch(imported: dict[str, Imported], folder: Path) -> None:
    """Loads an imported bundle in a process in which torch cannot be imported."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; "
        "from wane.service.registry.loader import open_graphs, read; from wane.service.settings import Settings; "
        f"print(open_graphs(read(Path({str(folder / 'lstm')!r})), Settings()).runner.device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "cpu"), done.stderr


def test_imported_models_are_compared_side_by_side(
    server: LiveServer, imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, found, plot = tmp_path / "text.txt", tmp_path / "found.json", tmp_path / "plot.png"
    text.write_text(f"{WORDS[2]} {WORDS[3]} {WORDS[4]} " * 12, encoding="utf-8")
    options = ["--model=gru", "--model=lstm", f"--file={text}", f"--json={found}", f"--plot={plot}", "--window=8"]
    assert main(["compare", server.url, *options]) == 0
    gru, lstm = json.loads(found.read_text())["models"]
    assert (gru["weights"], gru["reach"], lstm["weights"], lstm["reach"]) == (None,) * 4
    sizes = [sum(4 * np.prod(one.shape) for one in imported[name].manifest.state) for name in ("gru", "lstm")]
    assert [gru["state_bytes"], lstm["state_bytes"]] == sizes and sizes[1] > 0
    assert gru["tokens"] == lstm["tokens"] == 36 and gru["by_k"]["4"] > 1
    costs = capsys.readouterr().out.partition("Costs")[2].splitlines()
    assert any(row.split()[:4] == ["gru", "-", "-", str(sizes[0])] for row in costs)
