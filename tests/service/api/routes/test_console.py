"""Tests of the console's routes: headers, versions of files, open paths, the setting that removes the console, and the
vendored files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from tests.service.conftest import never
from tests.service.fake_engine import FakeRegistry
from wane.service.api.routes.console import FOLDER, files
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

VENDOR = FOLDER / "vendor"
ROW = re.compile(r"^\| `(\S+)` \| `(\S+)` \| ([\d.]+) \| (\S+) \| `([0-9a-f]{64})` \|$", re.M)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
OWN = sorted(path for path in FOLDER.glob("*.*") if path.suffix in (".js", ".html", ".css"))


@pytest.fixture
async def without() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with keys and without the console."""
    settings = Settings.read({"WANE_CONSOLE": "off", "WANE_API_KEYS": "alice:alice-0123456789abcdefgh"})
    app = create_app(settings, cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=never)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wane") as client:
        yield client


@pytest.mark.parametrize("path", ["/", *(f"/console/{name}" for name in files())])
async def test_every_file_has_the_policy_and_an_etag(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 200 and response.content
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers.get_list("x-content-type-options") == ["nosniff"]
    assert response.headers.get_list("cache-control") == ["no-cache"]
    head = await client.head(path)
    assert head.headers["etag"] == response.headers["etag"] and not head.content
    for known in (response.headers["etag"], f'"x", W/{response.headers["etag"]}', "*"):
        again = await client.get(path, headers={"if-none-match": known})
        assert again.status_code == 304 and not again.content
        assert again.headers["etag"] == response.headers["etag"]
    assert (await client.get(path, headers={"if-none-match": '"another"'})).status_code == 200


async def test_files_have_the_content_types_that_browsers_require(client: httpx.AsyncClient) -> None:
    kinds = {path: (await client.get(path)).headers["content-type"] for path in ("/", "/console/app.js")}
    assert kinds == {"/": "text/html; charset=utf-8", "/console/app.js": "text/javascript; charset=utf-8"}
    assert (await client.get("/console/style.css")).headers["content-type"] == "text/css; charset=utf-8"


@pytest.mark.parametrize("path", ["nothing.js", "", "%2e%2e", "%2e%2e/settings.py", "vendor", "/app.js"])
async def test_a_path_that_is_no_file_of_the_console_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(httpx.URL("http://wane", raw_path=f"/console/{path}".encode()))
    assert response.status_code == 404
    assert response.headers["cache-control"] == "no-store"


async def test_the_console_can_be_removed(without: httpx.AsyncClient) -> None:
    key = {"authorization": "Bearer alice-0123456789abcdefgh"}
    for path in ("/", "/console/app.js"):
        assert (await without.get(path)).status_code == 401
        assert (await without.get(path, headers=key)).status_code == 404


def test_the_table_of_vendored_files_is_true() -> None:
    rows = ROW.findall((VENDOR / "README.md").read_text())
    listed = {name: sha256 for name, _, _, _, sha256 in rows}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name != "README.md"
    }
    assert listed == found and len(rows) == len(listed)
    versions = {package: version for _, package, version, _, _ in rows}
    assert f"(v{versions['uplot']})" in (VENDOR / "uPlot.esm.js").read_text()
    assert f'litHtmlVersions??=[]).push("{versions["lit-html"]}")' in (VENDOR / "lit-html.js").read_text()
    for name, package, _, licence, _ in rows:
        if name.endswith(".LICENSE"):
            text = (VENDOR / name).read_text()
            assert {"MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License"}[licence] in text, package


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_page_has_no_markup_from_strings_and_no_other_host(path: Path) -> None:
    text = path.read_text()
    for forbidden in (
        "unsafeHTML",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http://",
        "https://",
    ):
        assert forbidden not in text, forbidden
    assert not re.search(r'(?<!\.)\bstyle="', text), "styles are set through CSSOM: `.style=`"
