"""Tests that requests to a model with 100,000 events, which once held the event loop, no longer do.

The figure is the processor time of the event loop's thread in one turn of the event loop. Other work on the machine can
only make it longer, so a test passes if one of several attempts has short turns alone. `benchmarks/stall` measures the
largest requests to all routes."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service import engine_harness
from tests.service.engine_harness import HIDDEN, FakeRunner, MakeHarness, name_vocabulary
from tests.service.server_harness import served
from wane.models.manifest import Role
from wane.models.vocabulary import Vocabulary
from wane.service.api.choices import WORK_OF_A_PLACE, Choice
from wane.service.batching.turns import TOKENS_A_TURN
from wane.service.engine.pending import BEGUN_AT_ONCE
from wane.service.engine.step import SessionSteps
from wane.service.net.connection import LENGTH
from wane.service.runners.runner import HIDDENS, LOG_SUM_EXP, TOP_IDS, TOP_LOGITS, Array
from wane.service.settings import Settings

NAMES = [f"item/{index}" for index in range(100_000)]
LIMITS = Settings()
SIZES = {
    name: getattr(LIMITS, name)
    for name in ("max_batch_size", "max_batch_inputs", "max_scored_tokens", "top_k_limit", "state_budget_bytes")
}

Body = dict[str, Any]


class QuickRunner(FakeRunner):
    """A runner that takes hardly any time: every distribution is the same."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(vocabulary_size)
        row = self.head[:, 0]
        ids = np.argsort(-row, kind="stable")[: self.top]
        total = np.asarray(np.log(np.exp(row).sum()))
        self._top: dict[str, Array] = {TOP_IDS: ids, TOP_LOGITS: row[ids], LOG_SUM_EXP: total}

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if role != "scan":
            return super().run(role, feeds)
        shape, states = feeds["tokens"].shape, {name: feeds[name] for name in ("layers.0.h", "layers.0.c")}
        outputs: dict[str, Array] = {f"next.{name}": state for name, state in states.items()}
        outputs[HIDDENS] = np.zeros((*shape, HIDDEN), np.float32)
        return outputs | {"logprobs": np.zeros(shape, np.float32), "hidden": states["layers.0.h"]}

    def _logits(self, hidden: Array) -> NDArray[np.float32]:
        return np.repeat(self.head[None, :, 0], len(hidden), 0)

    def _with_top(self, outputs: dict[str, Array]) -> dict[str, Array]:
        rows = len(outputs["logits"])
        return outputs | {name: np.repeat(value[None], rows, 0) for name, value in self._top.items()}


def inference(rows: int) -> Body:
    tensor = {"name": "tokens", "shape": [rows, 1], "datatype": "INT64", "data": [[5]] * rows}
    return {"inputs": [tensor], "outputs": [{"name": "logits"}]}


REQUESTS: dict[str, Callable[[str], list[tuple[str, Body]]]] = {
    "a completion of 64 samples": lambda model: [
        ("/v1/completions", {"model": model, "prompt": [5], "n": 64, "max_tokens": 1, "logprobs": 5})
    ],
    "256 inputs with filters": lambda _: [
        ("/v1/predict", {"inputs": [[5]] * 256, "candidates": NAMES[:9999], "exclude": NAMES[:9999]})
    ],
    "logits as JSON": lambda model: [(f"/v2/models/{model}/infer", inference(32))],
    "four scores of 262,144 tokens": lambda _: [("/v1/score", {"tokens": [5] * LIMITS.max_scored_tokens})] * 4,
}
"""Requests that are sent at the same time, by the model's name."""

MOST_MS = {
    "a completion of 64 samples": 12,
    "256 inputs with filters": 40,
    "logits as JSON": 40,
    "four scores of 262,144 tokens": 20,
}
"""The longest accepted turn: at least three times as long as it takes now, and shorter than it once took."""
ATTEMPTS = 10


@cache
def events() -> Vocabulary:
    return name_vocabulary("events", NAMES)


