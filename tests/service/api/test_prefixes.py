"""Tests of kept states of prompts over HTTP: the fields of the answers, and the owners."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.service.engine_harness import EngineHarness
from tests.service.server_harness import served

TOKENS = [2 + index * 7 % 200 for index in range(300)]
KEYS = {"ann": "a" * 40, "bob": "b" * 40}
ASKED: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "/v1/predict": lambda tokens: {"tokens": tokens, "mode": "recurrent"},
    "/v1/generate": lambda tokens: {"tokens": tokens, "max_tokens": 1},
    "/v1/completions": lambda tokens: {"model": "fake", "prompt": tokens, "max_tokens": 1},
}


def cached(answer: dict[str, Any]) -> int:
    found: int = answer.get("cached_tokens", 0)
    if "usage" in answer:
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.fixture
async def clients(harness: EngineHarness) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """A client for each API key of a server."""
    async with served(harness, api_keys=",".join(f"{name}:{key}" for name, key in KEYS.items())) as server:
        found = {
            name: httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {key}"})
            for name, key in KEYS.items()
        }
        yield found
        for client in found.values():
            await client.aclose()


async def ask(client: httpx.AsyncClient, route: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.post(route, json=ASKED[route](tokens) | more)).raise_for_status().json()
    return answer


@pytest.mark.parametrize("first", ASKED)
@pytest.mark.parametrize("second", ASKED)
async def test_a_route_continues_what_another_has_read(
    clients: dict[str, httpx.AsyncClient], first: str, second: str
) -> None:
    assert cached(await ask(clients["ann"], first, TOKENS[:100])) == 0
    assert cached(await ask(clients["ann"], second, TOKENS[:120])) == 100


@pytest.mark.parametrize("route", ASKED)
async def test_keys_never_meet(clients: dict[str, httpx.AsyncClient], harness: EngineHarness, route: str) -> None:
    for other in ASKED:
        await ask(clients["ann"], other, TOKENS)
    harness.runner.calls.clear()
    answer = await ask(clients["bob"], route, TOKENS)
    assert cached(answer) == 0
    assert [sum(map(len, rows)) for _, rows in harness.runner.calls] == [1 + len(TOKENS)]
    assert route == "/v1/completions" or "cached_tokens" not in answer


async def test_tensors_use_kept_states(clients: dict[str, httpx.AsyncClient], harness: EngineHarness) -> None:
    await ask(clients["ann"], "/v1/predict", TOKENS[:100])
    harness.runner.calls.clear()
    tensor = {"name": "tokens", "shape": [1, 120], "datatype": "INT64", "data": TOKENS[:120]}
    body = {"inputs": [tensor], "parameters": {"mode": "recurrent"}}
    for client, runs in ((clients["bob"], [121]), (clients["ann"], [20, 0])):
        (await client.post("/v2/models/fake/infer", json=body)).raise_for_status()
        assert [sum(map(len, rows)) for _, rows in harness.runner.calls] == runs
        harness.runner.calls.clear()


async def test_usage_counts_each_prompt_once(clients: dict[str, httpx.AsyncClient]) -> None:
    await ask(clients["ann"], "/v1/predict", TOKENS[:100])
    wanted = {"model": "fake", "prompt": [TOKENS[:110], TOKENS[50:150]], "max_tokens": 2, "n": 3}
    answer = (await clients["ann"].post("/v1/completions", json=wanted)).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == 210
    assert cached(answer) == 100


async def test_a_streamed_completion_names_the_cached_tokens_in_its_usage(
    clients: dict[str, httpx.AsyncClient],
) -> None:
    await ask(clients["ann"], "/v1/predict", TOKENS[:100])
    wanted = {
        "model": "fake",
        "prompt": TOKENS[:110],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = (await clients["ann"].post("/v1/completions", json=wanted)).raise_for_status().text.split("\n\n")
    assert cached(json.loads(lines[-3].removeprefix("data: "))) == 100


async def test_a_completion_of_a_session_uses_no_kept_state(clients: dict[str, httpx.AsyncClient]) -> None:
    await ask(clients["ann"], "/v1/predict", TOKENS[:100])
    (await clients["ann"].post("/v1/sessions", json={"session": "s"})).raise_for_status()
    answer = await ask(clients["ann"], "/v1/completions", TOKENS[:110], session="s", expected_position=0)
    assert cached(answer) == 0
    assert answer["position"] == 110


async def test_metrics_show_the_hit_rate_and_the_bytes(
    clients: dict[str, httpx.AsyncClient], harness: EngineHarness
) -> None:
    await ask(clients["ann"], "/v1/predict", TOKENS[:100])
    await ask(clients["ann"], "/v1/predict", TOKENS[:120])
    metrics = harness.metrics.render()[0].decode()
    slot = float(harness.engine.state_cache.slot_bytes)
    assert 'wane_prefix_lookups_total{model="fake",outcome="hit"} 1.0' in metrics
    assert 'wane_prefix_lookups_total{model="fake",outcome="miss"} 1.0' in metrics
    assert 'wane_prefix_cached_tokens_total{model="fake"} 101.0' in metrics
    assert f'wane_prefix_bytes{{model="fake"}} {2 * slot}' in metrics
