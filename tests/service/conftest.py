"""Fixtures for an application with a fake engine in this process, for engine harnesses, and for the real server in its
own process."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import httpx
import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.live_server import TIMEOUT_S, LiveServer, live_server
from tests.service.shipped import opened
from wane.service.app import Application, create_app
from wane.service.net.connection import Connection
from wane.service.net.limits import Limits
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.server import DrainingServer, configured, drain
from wane.service.settings import Settings

LIMIT = 64 * 1024


def never(error: Exception) -> None:
    raise AssertionError("a fake registry must not fail to load") from error


@pytest.fixture
def registry(app: Application) -> FakeRegistry:
    """The application's registry, new for every test."""
    app.state.registry = registry = FakeRegistry()
    return registry


@pytest.fixture
def engine(registry: FakeRegistry) -> FakeEngine:
    return registry.engine


@pytest.fixture(scope="session")
def app() -> Application:
    settings = Settings(max_body_bytes=LIMIT)
    return create_app(settings, cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=never)


@pytest.fixture
async def client(app: Application, registry: FakeRegistry) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application in this process. An exception that the application does not handle fails the test."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://wane") as client:
        yield client


class SocketServer(DrainingServer):
    """A server of the application with the fake engine. The server runs in the test's event loop."""

    def __init__(self, app: Application, registry: FakeRegistry, **options: Any) -> None:
        """`options` are uvicorn's."""
        super().__init__(configured(app, port=0, **options), self.drain_registry, self.listens)
        http = cast(partial[Connection], self.config.http_protocol_class)
        self.limits: Limits = http.args[1]
        self.config.http_protocol_class = self.counting(http)  # type: ignore[assignment]
        self.app = app
        self.registry = registry
        self.notice_s = 0.0
        self.listening = asyncio.Event()
        self.read_bytes = 0  # the number of bytes read from all connections
        self.open: weakref.WeakSet[Connection] = weakref.WeakSet()
        """The connections that exist."""

    def counting(self, http: partial[Connection]) -> partial[Connection]:
        """Returns a partial with the same arguments as `http`, but of a subclass of `Connection` that adds the number
        of received bytes to `read_bytes`, and itself to `open`."""
        server = self

        class Counting(Connection):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                server.open.add(self)
                super().connection_made(transport)

            def data_received(self, data: bytes) -> None:
                server.read_bytes += len(data)
                super().data_received(data)

        return partial(cast(type[Connection], Counting), *http.args, **http.keywords)

    async def send_packets(self, writer: asyncio.StreamWriter, *parts: bytes) -> None:
        """Writes each part only after the server has read the previous part. Returns after the server has read the last
        part."""
        for part in parts:
            enough = self.read_bytes + len(part)
            writer.write(part)
            while self.read_bytes < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def drain_registry(self) -> None:
        await drain(cast(ModelRegistry, self.registry), self.notice_s)

    async def draining_is_over(self) -> None:
        assert self.draining is not None
        await self.draining

    def listens(self, addresses: Sequence[tuple[str, int]]) -> None:
        (self.address,) = addresses
        self.url = "http://{}:{}".format(*self.address)
        self.listening.set()


@pytest.fixture
async def server(
    app: Application, registry: FakeRegistry, travel: Callable[[float], None]
) -> AsyncIterator[SocketServer]:
    """A real uvicorn server with a real socket and the fake engine. This fixture depends on the fixture `travel`, so
    that pytest restores the clock only after the server has stopped."""
    server = SocketServer(app, registry)
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    yield server
    server.should_exit = True
    await serving


@pytest.fixture(scope="module", autouse=True)
def close_bundles() -> Iterator[None]:
    """Drops the shipped models at the end of each file."""
    yield
    opened.cache_clear()


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """The real server with the real models, in its own process."""
    with live_server() as server:
        yield server


@pytest.fixture(scope="session")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    """A client of the real server."""
    with httpx.Client(base_url=live.url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture
async def make_harness() -> AsyncIterator[MakeHarness]:
    """A function that makes engine harnesses. After the test, this fixture closes the harnesses, and checks that only
    resident states use slots of the state pools."""
    harnesses: list[EngineHarness] = []

    def make(**options: Any) -> EngineHarness:
        harnesses.append(EngineHarness(**options))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.runner.gate.set()
        harness.shadow_runner.gate.set()
        await harness.engine.drain()
        await harness.engine.close()
        harness.engine.state_cache.check_integrity(idle=True)


@pytest.fixture
async def travel(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that moves the event loop's clock forward by its argument, in seconds."""
    loop = asyncio.get_running_loop()
    real, moved_s = loop.time, [0.0]

    def forward(seconds: float) -> None:
        moved_s[0] += seconds

    monkeypatch.setattr(loop, "time", lambda: real() + moved_s[0])
    return forward


@pytest.fixture
def harness(make_harness: MakeHarness) -> EngineHarness:
    """An engine harness with the default options."""
    return make_harness()
