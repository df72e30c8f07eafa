"""Tests of the package `openai` as a client, with its synchronous and its asynchronous client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.clients.alone import import_client
from tests.clients.conftest import KEY
from tests.service.engine_harness import EngineHarness, MakeHarness, name_vocabulary
from tests.service.live_server import LiveServer
from tests.service.server_harness import ServerHarness, served
from wane.service import errors

openai = import_client("openai")

MODEL = "rnn-stable"
PROMPT = "The history of the"
TIMEOUT_S = 60

Complete = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def complete(request: pytest.FixtureRequest, live: LiveServer) -> Complete:
    """Returns a function that calls `completions.create` of the synchronous or the asynchronous client. The function
    returns the answer, or the list of chunks of a stream."""

    def created(**fields: Any) -> Any:
        wanted = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 4, **fields}
        options = {"base_url": f"{live.url}/v1", "api_key": "any", "timeout": TIMEOUT_S, "max_retries": 0}
        if request.param == "sync":
            with openai.OpenAI(**options) as client:
                answer = client.completions.create(**wanted)
                return list(answer) if wanted.get("stream") else answer

        async def ask() -> Any:
            async with openai.AsyncOpenAI(**options) as client:
                answer = await client.completions.create(**wanted)
                return [chunk async for chunk in answer] if wanted.get("stream") else answer

        return asyncio.run(ask())

    return created


def refused(complete: Complete, param: str, **fields: Any) -> str:
    """Checks that a request with these fields is rejected, and that the error names the field `param`. Returns the
    error's message."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(**fields)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    assert error.code == "invalid_request"
    return str(error.message)


def ids_of(native: httpx.Client, text: str) -> list[int]:
    ids: list[int] = native.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def generated(native: httpx.Client, **fields: Any) -> dict[str, Any]:
    """Returns the answer of the native route /v1/generate."""
    wanted = {"input": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    answer: dict[str, Any] = native.post("/v1/generate", json=wanted).raise_for_status().json()
    return answer


# Answers


def test_a_completion_has_the_text_of_generate(complete: Complete, native: httpx.Client) -> None:
    answer = complete()
    assert answer.choices[0].text == generated(native)["text"]
    assert (answer.object, answer.model, answer.choices[0].index) == ("text_completion", MODEL, 0)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].logprobs is None
    assert answer.id.startswith("cmpl-") and answer.system_fingerprint.startswith("fp_") and answer.created > 1.7e9
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(ids_of(native, PROMPT)),
        "completion_tokens": 4,
        "total_tokens": len(ids_of(native, PROMPT)) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_every_answer_has_a_new_id_and_the_same_fingerprint(complete: Complete) -> None:
    one, other = complete(), complete()
    assert one.id != other.id and one.system_fingerprint == other.system_fingerprint


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt_is_a_text_or_ids_or_a_list_of_either(
    complete: Complete, native: httpx.Client, many: bool, as_ids: bool
) -> None:
    texts = [PROMPT, "In 1990"] if many else [PROMPT]
    prompts: list[Any] = [ids_of(native, text) for text in texts] if as_ids else [*texts]
    answer = complete(prompt=prompts if many else prompts[0])
    assert [choice.text for choice in answer.choices] == [generated(native, input=text)["text"] for text in texts]
    assert [choice.index for choice in answer.choices] == [*range(len(texts))]


def test_choices_are_ordered_by_prompt_then_by_sample(complete: Complete) -> None:
    both = complete(prompt=[PROMPT, "In 1990"], n=2, temperature=1, seed=3)
    apart = [complete(prompt=prompt, n=2, temperature=1, seed=3) for prompt in (PROMPT, "In 1990")]
    assert [one.text for one in both.choices] == [one.text for answer in apart for one in answer.choices]


