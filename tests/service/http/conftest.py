"""The application over a fake engine, in this process; and the real one, behind a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from service.app import create_app
from service.engine.catalog import Catalog
from service.metrics import Metrics
from service.settings import Settings
from tests.service.http.fake import FakeCatalog, FakeEngine

LIMIT = 64 * 1024


def never(error: Exception) -> None:
    raise AssertionError("a fake catalog always loads") from error


@pytest.fixture
def catalog(app: FastAPI) -> FakeCatalog:
    """The application's own, new for every test."""
    app.state.catalog = catalog = FakeCatalog()
    return catalog


@pytest.fixture
def engine(catalog: FakeCatalog) -> FakeEngine:
    return catalog.engine


@pytest.fixture(scope="session")
def app() -> FastAPI:
    settings = Settings(max_body_bytes=LIMIT)
    return create_app(settings, cast(Catalog, FakeCatalog()), Metrics(), on_load_failure=never)


@pytest.fixture
async def client(app: FastAPI, catalog: FakeCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application in this process; what escapes the application fails the test."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://wane") as client:
        yield client
