"""Tests that the page `/docs` shows every route with its fields and examples, and loads nothing from other sites."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest

from wane.service.api.docs_page import CLOSES, STREAM, marked
from wane.service.api.schemas.sessions import StreamBody


@pytest.fixture
async def page(client: httpx.AsyncClient) -> str:
    return (await client.get("/docs")).text


async def test_the_page_has_every_route_and_every_field_of_its_body(client: httpx.AsyncClient, page: str) -> None:
    description = (await client.get("/openapi.json")).json()
    for path, operations in description["paths"].items():
        assert f"<code>{path}</code>" in page
        for operation in operations.values():
            for field in fields_of(operation, description):
                assert f"<code>{field}</code>" in page


def fields_of(operation: dict[str, Any], description: dict[str, Any]) -> list[str]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if not body:
        return []
    return list(description["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]["properties"])


async def test_the_page_has_the_websocket_route_its_messages_and_its_close_codes(page: str) -> None:
    (section,) = re.findall(rf"<details><summary><b>WS</b> <code>{re.escape(STREAM)}</code>.*?</details>", page, re.S)
    assert all(f"<code>{field}</code>" in section for field in StreamBody.__struct_fields__)
    assert all(f"<td>{code}</td>" in section for code, _ in CLOSES)
    assert "rewind" in section and "predictions[].token_id" in section


async def test_the_page_shows_the_members_of_answers_and_examples_as_commands(page: str) -> None:
    assert "<code>predictions[].logprob</code>" in page
    assert "curl -X POST http://127.0.0.1:8000/v1/sessions/demo/tokens" in page


async def test_the_page_loads_nothing(page: str) -> None:
    assert page.count("<script") == 1 and "<script>" in page and "<link" not in page and "<img" not in page
    assert set(re.findall(r'(?:href|src)="([^"]*)"', page)) == {"openapi.json"}


async def test_the_page_runs_only_its_own_script(client: httpx.AsyncClient, page: str) -> None:
    policy = (await client.get("/docs")).headers["content-security-policy"]
    (script,) = re.findall("<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "'unsafe-inline'" not in policy.partition("script-src")[2]


async def test_every_route_has_a_summary_a_group_and_a_form(client: httpx.AsyncClient, page: str) -> None:
    description = (await client.get("/openapi.json")).json()
    groups = [group["name"] for group in description["tags"]]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert set(operation["tags"]) <= set(groups)
            assert f"<code>{path}</code> {marked(operation['summary'])}</summary>" in page
            assert f'<form data-method="{method.upper()}" data-path="{path}">' in page
    assert page.count("<h2>") == len(groups)


async def test_every_row_of_the_page_has_a_meaning(page: str) -> None:
    assert page.count("<tr><td>") > 500
    assert re.findall(r"<tr><td>[^\n]*<td></td></tr>", page) == []


async def test_a_command_and_a_form_have_the_path_s_example_values(page: str) -> None:
    assert "curl -X POST http://127.0.0.1:8000/v2/models/gated-stable-64/infer" in page
    assert '<input name="name" value="gated-stable-64" required>' in page
    assert not re.findall(r'<input name="\w+" value="" required>', page)


async def test_the_page_says_what_a_field_means_that_may_be_null(page: str) -> None:
    assert "<td>names of events, for a model of events, such as" in page
    assert "<td>a text; the model&#x27;s vocabulary tokenises it" in page


async def test_the_page_shows_names_in_texts_as_code(page: str) -> None:
    assert "<td>only with <code>stream</code></td>" in page and "`" not in re.sub(
        "<pre>.*?</pre>", "", page, flags=re.S
    )