def test_max_tokens_is_16_by_default(complete: Complete) -> None:
    assert complete(max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 16
    assert complete(max_tokens=None).usage.completion_tokens == 16


def test_max_tokens_is_0_only_with_echo(complete: Complete) -> None:
    answer = complete(max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == (PROMPT, 0)
    assert answer.choices[0].finish_reason == "length"
    assert "unless echo is true" in refused(complete, "max_tokens", max_tokens=0)


def test_temperature_is_1_by_default(complete: Complete, native: httpx.Client) -> None:
    for fields in ({"temperature": None}, {"temperature": openai.NOT_GIVEN}, {"temperature": 1}):
        assert complete(seed=5, **fields).choices[0].text == generated(native, seed=5, temperature=1)["text"]


def test_top_p_is_that_of_generate(complete: Complete, native: httpx.Client) -> None:
    answer = complete(top_p=0.3, temperature=1, seed=5, max_tokens=20)
    assert answer.choices[0].text == generated(native, top_p=0.3, temperature=1, seed=5, max_tokens=20)["text"]


def test_n_samples_differ_and_are_the_same_in_every_call(complete: Complete) -> None:
    three = [one.text for one in complete(n=3, temperature=1, seed=1, max_tokens=12).choices]
    assert len(set(three)) == 3
    assert [one.text for one in complete(n=2, temperature=1, seed=1, max_tokens=12).choices] == three[:2]


def test_without_a_seed_samples_differ(complete: Complete) -> None:
    assert len({one.text for one in complete(n=4, temperature=1, max_tokens=16).choices}) > 1


def test_the_first_sample_of_a_seed_is_that_of_generate(complete: Complete, native: httpx.Client) -> None:
    answer = complete(temperature=1, seed=11, n=2, max_tokens=10)
    assert answer.choices[0].text == generated(native, temperature=1, seed=11, max_tokens=10)["text"]


def test_a_seed_may_be_negative(complete: Complete) -> None:
    first, second = (complete(temperature=1, seed=-3, max_tokens=10).choices[0].text for _ in range(2))
    assert first == second


@pytest.mark.parametrize("several", [False, True])
def test_stop_ends_the_text_before_it(complete: Complete, several: bool) -> None:
    whole = complete(max_tokens=30).choices[0].text
    word = whole.split()[5]
    choice = complete(max_tokens=30, stop=["zzz", word] if several else word).choices[0]
    assert choice.text == whole[: whole.index(word)] and choice.finish_reason == "stop"


def test_presence_penalty_is_subtracted_once_and_frequency_penalty_each_time(
    complete: Complete, native: httpx.Client
) -> None:
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"presence_penalty": -2}):
        answer = complete(max_tokens=30, **fields)
        assert answer.choices[0].text == generated(native, max_tokens=30, **fields)["text"]
        assert answer.choices[0].text != complete(max_tokens=30).choices[0].text or "-2" in str(fields)


def test_logit_bias_100_forces_and_minus_100_forbids(complete: Complete, native: httpx.Client) -> None:
    assert complete(logit_bias={"65": 100}, temperature=1).choices[0].text == native_text(native, [65] * 4)
    first, second = generated(native, max_tokens=1, top_logprobs=2)["predictions"][0]
    assert complete(max_tokens=1).choices[0].text == first["token"]
    assert complete(max_tokens=1, logit_bias={str(first["token_id"]): -100}).choices[0].text == second["token"]


def native_text(native: httpx.Client, ids: list[int]) -> str:
    text: str = native.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


def test_user_is_ignored(complete: Complete) -> None:
    assert complete(user="somebody").choices[0].text == complete().choices[0].text


def test_null_is_the_default_of_every_field(complete: Complete) -> None:
    nulls = dict.fromkeys(["top_p", "n", "stream", "stream_options", "logprobs", "echo", "stop", "logit_bias", "user"])
    body = dict.fromkeys(["session", "expected_position", "seed", "presence_penalty", "frequency_penalty"])
    assert complete(**nulls, extra_body=body).choices[0].text == complete().choices[0].text


