"""Fixtures that start servers for the tests of released client packages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.service.conftest import make_harness
from tests.service.live_server import BUNDLE, TIMEOUT_S, LiveServer, live_server
from tests.service.versions import make_eventful, put

TEXT_MODEL, EVENT_MODEL = "text.1", "clicks"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of a text model and an event model."""
    folder = tmp_path_factory.mktemp("clients") / "bundles"
    folder.mkdir()
    put(folder, "1", name=TEXT_MODEL)
    make_eventful(put(folder, "2", name=EVENT_MODEL))
    with live_server(WANE_BUNDLES=str(folder), WANE_DEFAULT_MODEL=TEXT_MODEL) as server:
        yield server.url


@pytest.fixture(scope="session")
def native_of_both(url: str) -> Iterator[httpx.Client]:
    """A client of the native API of the server at `url`."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


__all__ = ["make_harness"]  # a fixture of the tests of this folder, too
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """A server of one text model, without keys."""
    with live_server(WANE_BUNDLES=BUNDLE) as server:
        yield server


@pytest.fixture(scope="session")
def locked() -> Iterator[LiveServer]:
    """A server of one text model. The server requires an API key."""
    with live_server(WANE_BUNDLES=BUNDLE, WANE_API_KEYS=f"tests:{KEY}") as server:
        yield server


@pytest.fixture(scope="session")
def native(live: LiveServer) -> Iterator[httpx.Client]:
    """A client of the native routes of `live`."""
    with httpx.Client(base_url=live.url, timeout=TIMEOUT_S) as client:
        yield client
