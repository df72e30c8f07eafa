"""Tests of the package litellm as a client. In litellm, the names of Wane's models have the prefix
`text-completion-openai/`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.clients.alone import run, skip_without
from tests.service.live_server import LiveServer

pytestmark = [
    skip_without("litellm"),
    pytest.mark.slow,
]

PROGRAM = """
import asyncio, json, sys
import litellm

litellm.suppress_debug_info = True
url, asked = sys.argv[1], json.loads(sys.argv[2])
common = {"api_base": f"{url}/v1", "api_key": "any", "max_tokens": 5, "temperature": 0, "num_retries": 0}


def told(answer):
    return answer.model_dump()


async def several():
    return await litellm.atext_completion(**{**common, **asked["async"]})


answers = {}
for name, fields in asked.items():
    try:
        if name == "async":
            answers[name] = told(asyncio.run(several()))
        elif fields.get("stream"):
            answers[name] = [told(one) for one in litellm.text_completion(**{**common, **fields})]
        else:
            answers[name] = told(litellm.text_completion(**{**common, **fields}))
    except Exception as error:
        answers[name] = [type(error).__name__, str(error)]
print(json.dumps(answers))
"""
MODEL = "text-completion-openai/rnn-stable"
PROMPT = "The history of the"
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"model": MODEL, "prompt": PROMPT},
    "async": {"model": MODEL, "prompt": [PROMPT, "In 1990"], "n": 2, "temperature": 1, "seed": 3},
    "stream": {"model": MODEL, "prompt": PROMPT, "stream": True},
    "logprobs": {"model": MODEL, "prompt": PROMPT, "logprobs": 2},
    "session": {"model": MODEL, "prompt": PROMPT, "extra_body": {"session": "litellm", "expected_position": 0}},
    "unknown": {"model": "text-completion-openai/nobody", "prompt": PROMPT},
    "suffix": {"model": MODEL, "prompt": PROMPT, "suffix": "x"},
}


@pytest.fixture(scope="module")
def answers(live: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = run(PROGRAM, live.url, json.dumps(ASKED))
    return found


def generated(native: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"input": PROMPT, "max_tokens": 5, "temperature": 0, **fields}
    answer: dict[str, Any] = native.post("/v1/generate", json=body).raise_for_status().json()
    return answer


def test_a_completion_is_that_of_generate(answers: dict[str, Any], native: httpx.Client) -> None:
    assert answers["plain"]["choices"][0]["text"] == generated(native)["text"]
    assert answers["plain"]["usage"]["completion_tokens"] == 5


def test_an_asynchronous_call_has_samples_of_every_prompt(answers: dict[str, Any], native: httpx.Client) -> None:
    choices = answers["async"]["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == generated(native, temperature=1, seed=3)["text"]


def test_a_stream_joins_to_the_whole_text(answers: dict[str, Any]) -> None:
    text = "".join(chunk["choices"][0]["text"] or "" for chunk in answers["stream"])
    assert text == answers["plain"]["choices"][0]["text"]


def test_logprobs_are_those_of_generate(answers: dict[str, Any], native: httpx.Client) -> None:
    assert answers["logprobs"]["choices"][0]["logprobs"]["token_logprobs"] == generated(native)["logprobs"]


def test_a_session_keeps_the_prompt(answers: dict[str, Any], native: httpx.Client) -> None:
    assert answers["session"]["choices"][0]["text"] == answers["plain"]["choices"][0]["text"]
    assert native.get("/v1/sessions/litellm").json()["position"] == answers["session"]["usage"]["prompt_tokens"]


def test_an_unknown_model_and_an_unsupported_field_are_litellm_s_errors(answers: dict[str, Any]) -> None:
    assert answers["unknown"][0] == "NotFoundError" and "there is no model 'nobody'" in answers["unknown"][1]
    assert answers["suffix"][0] == "BadRequestError" and "suffix" in answers["suffix"][1]