def test_models_are_listed_and_retrieved(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
        (model,) = client.models.list().data
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "wane")
        assert client.models.retrieve(MODEL).id == MODEL


# Log-probabilities


def test_logprobs_are_those_of_generate(complete: Complete, native: httpx.Client) -> None:
    found = complete(logprobs=3, temperature=1, seed=2, logit_bias={"5": 3.0}).choices[0].logprobs
    answer = generated(native, temperature=1, seed=2, logit_bias={"5": 3.0}, top_logprobs=3)
    assert found.token_logprobs == answer["logprobs"]
    for top, places in zip(found.top_logprobs, answer["predictions"], strict=True):
        assert [*top.values()] == [one["logprob"] for one in places]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_chosen_token_is_among_the_top_ones_as_the_same_float(complete: Complete, count: int) -> None:
    choice = complete(logprobs=count, echo=True, temperature=1, seed=8, max_tokens=8, prompt=PROMPT * 5).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob and count <= len(top) <= count + 1
        assert count > 0 or [*top] == [token]


def test_with_echo_the_prompt_comes_first_and_one_token_adds_one_entry(
    complete: Complete, native: httpx.Client
) -> None:
    ids = ids_of(native, PROMPT)
    scored = native.post("/v1/score", json={"tokens": ids}).json()["logprobs"]
    choice = complete(prompt=ids, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[:-1] == scored and len(choice.logprobs.tokens) == len(ids) + 1
    assert complete(prompt=ids, echo=True, logprobs=1, max_tokens=0).choices[0].logprobs.token_logprobs == scored
    assert choice.logprobs.token_logprobs[-1] == generated(native, max_tokens=1)["logprobs"][0]


def test_the_top_tokens_of_a_prompt_are_those_of_predict(complete: Complete, native: httpx.Client) -> None:
    ids = ids_of(native, PROMPT * 3)
    found = complete(prompt=ids, echo=True, logprobs=4, max_tokens=0).choices[0].logprobs
    for place in range(1, len(ids)):
        expected = native.post("/v1/predict", json={"tokens": ids[:place], "mode": "recurrent", "top_k": 4}).json()
        got = sorted(found.top_logprobs[place].values(), reverse=True)[:4]
        assert got == pytest.approx([one["logprob"] for one in expected["predictions"]], abs=1e-4)


def test_text_offsets_are_the_places_of_tokens(complete: Complete) -> None:
    choice = complete(echo=True, logprobs=0, max_tokens=6).choices[0]
    found = choice.logprobs
    ends = [*found.text_offset[1:], len(choice.text)]
    for token, start, end in zip(found.tokens, found.text_offset, ends, strict=True):
        assert choice.text[start:end] == token.replace("<eos>", "\n")


def test_a_token_that_is_part_of_a_character_is_written_as_bytes(complete: Complete, native: httpx.Client) -> None:
    ids = ids_of(native, "\u4e16")  # no token of the vocabulary has this character
    found = complete(prompt=ids, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    raw = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in found.tokens
    )
    assert len(ids) > 1 and raw == "\u4e16".encode() and found.tokens[0].startswith("bytes:\\x")


def test_a_generated_eos_is_an_entry(complete: Complete, native: httpx.Client) -> None:
    choice = complete(logit_bias={"0": 100}, logprobs=1, max_tokens=2).choices[0]
    assert choice.logprobs.tokens == ["<eos>", "<eos>"] and choice.text == "\n\n"


def test_logprobs_are_before_bias_and_penalties(complete: Complete, native: httpx.Client) -> None:
    plain = generated(native, max_tokens=1, top_logprobs=100)["predictions"][0]
    biased = complete(logit_bias={str(plain[7]["token_id"]): 100}, logprobs=1, max_tokens=1).choices[0].logprobs
    assert biased.token_logprobs == [plain[7]["logprob"]]


# Streams


def test_a_stream_has_one_id_one_finish_reason_for_each_index_and_the_same_texts(complete: Complete) -> None:
    wanted: dict[str, Any] = {"prompt": [PROMPT, "In 1990"], "n": 2, "temperature": 1, "seed": 4, "max_tokens": 9}
    chunks = complete(stream=True, **wanted)
    whole = complete(**wanted)
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [(one.index, one.finish_reason) for chunk in chunks for one in chunk.choices if one.finish_reason]
    assert sorted(reasons) == [(index, "length") for index in range(4)]
    texts = ["".join(one.text for chunk in chunks for one in chunk.choices if one.index == index) for index in range(4)]
    assert texts == [choice.text for choice in whole.choices]
    order = [one.index for chunk in chunks for one in chunk.choices]
    assert order != sorted(order)  # the chunks of the indices are interleaved
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_a_last_chunk_without_choices(complete: Complete) -> None:
    *chunks, last = complete(stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 4
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert complete(stream=True, stream_options={"include_usage": False})[-1].choices


def test_a_stream_has_the_log_probabilities_of_the_whole_answer(complete: Complete) -> None:
    wanted: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 5}
    chunks, whole = complete(stream=True, **wanted), complete(**wanted).choices[0].logprobs
    parts = [one.logprobs for chunk in chunks for one in chunk.choices if one.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)


def test_a_stream_has_data_lines_only_and_ends_with_done(native: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True}
    lines = native.post("/v1/completions", json=body).text.split("\n\n")
    assert lines.pop() == "" and lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") and "\n" not in line for line in lines[:-1])


# Refusals

OTHERS = ["top_k", "min_p", "tokens", "input"]


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_field_is_refused_by_name(complete: Complete, name: str) -> None:
    refused(complete, name, extra_body={name: 1})
    refused(complete, name, extra_body={name: None})


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": [PROMPT, ""]}),
        ("prompt", {"prompt": [PROMPT] * 257}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 10**6}),
        ("temperature", {"temperature": -0.1}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.1}),
        ("n", {"n": 0}),
        ("n", {"n": 257}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 101}),
        ("stop", {"stop": ["x"] * 17}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("logit_bias", {"logit_bias": {"5": 101}}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"99999": 1}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.other", {"stream": True, "stream_options": {"other": True}}),
        ("user", {"extra_body": {"user": 5}}),
        ("seed", {"extra_body": {"seed": "x"}}),
        ("echo", {"extra_body": {"echo": 1}}),
    ],
    ids=str,
)
def test_an_invalid_field_is_refused_by_name(complete: Complete, param: str, fields: dict[str, Any]) -> None:
    assert refused(complete, param, **fields)


