"""Tests of the limits of a completion."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.engine_harness import MakeHarness
from tests.service.server_harness import served

MOST = 64
"""The largest number of tokens that an answer repeats."""


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [7] * 16, "n": 4}, 64),
        ({"prompt": [7] * 16, "n": 5}, 80),
        ({"prompt": [7] * 8, "n": 4, "logprobs": 2}, 64),
        ({"prompt": [7] * 8, "n": 4, "logprobs": 3}, 96),
        ({"prompt": [[7] * 8, [7] * 9], "n": 2, "logprobs": 2}, 68),
    ],
)
async def test_echo_repeats_a_limited_number_of_tokens_in_all_choices(
    make_harness: MakeHarness, body: dict[str, Any], tokens: int
) -> None:
    harness = make_harness(max_scored_tokens=MOST)
    async with served(harness, max_scored_tokens=MOST) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/v1/completions", json={"model": "fake", "max_tokens": 0, "echo": True, **body})
        if tokens <= MOST:
            assert answer.status_code == 200, answer.text
            assert all(choice["text"] for choice in answer.json()["choices"])
        else:
            assert answer.status_code == 413, answer.text
            message = answer.json()["error"]["message"]
            assert f"the answer lists {tokens} tokens, but at most {MOST} are allowed" in message
