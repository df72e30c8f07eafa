"""Tests that the Python examples of docs/openai.md run."""

from __future__ import annotations

import re

from tests.clients.alone import ROOT, run, skip_without
from tests.service.live_server import LiveServer

PAGE = (ROOT / "docs" / "openai.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@skip_without("openai")
def test_the_examples_of_the_openai_package_run(live: LiveServer) -> None:
    program = "\n".join(block for block in BLOCKS if "client" in block)
    program += "\nimport json; print(json.dumps([answer.choices[0].text, first.position, second.position]))"
    text, first, second = run(here(program, live))
    assert text and 0 < first < second


@skip_without("litellm")
def test_the_example_of_litellm_runs(live: LiveServer) -> None:
    (block,) = [block for block in BLOCKS if "litellm" in block]
    program = block.replace("litellm.text_completion(", "answer = litellm.text_completion(")
    assert run(here(program + "\nimport json; print(json.dumps(answer.choices[0].text))", live))


@skip_without("openai")
def test_the_readmes_example_of_the_openai_package_runs(live: LiveServer) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "openai" in block]
    block = re.sub(r"print\((.*)\)\n", r"import json; print(json.dumps(\1))\n", block)
    assert run(here(block, live))


def here(program: str, live: LiveServer) -> str:
    """Returns the program with the URL and the model of the test's server instead of the page's."""
    return program.replace("http://127.0.0.1:8000", live.url).replace("gated-stable-64", "rnn-stable")