def test_an_id_out_of_range_names_its_place(complete: Complete) -> None:
    assert "prompt[1] is 99999" in refused(complete, "prompt", prompt=[5, 99999])


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_model_and_prompt_are_required(native: httpx.Client, name: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT}
    del body[name]
    response = native.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == name


def test_an_unknown_model_is_404(complete: Complete) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(model="nobody")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_body_that_is_not_json_is_400_in_the_same_envelope(native: httpx.Client) -> None:
    response = native.post("/v1/completions", content=b"{")
    assert response.status_code == 400
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_wrong_key_is_401(locked: LiveServer) -> None:
    for key in ("wrong", KEY):
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
            if key == KEY:
                assert client.completions.create(model=MODEL, prompt=PROMPT).choices
                continue
            for call in (lambda: client.completions.create(model=MODEL, prompt=PROMPT), client.models.list):
                with pytest.raises(openai.AuthenticationError) as caught:
                    call()
                assert caught.value.code == "invalid_api_key"
    for path in ("/tokenize", "/detokenize"):
        assert httpx.post(f"{locked.url}{path}", json={"prompt": "x"}).json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{locked.url}/tokenizer_info").status_code == 401


def test_failures_under_models_and_unknown_paths_are_problems_with_an_error(live: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("nobody")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert caught.value.response.headers["content-type"] == "application/problem+json"
        assert caught.value.response.json()["status"] == 404
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(model=MODEL, input="x")
        assert caught.value.code == "not_found" and caught.value.response.json()["code"] == "not_found"


def test_chat_says_where_text_is_completed(live: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)
    with client, pytest.raises(openai.NotFoundError, match="/v1/completions"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])


