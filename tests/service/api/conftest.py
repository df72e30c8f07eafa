"""Fixtures that run each test twice, with two real servers. One uses Wane's protocol classes, and the other uses
uvicorn's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.service.live_server import TIMEOUT_S, LiveServer


@pytest.fixture(scope="session", params=[False, True], ids=["wane", "uvicorn"])
def live(request: pytest.FixtureRequest, live_servers: Callable[[bool], LiveServer]) -> LiveServer:
    """The real server in its own process."""
    return live_servers(request.param)


@pytest.fixture(scope="session")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    """A client of the real server."""
    with httpx.Client(base_url=live.url, timeout=TIMEOUT_S) as client:
        yield client
