"""Tests that a server answers for every new kind of layer: steps, windows, sessions, rewinds, comparisons, versions,
scores in chunks, and a cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.models.bundles import export_words
from tests.service.live_server import TIMEOUT_S, LiveServer, live_server, post
from wane.models.architecture import Architecture
from wane.models.bundle import Bundle
from wane.models.manifest import CACHE_BINS, CacheModel
from wane.models.networks import Network
from wane.models.reference import Reference

RESIDUAL = {"block": "residual", "units": 8, "feed_forward": 5}
CONVOLUTION = {"kind": "convolution", "channels": "full"} | RESIDUAL
STACKS: dict[str, list[dict[str, Any]]] = {
    "fixed-window": [{"kind": "convolution", "units": 6, "kernel_size": 4, "channels": "full", "activation": "tanh"}],
    "wavenet": [
        CONVOLUTION | {"kernel_size": 2, "dilation": 2**i, "activation": "wavenet", "skip": True} for i in (0, 1)
    ],
    "attention": [{"kind": "attention", "window": 3, "heads": 2} | RESIDUAL] * 2,
    "leaky": [{"kind": "leaky", "units": 6, "gate_cap": 0.7}],
    "lru": [{"kind": "lru", "units": 6}],
    "mixed": [CONVOLUTION | {"kernel_size": 3, "activation": "relu"}, {"kind": "gated", "gate_cap": 0.7} | RESIDUAL],
}
FINITE = ("fixed-window", "wavenet", "attention")
WINDOW = 24


def write(folder: Path, name: str, version: str, seed: int) -> Bundle:
    """Writes a bundle of random weights. The model "mixed" has a cache."""
    fields = {"vocabulary_size": 11, "embedding": 6, "layers": STACKS[name]}
    plain = {} if STACKS[name][0].get("block") is None else {"norm_epsilon": 0.25}
    model = Architecture.model_validate(fields | plain)
    torch.manual_seed(seed)
    network = Network(model).eval()
    if name == "lru":
        with torch.no_grad():
            network.get_parameter("layers.0.cell.nu").clamp_(min=-0.5)
    row = [0.75, 0.25, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    weights = tuple(tuple(row[index < len(CACHE_BINS) + 1]) for index in range((len(CACHE_BINS) + 1) ** 2))
    export_words(
        folder / name,
        model,
        {each: tensor.numpy() for each, tensor in network.weights().items()},
        version=version,
        window=12,
        max_window=WINDOW,
        torch_network=network,
        cache=CacheModel(length=8, weights=weights) if name == "mixed" else None,  # type: ignore[arg-type]
    )
    return Bundle.read(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles")
    for name in STACKS:
        write(path, name, "1", 1)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    settings = {"WANE_BUNDLES": str(folder), "WANE_DEFAULT_MODEL": "attention", "WANE_MODEL_POLL_INTERVAL_S": "1"}
    with live_server(**settings) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        yield client


def likely(answer: dict[str, Any]) -> list[Any]:
    """Returns the ids and the log-probabilities of the listed tokens."""
    return [(one["token_id"], one["logprob"]) for one in answer["predictions"]]


def expected(bundle: Bundle, tokens: list[int]) -> tuple[int, float]:
    """Returns the most probable token after the start token and `tokens`, and its log-probability, by the oracle."""
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    state = reference.zero_state(1)
    for token in (*bundle.manifest.start_tokens, *tokens):
        logits, _, state = reference.step(np.array([token]), state)
    probabilities = np.exp(logits[0] - logits[0].max())
    probabilities /= probabilities.sum()
    return int(probabilities.argmax()), float(np.log(probabilities.max()))


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_served(http: httpx.Client, folder: Path, name: str) -> None:
    """Predictions in both modes, a session with a rewind, and scores in order and in chunks."""
    bundle, ask = Bundle.read(folder / name), {"model": name, "top_k": 3}
    tokens: list[int] = np.random.default_rng(3).integers(2, 11, size=40).tolist()
    whole = post(http, "/v1/predict", tokens=tokens, mode="recurrent", **ask)
    if bundle.manifest.cache is None:
        token, logprob = expected(bundle, tokens)
        assert likely(whole)[0] == (token, pytest.approx(logprob, abs=1e-5))
    else:
        assert whole["cache_tokens"] == bundle.manifest.cache.length

    part = post(http, "/v1/predict", tokens=tokens, mode="window", window=WINDOW, **ask)
    if name in FINITE:
        assert (part["error_bound"], part["top1_proved"], likely(part)) == (0, True, likely(whole))
        short = post(http, "/v1/predict", tokens=tokens, mode="window", window=1, **ask)
        assert short["error_bound"] > 0.1
        assert likely(short) != likely(whole)
    else:
        assert 0 < part["error_bound"] < 0.5
        assert np.allclose(np.array(likely(part))[:, 1], np.array(likely(whole))[:, 1], atol=0.5)

    session = f"/v1/sessions/{name}"
    post(http, "/v1/sessions", session=name, model=name)
    for start, end in ((0, 25), (25, 26), (26, 40)):
        answer = post(http, f"{session}/tokens", tokens=tokens[start:end], top_k=3)
        assert (answer["position"], answer["error_bound"]) == (end, 0)
    assert np.allclose(likely(answer), likely(whole), atol=1e-5)
    post(http, f"{session}/rewind", position=30)
    again = post(http, f"{session}/tokens", tokens=tokens[30:], top_k=3)
    assert again["position"] == 40
    assert np.allclose(likely(again), likely(whole), atol=1e-5 if name in FINITE else 0.1)

    long = tokens * 60
    in_order = post(http, "/v1/score", model=name, tokens=long)
    in_chunks = post(http, "/v1/score", model=name, tokens=long, method="parallel", tolerance=0.5)
    apart = np.abs(np.array(in_order["logprobs"], float) - np.array(in_chunks["logprobs"], float))
    assert len(apart) == len(long)
    assert name not in FINITE or in_chunks["error_bound"] == 0
    assert apart.max() <= (1e-6 if name in FINITE else 0.1)


def test_stacks_are_compared(http: httpx.Client) -> None:
    tokens = np.random.default_rng(5).integers(2, 11, size=40).tolist()
    answer = post(http, "/v1/compare", tokens=tokens, models=list(STACKS), windows=[4, 20], repeat=2)
    assert [one["model"] for one in answer["models"]] == list(STACKS)
    for one in answer["models"]:
        (short, long) = one["windows"]
        assert long["error_bound"] < short["error_bound"] or short["error_bound"] == 0, one["model"]


def test_the_models_page_lists_the_layers(http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    for name, layers in STACKS.items():
        assert cards[name]["family"] == layers[-1]["kind"]
        assert [layer["kind"] for layer in cards[name]["parameters"]["layers"]] == [layer["kind"] for layer in layers]


def test_a_session_continues_with_a_new_version(http: httpx.Client, folder: Path) -> None:
    tokens = np.random.default_rng(7).integers(2, 11, size=20).tolist()
    post(http, "/v1/sessions", session="kept", model="attention")
    post(http, "/v1/sessions/kept/tokens", tokens=tokens)
    bundle = write(folder, "attention", "2", 2)
    deadline = time.monotonic() + TIMEOUT_S
    while post(http, "/v1/predict", model="attention", tokens=[3])["model_version"] != "2":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    answer = post(http, "/v1/sessions/kept/tokens", tokens=[4], top_k=1)
    token, logprob = expected(bundle, [*tokens, 4])
    assert answer["position"] == 21
    assert likely(answer) == [(token, pytest.approx(logprob, abs=1e-5))]