# Sessions


def of_session(name: str, position: int | None = None) -> dict[str, Any]:
    return {"session": name, **({} if position is None else {"expected_position": position})}


def counted(native: httpx.Client, status: int) -> int:
    """Returns the number of completions that the server has answered with this status."""
    for line in native.get("/metrics").text.splitlines():
        if line.startswith("wane_http_requests_total") and all(
            one in line for one in ('"/v1/completions"', f'"{status}"')
        ):
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def test_a_session_appends_the_prompt_and_not_the_completion(
    complete: Complete, native: httpx.Client, request: pytest.FixtureRequest
) -> None:
    name = f"a{abs(hash(request.node.name))}"
    first = complete(extra_body=of_session(name, 0))
    here = len(ids_of(native, PROMPT))
    assert (first.session, first.position, first.replayed, first.error_bound) == (name, here, False, 0.0)
    assert first.choices[0].text == generated(native)["text"]
    assert native.get(f"/v1/sessions/{name}").json()["position"] == here
    second = complete(prompt=first.choices[0].text, extra_body=of_session(name, here))
    assert second.choices[0].text == generated(native, input=PROMPT + first.choices[0].text)["text"]


def test_a_session_s_request_sent_again_is_a_replay(
    complete: Complete, native: httpx.Client, request: pytest.FixtureRequest
) -> None:
    name = f"r{abs(hash(request.node.name))}"
    answers = [complete(temperature=1, seed=5, extra_body=of_session(name, 0)) for _ in range(2)]
    assert [one.replayed for one in answers] == [False, True]
    assert answers[0].choices[0].text == answers[1].choices[0].text and answers[0].position == answers[1].position


def test_a_session_with_a_key_is_replayed_and_must_exist(
    complete: Complete, native: httpx.Client, request: pytest.FixtureRequest
) -> None:
    name, key = f"k{abs(hash(request.node.name))}", {"Idempotency-Key": "one"}
    with pytest.raises(openai.NotFoundError) as caught:
        complete(extra_body=of_session(name), extra_headers=key)
    assert caught.value.code == "unknown_session"
    native.post("/v1/sessions", json={"session": name})
    answers = [complete(extra_body=of_session(name), extra_headers=key) for _ in range(2)]
    assert [one.replayed for one in answers] == [False, True]
    with pytest.raises(openai.ConflictError) as caught:
        complete(prompt="other", extra_body=of_session(name), extra_headers=key)
    assert caught.value.code == "idempotency_key_reused"


def test_a_session_at_another_position_is_409_and_is_asked_once(
    live: LiveServer, native: httpx.Client, complete: Complete, request: pytest.FixtureRequest
) -> None:
    name = f"c{abs(hash(request.node.name))}"
    complete(extra_body=of_session(name, 0))
    before = counted(native, 409)
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=3)
    with client, pytest.raises(openai.ConflictError) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body=of_session(name, 99))
    assert counted(native, 409) == before + 1
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_session_s_stream_ends_with_its_position(complete: Complete, request: pytest.FixtureRequest) -> None:
    name = f"s{abs(hash(request.node.name))}"
    chunks = complete(stream=True, extra_body=of_session(name, 0))
    (last,) = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
    assert (last.session, last.replayed, last.error_bound) == (name, False, 0.0) and last.position > 0


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 2}),
        ("echo", {"echo": True}),
        ("prompt", {"prompt": [PROMPT, PROMPT]}),
        ("expected_position", {"extra_body": {"session": "x"}}),
        ("expected_position", {"extra_body": {"expected_position": 0}}),
        ("session", {"extra_body": {"session": "a/b", "expected_position": 0}}),
        ("logprobs", {"logprobs": 101}),
        ("logit_bias", {"logit_bias": {"99999": 1}}),
    ],
    ids=str,
)
def test_a_session_refuses_and_appends_nothing(
    complete: Complete, native: httpx.Client, param: str, fields: dict[str, Any]
) -> None:
    refused(complete, param, **{"extra_body": of_session("refused", 0), **fields})
    found = native.get("/v1/sessions/refused")
    assert found.status_code == 404 or found.json()["position"] == 0


