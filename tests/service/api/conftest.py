"""The real server twice: on Wane's protocol classes, and on uvicorn's own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.service.live_server import TIMEOUT_S, LiveServer, live_server


@pytest.fixture(scope="session", params=[False, True], ids=["wane", "uvicorn"])
def live(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """The real server in a process of its own, with the real models."""
    with live_server(plain_uvicorn=request.param) as server:
        yield server


@pytest.fixture(scope="session")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    """A client of the real server."""
    with httpx.Client(base_url=live.url, timeout=TIMEOUT_S) as client:
        yield client
