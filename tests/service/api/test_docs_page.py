"""Tests that the page `/docs` loads nothing from other sites and runs only its own scripts, and that the description
which it shows says how to use the WebSocket. `tests/console/test_docs_page.py` opens the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
import pytest

from wane.service.api.routes import stream

FILES = {"docs/swagger-ui.css": "text/css", "docs/swagger-ui-bundle.js": "text/javascript"}


@pytest.fixture
async def page(client: httpx.AsyncClient) -> str:
    return (await client.get("/docs")).text


async def test_the_page_loads_only_files_of_the_server(client: httpx.AsyncClient, page: str) -> None:
    assert set(re.findall(r'(?:href|src)="([^"]*)"', page)) == {"data:,", *FILES}
    assert "http:" not in page and "https:" not in page
    for path, kind in FILES.items():
        response = await client.get(f"/{path}")
        assert response.status_code == 200 and len(response.content) > 100_000
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        again = await client.get(f"/{path}", headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("name", ["redoc.standalone.js", "nothing.js", "%2e%2e", "%2e%2e%2fcore.py"])
async def test_another_path_below_the_page_is_not_found(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(httpx.URL("http://wane", raw_path=f"/docs/{name}".encode()))
    assert response.status_code == 404


async def test_the_page_runs_only_its_own_script(client: httpx.AsyncClient, page: str) -> None:
    policy = (await client.get("/docs")).headers["content-security-policy"]
    (script,) = re.findall("<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


async def test_the_description_has_the_websocket_route_and_its_close_codes(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    (text,) = [group["description"] for group in document["tags"] if group["name"] == "sessions"]
    assert "/v1/sessions/{session}/stream" in text and "StreamBody" in document["components"]["schemas"]
    codes = {int(code) for code in re.findall(r"^    ([0-9]{4}) ", text, re.M)}
    assert codes == {1002, 1007, 1009, 1013, stream.INTERNAL, *(code for _, code in stream.CLOSES)}