# The tokenizer


def test_tokenize_and_detokenize_are_inverse(native: httpx.Client) -> None:
    found = native.post("/tokenize", json={"model": MODEL, "prompt": PROMPT, "add_special_tokens": True}).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 65536
    assert native_text(native, found["tokens"]) == PROMPT
    assert ids_of(native, "") == [] and native_text(native, []) == ""


def test_the_text_eos_is_its_id(native: httpx.Client) -> None:
    assert ids_of(native, "<eos>") == [0]
    assert ids_of(native, "a<eos>b") == [*ids_of(native, "a"), 0, *ids_of(native, "b")]


def test_tokenizer_info_names_the_special_tokens(native: httpx.Client) -> None:
    found = native.get("/tokenizer_info").json()
    assert (found["eos_token"], found["bos_token"]) == ("<eos>", None) and found["tokenizer_class"]


# Event models


@pytest.fixture
async def events(make_harness: MakeHarness) -> AsyncIterator[tuple[EngineHarness, ServerHarness]]:
    harness = make_harness(vocabulary=name_vocabulary(names=("open", "read", "close", "save")))
    async with served(harness) as server:
        yield harness, server


async def test_an_event_model_completes_names_line_by_line(events: tuple[EngineHarness, ServerHarness]) -> None:
    _, server = events
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        answer = await client.completions.create(
            model="fake", prompt="open\nread", max_tokens=3, logit_bias={"4": 100}, logprobs=1, echo=True
        )
        (choice,) = answer.choices
        assert choice.text == "open\nread\nclose\nclose\nclose"
        assert choice.logprobs.tokens == ["open", "read", "close", "close", "close"]
        assert choice.logprobs.text_offset == [0, 4, 10, 15, 21]
        stopped = await client.completions.create(
            model="fake", prompt=["open", "read"], max_tokens=3, logit_bias={"0": 100}, logprobs=0
        )
        assert [one.finish_reason for one in stopped.choices] == ["stop", "stop"]
        assert [one.text for one in stopped.choices] == ["", ""]
        assert stopped.choices[0].logprobs.tokens == ["<eos>"]


# Failures of the server


async def test_a_failure_in_a_stream_is_an_error_and_the_end(events: tuple[EngineHarness, ServerHarness]) -> None:
    harness, server = events
    harness.runner.poison = 4
    body = {"model": "fake", "prompt": "open", "stream": True, "logit_bias": {"4": 100}, "max_tokens": 5}
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post("/v1/completions", json=body)
    *_, last = response.text.strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert response.status_code == 200 and (error["type"], error["code"]) == ("server_error", "internal")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.APIError):
            async for _ in await client.completions.create(**body):
                pass


@pytest.mark.parametrize(("error", "status"), [("Overloaded", 429), ("Unavailable", 503), ("DeadlineExceeded", 504)])
async def test_a_retryable_failure_says_when_to_retry(
    events: tuple[EngineHarness, ServerHarness], monkeypatch: pytest.MonkeyPatch, error: str, status: int
) -> None:
    harness, server = events

    async def fail(*_: Any) -> None:
        raise getattr(errors, error)("no")

    monkeypatch.setattr(harness.engine, "generate", fail)
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post("/v1/completions", json={"model": "fake", "prompt": "open"})
    assert response.status_code == status and response.json()["error"]["message"] == "no"
    assert ("retry-after" in response.headers) is (status != 504)
