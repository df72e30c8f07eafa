"""Tests that long work leaves the event loop turns: on other threads, or in pieces."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.service.engine_harness import MakeHarness, name_vocabulary
from wane.service.api import encode
from wane.service.api.body import filter_of, tokens_of
from wane.service.api.encode import SENT_WHOLE_BYTES, LongReply, Reply
from wane.service.api.tensors import OutputFormat, reply
from wane.service.batching.turns import HEAVY_TOKENS, TOKENS_A_TURN
from wane.service.engine.engine import LONG_DOCUMENT
from wane.service.engine.logits import Rankings, Sampler
from wane.service.engine.pending import BEGUN_AT_ONCE, step_many
from wane.service.engine.predict import WORK_OF_A_TOKEN
from wane.service.net.connection import CONNECTION
from wane.service.types.body import EventInput
from wane.service.types.predict import PredictBody
from wane.service.types.request import GenerateRequest, PredictRequest, ScoreRequest, StepRequest

NAMES = [f"item {index}" for index in range(HEAVY_TOKENS)]


def watched(monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> Callable[[], bool]:
    """Returns a function that says whether every call of a method ran on another thread than this one."""
    threads, method, here = list[int](), getattr(of, name), threading.get_ident()

    def called(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return method(*arguments, **named)

    monkeypatch.setattr(of, name, called)
    return lambda: bool(threads) and here not in threads


async def test_tokens_of_a_large_vocabulary_are_drawn_on_another_thread(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(vocabulary=name_vocabulary("events", NAMES))
    is_aside = watched(monkeypatch, Sampler, "draw")
    stream = await harness.engine.generate(GenerateRequest(tokens=(5,), max_tokens=2))
    assert len([item async for item in stream]) >= 1
    assert is_aside()


async def test_a_long_document_is_checked_on_another_thread(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    is_aside = watched(monkeypatch, harness.engine.limits, "tokens")
    assert len((await harness.engine.score(ScoreRequest((5,) * LONG_DOCUMENT))).logprobs) == LONG_DOCUMENT
    assert is_aside()


async def test_a_long_list_of_events_is_converted_on_another_thread(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(vocabulary=name_vocabulary("events", NAMES))
    is_aside = watched(monkeypatch, harness.engine.events, "tokens")
    assert len((await harness.engine.events.read(NAMES)).tokens) == len(NAMES)
    assert is_aside()


async def test_a_long_filter_is_converted_on_another_thread(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(vocabulary=name_vocabulary("events", NAMES))
    is_aside = watched(monkeypatch, harness.engine.events, "filter")
    found = await filter_of(harness.engine, PredictBody(tokens=(5,), candidates=tuple(NAMES)))
    assert found.candidates is not None and len(found.candidates) == len(NAMES)
    assert is_aside()


@pytest.mark.parametrize("kind", ["bpe", "events"])
async def test_the_garbage_collector_does_not_visit_the_tokens_of_a_request(
    make_harness: MakeHarness, kind: str
) -> None:
    engine = make_harness(vocabulary=None if kind == "bpe" else name_vocabulary("events", NAMES)).engine
    other = "a text" if kind == "bpe" else EventInput(NAMES, None)
    for sequence in (tuple([5] * 1000), tuple([5] * HEAVY_TOKENS), other):
        found = await tokens_of(engine, sequence, None)
        assert len(found.tokens) > 1 and len(gc.get_referents(found.tokens)) <= 1  # its type


async def test_predictions_from_many_tokens_begin_in_several_turns(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    turn, turns, of = 0, list[int](), Rankings.of

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    def noted(*arguments: Any) -> Any:
        turns.append(turn)
        return of(*arguments)

    monkeypatch.setattr(Rankings, "of", noted)
    counting = asyncio.create_task(count())
    answers = await harness.engine.predict_many([PredictRequest((5,) * 1000)] * 64)
    counting.cancel()
    assert len(answers) == len(turns) == 64
    assert max(map(turns.count, turns)) <= 2 * TOKENS_A_TURN // (WORK_OF_A_TOKEN * 1000)


async def test_the_steps_of_one_call_begin_in_several_turns() -> None:
    turn, turns = 0, list[int]()

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    def submit(request: StepRequest) -> Any:
        turns.append(turn)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result(request.session)
        return done

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)  # the counting begins
    steps = [StepRequest(f"s{index}", (5,)) for index in range(256)]
    answers: list[Any] = [*await step_many(submit, steps)]
    counting.cancel()
    assert answers == [step.session for step in steps]
    assert max(map(turns.count, turns)) <= BEGUN_AT_ONCE


async def sent(response: Any, scope: Mapping[str, object] = {}) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await response(scope, None, send)
    return messages


@pytest.mark.parametrize("values", [10, 10**6])
async def test_an_answer_of_over_1_mib_is_sent_while_it_is_made(values: int) -> None:
    document = {"logprobs": [-0.123456] * values, "choices": [{"text": "a" * 20}] * 3}
    response = await encode.long_reply(document)
    assert type(response) is (LongReply if values > 10 else Reply)
    start, *parts = await sent(response)
    assert (b"content-length" in dict(start["headers"])) is (values == 10)
    assert json.loads(b"".join(part["body"] for part in parts)) == document
    assert max(len(part["body"]) for part in parts) < 2 * SENT_WHOLE_BYTES


LONG = {"logprobs": [-0.123456] * 10**6}


async def test_a_client_of_http_1_0_gets_a_long_answer_with_its_length() -> None:
    response = await encode.long_reply(LONG)
    start, part = await sent(response, {"http_version": "1.0"})
    assert json.loads(part["body"]) == LONG and not part.get("more_body")
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(part["body"])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_rest_of_a_long_answer_is_not_made_for_a_client_that_left(version: str) -> None:
    connection, here = SimpleNamespace(has_ended=False), SimpleNamespace(fields={})
    rest = iter([b"a", b"b", b"c"])

    def made() -> Iterator[bytes]:
        for piece in rest:
            connection.has_ended = piece == b"b"
            yield piece

    scope = {"http_version": version, "state": {CONNECTION: connection}, "wane.context": here}
    messages = await sent(LongReply([b"begun"], made(), [encode.CONTENT_TYPE]), scope)
    assert [one.get("body") for one in messages] == ([] if version == "1.0" else [None, b"begun", b"a"])
    assert list(rest) == [b"c"] and here.fields == {"error": "abandoned"}


@pytest.mark.parametrize("binary", [True, False])
async def test_large_logits_are_sent_row_by_row(binary: bool) -> None:
    rows = [np.arange(100_000, dtype=np.float32) + index for index in range(8)]
    response = await reply({"model_name": "m"}, [OutputFormat("logits", binary)], {"logits": rows})
    start, *parts = await sent(response)
    body = b"".join(part["body"] for part in parts)
    assert max(len(part["body"]) for part in parts) < 2 * SENT_WHOLE_BYTES < len(body)
    size = int(dict(start["headers"]).get(b"inference-header-content-length", len(body)))
    output = json.loads(body[:size])["outputs"][0]
    assert output["shape"] == [8, 100_000]
    found = np.frombuffer(body[size:], np.float32) if binary else np.array(output["data"], np.float32)
    assert (found.reshape(8, -1) == np.stack(rows)).all()
