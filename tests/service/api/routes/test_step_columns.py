"""Tests that an answer in the columns format, which has one list for each field, equals the documents of the same
steps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import Any

import httpx
import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.server_harness import Client, Document, ServerHarness, in_two, post, served

PATH = "/v1/sessions/tokens"
KEYS = {"alice": "alice-0123456789abcdefgh", "bob": "bobby-0123456789abcdefgh"}
VARIABLE = ("latency", "request_id")


@pytest.fixture
async def server(harness: EngineHarness) -> AsyncIterator[ServerHarness]:
    """A server with the sessions a, b and c. Each session has received one token."""
    async with served(harness) as server:
        yield server


def body(*steps: tuple[str, object], form: str = "columns", **fields: Any) -> Document:
    """Returns a request body with one-token steps. Adds `fields` to every step."""
    document: Document = {"steps": [{"session": name, "tokens": [token], **fields} for name, token in steps]}
    return document | {"format": form}


def documents(columns: Document) -> list[Document]:
    """Converts an answer in the columns format to a list with one document for each step."""
    names = [name for name in columns if name not in ("token_id", "logprob", "error", "latency")]
    found: list[Document] = []
    for row, error in enumerate(columns["error"]):
        if error is not None:
            found.append({"error": without_time(error)})
            continue
        document = {name: columns[name][row] for name in names}
        found.append(document | {"predicted": [*zip(columns["token_id"][row], columns["logprob"][row], strict=True)]})
    return found


def comparable(result: Document, columns: Document) -> Document:
    """Converts `result`, a step's document, to the form in which `documents` returns a step. Keeps only the fields of
    `columns`, an answer in the columns format."""
    if "error" in result:
        return {"error": without_time(result["error"])}
    names = [name for name in columns if name not in ("token_id", "logprob", "error", "latency")]
    predicted = [(one["token_id"], one["logprob"]) for one in result["predictions"]]
    return {name: result.get(name) for name in names} | {"predicted": predicted}


def without_time(document: Document) -> Document:
    return {name: value for name, value in document.items() if name not in VARIABLE}


async def positions(harness: EngineHarness) -> list[int]:
    return [(await harness.engine.get_session(name)).position for name in "abc"]


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "in two packets"])
async def test_columns_and_documents_are_equal(make_harness: MakeHarness, whole: bool) -> None:
    steps = [("a", 6), ("nowhere", 6), ("b", 300_000), ("c", 8)]
    answers = []
    for form in ("columns", "documents"):
        async with served(make_harness()) as server:
            request = post(body(*steps, form=form), path=PATH)
            status, document = await (await Client.of(server)).ask(*([request] if whole else in_two(request)))
            assert status == 200
            answers.append(document)
    columns, plain = answers
    assert documents(columns) == [comparable(result, columns) for result in plain["results"]]
    assert columns["session"] == [name for name, _ in steps]
    assert [error and error["code"] for error in columns["error"]] == [None, "unknown_session", "invalid_request", None]
    assert columns["position"] == [2, None, None, 2]
    assert columns["latency"].keys() == {"queue_ms", "compute_ms", "total_ms"}


async def test_conflicts_and_replays_are_in_the_rows_of_their_steps(server: ServerHarness) -> None:
    client = await Client.of(server)
    await client.ask(post(body(("a", 6), ("b", 6)), path=PATH))
    steps = [
        {"session": "a", "tokens": [6], "expected_position": 1},
        {"session": "b", "tokens": [7], "expected_position": 1},
        {"session": "c", "tokens": [7], "expected_position": 1},
    ]
    status, columns = await client.ask(post({"steps": steps, "format": "columns"}, path=PATH))
    assert status == 200
    assert columns["replayed"] == [True, None, False]
    assert columns["position"] == [2, None, 2]
    assert (columns["error"][1]["code"], columns["error"][1]["position"]) == ("position_conflict", 2)


async def test_steps_with_options_are_answered_in_columns(server: ServerHarness) -> None:
    steps = [
        {"session": "a", "tokens": [6, 7], "top_k": 2},
        {"session": "b", "input": "xy"},
        {"session": "a", "tokens": [8], "idempotency_key": "k", "mode": "window"},
    ]
    status, columns = await (await Client.of(server)).ask(post({"steps": steps, "format": "columns"}, path=PATH))
    assert (status, columns["position"], columns["error"]) == (200, [3, 3, 4], [None] * 3)
    assert [len(ids) for ids in columns["token_id"]] == [2, 5, 5]
    assert columns["mode"] == ["recurrent", "recurrent", "window"]


async def test_steps_that_create_sessions_are_answered_in_columns(server: ServerHarness) -> None:
    steps = [
        {"session": "new", "tokens": [6], "create": True},
        {"session": "a", "tokens": [6], "create": True},
        {"session": "new", "tokens": [7]},
        {"session": "other", "tokens": [6], "create": True, "expected_position": 3},
        {"session": "last", "tokens": [6], "create": True, "expected_position": 0},
    ]
    status, columns = await (await Client.of(server)).ask(post({"steps": steps, "format": "columns"}, path=PATH))
    assert (status, columns["created"]) == (200, [True, None, None, None, True])
    assert columns["position"] == [1, 2, 2, None, 1]
    assert [error and error["code"] for error in columns["error"]] == [None, None, None, "unknown_session", None]


def test_a_step_creates_a_session_of_the_given_model(http: httpx.Client) -> None:
    names = [f"{token_hex(4)}-{index}" for index in range(3)]
    step = {"tokens": [5], "create": True}
    results = http.post(
        PATH, json={"steps": [step | {"session": names[0]}, step | {"session": names[1], "model": "lstm"}]}
    ).json()["results"]
    assert [(one["model"], one["created"]) for one in results] == [("gated-stable-64", True), ("lstm", True)]
    single = http.post(f"/v1/sessions/{names[2]}/tokens", json=step | {"model": "rnn-stable"}).json()
    assert (single["model"], single["created"]) == ("rnn-stable", True)
    # An existing session keeps its model. A step that names another model is refused.
    again = http.post(f"/v1/sessions/{names[1]}/tokens", json=step).json()
    assert (again["model"], again["position"], "created" in again) == ("lstm", 2, False)
    for refused in (
        http.post(f"/v1/sessions/{names[1]}/tokens", json=step | {"model": "gated-stable"}).json(),
        http.post(PATH, json={"steps": [step | {"session": names[1], "model": "gated-stable"}]}).json()["results"][0][
            "error"
        ],
    ):
        assert (refused["status"], refused["field"]) == (422, "model")
    # A step of a deleted session creates the session again, with the default model.
    http.delete(f"/v1/sessions/{names[1]}").raise_for_status()
    restarted = http.post(f"/v1/sessions/{names[1]}/tokens", json=step).json()
    assert (restarted["model"], restarted["created"]) == ("gated-stable-64", True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": "b", "tokens": [6.5]},
        {"session": "b", "tokens": [True]},
        {"session": "b", "tokens": [6], "expected_position": 2**63},
        {"session": "b", "tokens": [6], "temperature": 1},
        {"session": 7, "tokens": [6]},
        {"tokens": [6]},
        {"session": "b"},
        7,
    ],
    ids=json.dumps,
)
async def test_an_invalid_step_refuses_the_whole_call(server: ServerHarness, wrong: object) -> None:
    answers = []
    for first in ({"session": "a", "tokens": [6]}, {"session": "a", "tokens": [6], "top_k": 5}):
        for form in ("columns", "documents"):
            request = post({"steps": [first, wrong], "format": form}, path=PATH)
            status, document = await (await Client.of(server)).ask(request)
            answers.append((status, without_time(document)))
    assert answers[0][0] == 422
    assert answers == [answers[0]] * 4
    assert await positions(server.harness) == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"session": "no/slash", "tokens": [6]}, "invalid_request"),
        ({"session": "b", "tokens": []}, "invalid_request"),
        ({"session": "b", "tokens": [-1]}, "invalid_request"),
        ({"session": "b", "tokens": [2**63]}, "invalid_request"),
        ({"session": "b", "tokens": [6], "expected_position": -1}, "invalid_request"),
        ({"session": "b", "tokens": [6], "expected_position": 2**62}, "position_conflict"),
    ],
    ids=json.dumps,
)
async def test_a_step_with_invalid_values_fails_alone(server: ServerHarness, wrong: Document, code: str) -> None:
    for end, first in enumerate(({"session": "a", "tokens": [6]}, {"session": "a", "tokens": [6], "top_k": 5}), 2):
        request = post({"steps": [first, wrong], "format": "columns"}, path=PATH)
        status, columns = await (await Client.of(server)).ask(request)
        assert (status, columns["position"]) == (200, [end, None])
        assert columns["error"][1]["code"] == code
    assert await positions(server.harness) == [3, 1, 1]


@pytest.mark.parametrize(
    "request_",
    [b"{", b"[]", {"steps": []}, {"steps": {}}, {"steps": [], "format": "columns"}, body(("a", 6), form="rows")],
    ids=["not JSON", "a list", "no steps", "an object", "no steps in columns", "an unknown format"],
)
async def test_an_invalid_call_is_refused(server: ServerHarness, request_: object) -> None:
    status, document = await (await Client.of(server)).ask(post(request_, path=PATH))
    assert (status in (400, 422), document["status"]) == (True, status)
    assert await positions(server.harness) == [1, 1, 1]


async def test_a_key_may_step_only_its_own_sessions(harness: EngineHarness) -> None:
    async with served(harness, api_keys=",".join(f"{name}:{key}" for name, key in KEYS.items())) as server:
        held = {name: f"authorization: Bearer {key}" for name, key in KEYS.items()}
        client = await Client.of(server)
        for name in KEYS:
            assert (await client.ask(post({"session": "mine"}, held[name], path="/v1/sessions")))[0] == 201
            assert (await client.ask(post(body(("mine", 5)), held[name], path=PATH)))[0] == 200
        assert (await client.ask(post({"session": "hers"}, held["alice"], path="/v1/sessions")))[0] == 201
        await client.ask(post(body(("hers", 5)), held["alice"], path=PATH))
        _, columns = await client.ask(post(body(("mine", 6), ("hers", 6), ("a", 6)), held["bob"], path=PATH))
        assert columns["session"] == ["mine", "hers", "a"]
        assert columns["position"] == [2, None, None]
        assert [error and error["code"] for error in columns["error"]] == [None, *["unknown_session"] * 2]
        _, columns = await client.ask(post(body(("mine", 6), ("hers", 6)), held["alice"], path=PATH))
        assert columns["position"] == [2, 2]
    assert await positions(harness) == [1, 1, 1]


async def test_columns_have_less_than_0_4_times_the_bytes_of_documents(
    server: ServerHarness, harness: EngineHarness
) -> None:
    names = [f"session-{index:04}" for index in range(64)]
    for name in names:
        await harness.engine.create_session(name)
    lengths = {}
    client = await Client.of(server)
    for form in ("columns", "documents"):
        await client.send_packets(post(body(*[(name, 6) for name in names], form=form), path=PATH))
        status, headers, _ = await client.read_response()
        assert status == 200
        lengths[form] = int(headers["content-length"])
    print(f"64 steps: {lengths['columns']} bytes in columns, {lengths['documents']} bytes as documents")  # noqa: T201
    assert lengths["columns"] < 0.4 * lengths["documents"]


def test_sessions_of_several_models_are_stepped_in_one_call(http: httpx.Client) -> None:
    models = ["lstm", "gated-stable", "rnn-stable", "lstm"]
    names = [http.post("/v1/sessions", json={"model": model}).json()["session"] for model in models]
    alone = [http.post("/v1/sessions", json={"model": model}).json()["session"] for model in models]
    for position in (1, 2, 3):
        columns = http.post(PATH, json=body(*[(name, 4 + position) for name in names])).json()
        assert columns["model"] == models
        assert (columns["position"], columns["error"]) == ([position] * 4, [None] * 4)
        for row, name in enumerate(alone):
            single = http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [4 + position]}).json()
            expected = {one["token_id"]: pytest.approx(one["logprob"], abs=1e-4) for one in single["predictions"]}
            assert dict(zip(columns["token_id"][row], columns["logprob"][row], strict=True)) == expected
            assert columns["error_bound"][row] == single["error_bound"]


async def test_a_disconnection_cancels_queued_steps(make_harness: MakeHarness) -> None:
    harness = make_harness(max_batch_size=1)
    async with served(harness) as server:
        harness.runner.busy.clear()
        harness.runner.gate.clear()
        client = await Client.of(server)
        await client.send_packets(post(body(("a", 6), ("b", 6), ("c", 6)), path=PATH))
        await harness.runner.until_busy()
        client.writer.close()
        await server.models.epochs.depart()
        harness.runner.gate.set()
        await harness.engine.drain()
        assert await positions(harness) == [2, 1, 1]
