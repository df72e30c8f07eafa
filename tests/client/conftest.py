"""Fixtures for the tests of the client: a real server, and both kinds of client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.client.alike import Both
from tests.service.live_server import TIMEOUT_S
from tests.service.versions import server_of_two_models


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a text model and a model of events."""
    with server_of_two_models(tmp_path_factory.mktemp("client"), WANE_TOP_K_LIMIT="2048") as server:
        yield server.url


@pytest.fixture(scope="package")
def http(url: str) -> Iterator[httpx.Client]:
    """A plain client of the same server."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(params=["sync", "async"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """Makes clients: in one test run the blocking ones, in another the asyncio ones."""
    with Both(asynchronous=request.param == "async") as made:
        yield made


@pytest.fixture
def wane(both: Both, url: str) -> Any:
    """A client of the real server."""
    return both(url, deadline_s=TIMEOUT_S)
