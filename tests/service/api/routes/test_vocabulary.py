"""Tests of the vocabulary route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.engine_harness import name_vocabulary
from tests.service.fake_engine import FakeEngine, FakeRegistry

PATH = "/v1/models/fake/vocabulary"
NAMES = ("coats/07", "coats/08", "shoes/1", "coats/09", "hats", "coats")


@pytest.fixture
def named(engine: FakeEngine) -> Iterator[list[dict[str, Any]]]:
    """All entries that the route lists for a model of events, by ascending id."""
    engine.vocabulary = vocabulary = name_vocabulary(names=NAMES)
    texts = vocabulary.texts
    yield [{"id": index, "name": name} for index, name in enumerate(texts) if name not in ("<eos>", "<unk>")]


async def test_the_vocabulary_lists_every_event_once_without_control_tokens(
    client: httpx.AsyncClient, named: list[dict[str, Any]]
) -> None:
    assert sorted(one["name"] for one in named) == sorted(NAMES)
    assert (await client.get(PATH)).json() == {"events": named, "next": None}


@pytest.mark.parametrize("limit", range(1, 7))
async def test_the_pages_hold_every_event_in_order(
    client: httpx.AsyncClient, named: list[dict[str, Any]], limit: int
) -> None:
    for prefix in ("", "coats", "coats/", "nothing"):
        wanted = [one for one in named if one["name"].startswith(prefix)]
        found: list[dict[str, Any]] = []
        after: dict[str, int] = {}
        while True:
            page = (await client.get(PATH, params={"prefix": prefix, "limit": limit, **after})).json()
            assert len(page["events"]) <= limit
            found += page["events"]
            if page["next"] is None:
                break
            assert len(page["events"]) == limit
            after = {"after": page["next"]}
        assert found == wanted


async def test_there_is_no_next_page_after_the_last_id(client: httpx.AsyncClient, named: list[dict[str, Any]]) -> None:
    assert (await client.get(PATH, params={"after": 10**14})).json() == {"events": [], "next": None}


@pytest.mark.parametrize(
    ("query", "field", "detail"),
    [
        ("limit=0", "limit", "limit is '0', but must be a whole number, from 1 to 10000"),
        ("limit=10001", "limit", "limit is '10001', but must be a whole number, from 1 to 10000"),
        ("after=-1", "after", "after is '-1', but must be a whole number, 0 or more"),
        ("after=x", "after", "after is 'x', but must be a whole number, 0 or more"),
        ("prefx=a", "prefx", "prefx: there is no such parameter; there are prefix, after, limit"),
    ],
)
async def test_an_invalid_parameter_is_refused_by_name(
    client: httpx.AsyncClient, query: str, field: str, detail: str
) -> None:
    refused = await client.get(f"{PATH}?{query}")
    assert (refused.status_code, refused.json()["field"], refused.json()["detail"]) == (422, field, detail)


async def test_the_vocabulary_of_an_unknown_model_is_a_problem_document(
    client: httpx.AsyncClient, registry: FakeRegistry
) -> None:
    refused = await client.get("/v1/models/nothing/vocabulary")
    assert (refused.status_code, refused.json()["code"]) == (404, "unknown_model")


def test_the_tokens_of_a_model_of_text_are_those_of_its_predictions(http: httpx.Client) -> None:
    names: dict[int, str] = {}
    after: dict[str, int] = {}
    while True:
        page = http.get("/v1/models/gated-stable/vocabulary", params={"limit": 10_000, **after}).json()
        names |= {one["id"]: one["name"] for one in page["events"]}
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    predictions = http.post("/v1/predict", json={"tokens": [5, 6, 7], "top_k": 100}).json()["predictions"]
    shown = {one["token_id"]: one["token"] for one in predictions if one["token"] not in ("<eos>", "<unk>")}
    assert shown and shown == {token: names[token] for token in shown}
