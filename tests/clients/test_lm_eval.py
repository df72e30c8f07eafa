"""Tests of lm-evaluation-harness as a client, with the harness's model type `local-completions`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.alone import ROOT, run, skip_without
from tests.service.live_server import LiveServer

pytestmark = [
    skip_without("lm_eval"),
    pytest.mark.slow,
]

PROGRAM = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, options, asked = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
model = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model="rnn-stable", **options)
answers = {"backend": model.tokenizer_backend, "eos": model.eot_token_id, "prefix": model.prefix_token_id}
for kind, arguments in asked.items():
    found = [Instance(request_type=kind, doc={}, arguments=tuple(one), idx=0) for one in arguments]
    answers[kind] = getattr(model, kind)(found)
print(json.dumps(answers))
"""
CONTEXTS = [
    ("The history of", " the"),
    ("The history of", " a town"),
    ("He was", " a member of the House"),
    ("In", " 1990"),
    ("It is one of the largest cities", " in the world"),
]
TEXTS = [("The history of the town",), ("He was a member of the House of Commons",)]
UNTIL: list[tuple[str, dict[str, Any]]] = [
    ("The history of", {"until": ["zzz"], "max_gen_toks": 8}),
    ("In 1990 ,", {"until": ["of"], "max_gen_toks": 20, "do_sample": False, "temperature": 0}),
]


def evaluated(live: LiveServer, **options: Any) -> dict[str, Any]:
    asked = {"loglikelihood": CONTEXTS, "loglikelihood_rolling": TEXTS, "generate_until": UNTIL}
    found: dict[str, Any] = run(PROGRAM, live.url, json.dumps(options), json.dumps(asked))
    return found


@pytest.fixture(scope="module", params=[("ids", 1), ("ids", 4), ("text", 4)], ids=str)
def answers(request: pytest.FixtureRequest, live: LiveServer) -> dict[str, Any]:
    form, batch = request.param
    return evaluated(live, batch_size=batch, tokenized_requests=form == "ids")


def ids_of(native: httpx.Client, text: str) -> list[int]:
    ids: list[int] = native.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def scored(native: httpx.Client, ids: list[int]) -> list[float]:
    logprobs: list[float] = native.post("/v1/score", json={"tokens": ids}).raise_for_status().json()["logprobs"]
    return logprobs


def test_the_remote_tokenizer_is_found(answers: dict[str, Any]) -> None:
    assert (answers["backend"], answers["eos"], answers["prefix"]) == ("remote", 0, 0)


def test_log_likelihoods_are_those_of_score(answers: dict[str, Any], native: httpx.Client) -> None:
    for (context, end), (logprob, _) in zip(CONTEXTS, answers["loglikelihood"], strict=True):
        ids, before = ids_of(native, context + end), len(ids_of(native, context))
        assert logprob == pytest.approx(sum(scored(native, ids)[before:]), rel=1e-12)


def test_greedy_is_what_predict_says(answers: dict[str, Any], native: httpx.Client) -> None:
    seen = set()
    for (context, end), (_, greedy) in zip(CONTEXTS, answers["loglikelihood"], strict=True):
        ids, before = ids_of(native, context + end), len(ids_of(native, context))
        first = [
            native.post("/v1/predict", json={"tokens": ids[:place], "mode": "recurrent"}).json()["predictions"][0]
            for place in range(before, len(ids))
        ]
        assert greedy is ([one["token_id"] for one in first] == ids[before:])
        seen.add(greedy)
    assert seen == {True, False}


def test_rolling_log_likelihoods_are_those_of_score(answers: dict[str, Any], native: httpx.Client) -> None:
    for (text,), logprob in zip(TEXTS, answers["loglikelihood_rolling"], strict=True):
        start = answers["prefix"]  # the harness puts the start token before the text
        assert logprob == pytest.approx(sum(scored(native, [start, *ids_of(native, text)])[1:]), rel=1e-12)


def test_generated_texts_are_those_of_generate(answers: dict[str, Any], native: httpx.Client) -> None:
    for (prompt, wanted), text in zip(UNTIL, answers["generate_until"], strict=True):
        body = {"input": prompt, "max_tokens": wanted["max_gen_toks"], "temperature": 0, "stop": wanted["until"]}
        assert text == native.post("/v1/generate", json=body).json()["text"]


def test_the_page_s_command_prints_what_the_page_shows(live: LiveServer, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "openai.md").read_text()
    (shown,) = re.findall(r"```console\n\$ (lm_eval .*?)\n(\|.*?)```", page, re.S)
    command, table = shown
    words = command.replace("\\\n", " ").replace("http://127.0.0.1:8000", live.url).split()
    program = f"""
import contextlib, io, json, sys
sys.argv = {words!r}
from lm_eval.__main__ import cli_evaluate
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    cli_evaluate()
print(json.dumps(printed.getvalue()))
"""
    printed = run(program, env={"HF_HOME": str(tmp_path)})
    assert values(table) == pytest.approx(values(printed), rel=2e-2)
    assert len(values(table)) == 4


def values(table: str) -> list[float]:
    """Returns the results in a table that the harness prints: the numbers after the arrows."""
    return [float(value) for value in re.findall(r"\|[↑↓]\s*\|\s*([0-9.]+)\|", table)]
