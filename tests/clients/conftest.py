"""Fixtures for tests of client packages of other protocols: a started server with a model of text and a model of
events."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.service.live_server import TIMEOUT_S, live_server
from tests.service.versions import make_eventful, put

TEXT_MODEL, EVENT_MODEL = "text.1", "clicks"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server."""
    folder = tmp_path_factory.mktemp("clients") / "bundles"
    folder.mkdir()
    put(folder, "1", name=TEXT_MODEL)
    make_eventful(put(folder, "2", name=EVENT_MODEL))
    with live_server(WANE_BUNDLES=str(folder), WANE_DEFAULT_MODEL=TEXT_MODEL) as server:
        yield server.url


@pytest.fixture(scope="session")
def native(url: str) -> Iterator[httpx.Client]:
    """A client of the native API."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client
