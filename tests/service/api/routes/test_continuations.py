"""Tests of continuations over a real socket."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness, name_vocabulary
from tests.service.problems import assert_problem
from tests.service.server_harness import served
from wane.service.types.request import StepRequest

PATH = "/v1/sessions/a/continuations"
KEYS = {name: f"{name}-0123456789abcdefgh" for name in ("alice", "bob")}


async def test_texts_and_token_ids_are_answered_in_their_order(harness: EngineHarness) -> None:
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as client:
        tokens = [*harness.vocabulary.encode("ab")]
        answer = await client.post(PATH, json={"continuations": ["ab", tokens, [7]], "top_k": 2})
        assert answer.status_code == 200, answer.text
        document = answer.json()
        assert (document["session"], document["position"], document["model"]) == ("a", 1, "fake")
        text, ids, single = document["results"]
        assert (text["tokens"], text["logprobs"], text["predictions"]) == (tokens, ids["logprobs"], ids["predictions"])
        assert [one["position"] for one in document["results"]] == [3, 3, 2]
        assert [len(one["predictions"]) for one in document["results"]] == [2, 2, 2]
        assert [len(one["error_bounds"]) for one in document["results"]] == [2, 2, 1]
        stepped = await client.post("/v1/sessions/a/tokens", json={"tokens": [7], "top_k": 2})
        assert stepped.json()["predictions"] == single["predictions"]
        assert server.counted(200, "/v1/sessions/{session}/continuations") == 1


async def test_events_are_given_by_name(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=("open", "read", "close", "save")))
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as client:
        body = {"continuations": [{"events": ["open", "nothing"]}, {"events": ["read"]}], "unknown": "skip"}
        first, second = (await client.post(PATH, json=body)).json()["results"]
        assert (first["tokens"], first["unknown"], second["tokens"]) == ([2], ["nothing"], [3])
        refused = await client.post(PATH, json=body | {"unknown": "refuse"})
        document = assert_problem(refused, 422, "invalid_request")
        assert document["field"] == "continuations[0]"
        assert "'nothing'" in document["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code", "field", "detail"),
    [
        ({}, 422, "invalid_request", "continuations", "continuations"),
        ({"continuations": []}, 422, "invalid_request", "continuations", "at least 1"),
        ({"continuations": [[7], []]}, 422, "invalid_request", None, "at least one token"),
        ({"continuations": [[7], [5, 999]]}, 422, "invalid_request", "continuations[1]", "continuations[1][1] is 999"),
        ({"continuations": [[7], ""]}, 422, "invalid_request", "continuations[1]", "empty"),
        ({"continuations": [[7], {"events": ["x"]}]}, 422, "invalid_request", "continuations[1]", "events"),
        ({"continuations": [[7]], "top_k": 0}, 422, "invalid_request", "top_k", "top_k is 0"),
        ({"continuations": [[7]], "mode": "window"}, 422, "invalid_request", "mode", "mode"),
        (
            {"continuations": [[7]] * 9},
            422,
            "invalid_request",
            "continuations",
            "continuations asks for 9 rows, but at most 8 are allowed",
        ),
        ({"continuations": [[7] * 9, [7] * 8]}, 413, "too_large", None, "17 tokens, but at most 16"),
    ],
)
async def test_faults_name_their_field(
    make_harness: MakeHarness, body: dict[str, Any], status: int, code: str, field: str | None, detail: str
) -> None:
    harness = make_harness(max_input_tokens=16)
    async with served(harness, max_batch_inputs=8) as server, httpx.AsyncClient(base_url=server.url) as client:
        document = assert_problem(await client.post(PATH, json=body), status, code)
        assert detail in document["detail"]
        if field is not None:
            assert document["field"] == field
        assert_problem(
            await client.post(PATH.replace("/a/", "/none/"), json={"continuations": [[7]]}), 404, "unknown_session"
        )


async def test_a_key_reads_only_its_own_sessions(harness: EngineHarness) -> None:
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    async with served(harness, api_keys=keys) as server:
        alice, bob = (
            httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEYS[name]}"}) for name in KEYS
        )
        async with alice, bob:
            await alice.post("/v1/sessions", json={"session": "s"})
            for session in ("s", "a", "alice%2Fs"):
                refused = await bob.post(f"/v1/sessions/{session}/continuations", json={"continuations": [[7]]})
                assert refused.status_code in (404, 422), session
            answered = await alice.post("/v1/sessions/s/continuations", json={"continuations": [[7]]})
            assert (answered.status_code, answered.json()["session"]) == (200, "s")


async def test_the_rows_of_an_inference_are_continuations_of_its_sequence(harness: EngineHarness) -> None:
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as client:
        await harness.engine.create_session("fake:7", None)
        await harness.engine.submit(StepRequest("fake:7", (5,)))
        inputs = [{"name": "tokens", "shape": [2, 2], "datatype": "INT64", "data": [[6, 7], [8, 9]]}]
        outputs = [{"name": name} for name in ("top_ids", "token_logprobs", "error_bound", "position", "logits")]
        body = {"inputs": inputs, "outputs": outputs, "parameters": {"sequence_id": 7, "continuations": True}}
        answer = await client.post("/v2/models/fake/infer", json=body)
        assert answer.status_code == 200, answer.text
        found = {one["name"]: one["data"] for one in answer.json()["outputs"]}
        native = await client.post(PATH, json={"continuations": [[6, 7], [8, 9]], "top_k": 16})
        results = native.json()["results"]
        assert found["top_ids"] == [one["token_id"] for result in results for one in result["predictions"]]
        assert found["token_logprobs"] == pytest.approx([value for result in results for value in result["logprobs"]])
        assert (found["error_bound"], found["position"]) == ([0.0, 0.0], [3, 3])
        assert (await harness.engine.get_session("fake:7")).position == 1
        for name, value in {"sequence_start": True, "mode": "window", "expected_position": 1}.items():
            refused = await client.post(
                "/v2/models/fake/infer",
                json=body | {"parameters": body["parameters"] | {name: value}},  # type: ignore[operator]
            )
            assert (refused.status_code, name in refused.json()["error"]) == (400, True), refused.text