@pytest.fixture
def turns_ms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list to which each turn of the event loop appends its processor time in milliseconds."""
    run_once, found = asyncio.BaseEventLoop._run_once, list[float]()  # type: ignore[attr-defined]

    def measured(loop: asyncio.BaseEventLoop) -> None:
        begun_s = time.thread_time()
        run_once(loop)
        found.append(1e3 * (time.thread_time() - begun_s))

    monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", measured)
    return found


def send(url: str, path: str, body: Body) -> int:
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        return client.post(path, json=body).status_code


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_large_request_does_not_hold_the_event_loop(
    make_harness: MakeHarness, turns_ms: list[float], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(engine_harness, "FakeRunner", QuickRunner)
    harness = make_harness(vocabulary=events(), **SIZES)
    wanted = REQUESTS[name](harness.engine.name)
    longest_ms: list[float] = []
    async with served(harness, request_timeout_ms=60_000) as server:
        gc.collect()
        gc.freeze()  # as the server does: the objects that exist before the first request are not collected
        try:
            while len(longest_ms) < ATTEMPTS and min(longest_ms, default=math.inf) > MOST_MS[name]:
                await asyncio.sleep(0)  # the turn of this test's own work ends
                turns_ms.clear()
                answered = await asyncio.gather(
                    *(asyncio.to_thread(send, server.url, path, body) for path, body in wanted)
                )
                assert set(answered) == {200}
                longest_ms.append(max(turns_ms))
        finally:
            gc.unfreeze()
    assert min(longest_ms) <= MOST_MS[name], longest_ms


@pytest.mark.parametrize("value", [b"0" * 65_000, b" " * 30_000 + b"0" * 30_000], ids=["zeros", "spaces and zeros"])
def test_a_long_invalid_content_length_is_refused_quickly(value: bytes) -> None:
    """Each connection searches the head of its request on the event loop."""
    head, taken_ms = b"\r\ncontent-length:" + value + b"x\r\n", list[float]()
    while len(taken_ms) < ATTEMPTS and min(taken_ms, default=math.inf) > 1:
        begun_s = time.thread_time()
        assert LENGTH.search(head) is None
        taken_ms.append(1e3 * (time.thread_time() - begun_s))
    assert min(taken_ms) <= 1, taken_ms


async def test_calls_of_many_steps_begin_few_steps_in_a_turn(
    make_harness: MakeHarness, turns_ms: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four calls of 256 steps that create their sessions, at the same time."""
    begun, step = Counter[int](), SessionSteps.step

    def counted(*arguments: Any, **named: Any) -> Any:
        begun[len(turns_ms)] += 1
        return step(*arguments, **named)

    monkeypatch.setattr(SessionSteps, "step", counted)
    calls = [
        {"steps": [{"session": f"new-{call}-{index}", "tokens": [5], "create": True} for index in range(256)]}
        for call in range(4)
    ]
    async with served(make_harness(**SIZES), request_timeout_ms=60_000) as server:
        begun.clear()
        answered = await asyncio.gather(
            *(asyncio.to_thread(send, server.url, "/v1/sessions/tokens", body) for body in calls)
        )
    assert answered == [200] * 4
    assert sum(begun.values()) == 4 * 256
    assert max(begun.values()) <= 4 * BEGUN_AT_ONCE


async def test_choices_list_few_tokens_of_their_prompts_in_a_turn(
    make_harness: MakeHarness, turns_ms: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight echoed prompts whose tokens have lists of the most probable tokens."""
    listed, add = Counter[int](), Choice._add

    def counted(choice: Choice, *arguments: Any) -> None:
        listed[len(turns_ms)] += 1 + len(arguments[3])
        add(choice, *arguments)

    monkeypatch.setattr(Choice, "_add", counted)
    body = {"model": "fake", "prompt": [[5] * 256] * 8, "max_tokens": 0, "echo": True, "logprobs": 5}
    async with served(make_harness(**SIZES), request_timeout_ms=60_000) as server:
        assert await asyncio.to_thread(send, server.url, "/v1/completions", body) == 200
    assert sum(listed.values()) >= 8 * 256 * 5
    assert WORK_OF_A_PLACE * max(listed.values()) <= TOKENS_A_TURN
