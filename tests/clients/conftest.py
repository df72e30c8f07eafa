"""Fixtures that start servers for the tests of released client packages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.service.conftest import make_harness
from tests.service.live_server import BUNDLE, TIMEOUT_S, LiveServer, live_server
from tests.service.versions import server_of_two_models


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of a text model and an event model."""
    with server_of_two_models(tmp_path_factory.mktemp("clients")) as server:
        yield server.url


@pytest.fixture(scope="package")
def native_of_both(url: str) -> Iterator[httpx.Client]:
    """A client of the native API of the server at `url`."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


__all__ = ["make_harness"]  # a fixture of the tests of this folder, too
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="package")
def live() -> Iterator[LiveServer]:
    """A server of one text model, without keys."""
    with live_server(WANE_BUNDLES=BUNDLE) as server:
        yield server


@pytest.fixture(scope="package")
def locked() -> Iterator[LiveServer]:
    """A server of one text model. The server requires an API key."""
    with live_server(WANE_BUNDLES=BUNDLE, WANE_API_KEYS=f"tests:{KEY}") as server:
        yield server


@pytest.fixture(scope="package")
def native(live: LiveServer) -> Iterator[httpx.Client]:
    """A client of the native routes of `live`."""
    with httpx.Client(base_url=live.url, timeout=TIMEOUT_S) as client:
        yield client
