"""A server with an engine harness and a real socket, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from starlette.types import Receive, Scope, Send

from tests.service.conftest import SocketServer, never
from tests.service.engine_harness import EngineHarness
from tests.service.fake_engine import FakeRegistry
from wane.service.app import Application, create_app
from wane.service.engine.engine import Engine
from wane.service.net.limits import Limits
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.server import Worker
from wane.service.settings import Settings
from wane.service.types.request import StepRequest
from wane.service.workers.links import Peers
from wane.service.workers.placement import Placement
from wane.service.workers.steps import Step

PREDICT = "/v1/predict"
STEP = "/v1/sessions/a/tokens"
STEP_ROUTE = "/v1/sessions/{session}/tokens"

ANSWER_S = 60  # the time in which the second worker answers

VARIABLE = ("latency", "request_id", "session")

Document = dict[str, Any]


class OneEngine(FakeRegistry):
    """A registry of one real engine. A test may replace the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine  # type: ignore[assignment]
        self.default = engine.name

    async def engine_for(  # type: ignore[override]
        self, session: str, model: str | None = None, deadline: float | None = None
    ) -> Engine:
        self.check_ready()
        return cast(Engine, self.engine)

    def resident_engine(self, session: str) -> Engine | None:  # type: ignore[override]
        """Returns the only engine, or None if the registry is not ready."""
        return cast(Engine, self.engine) if self.ready else None

    def swap(self, engine: Engine) -> None:
        """Retires the registry's engine. The registry then uses `engine` instead."""
        cast(Engine, self.engine).retire()
        self.engine = engine  # type: ignore[assignment]

    async def close(self) -> None:
        """Does nothing, because the harness's fixture closes the engine."""


class OtherWorker(Placement):
    """Passes each request of a session to a second worker, which has the same engine."""

    def __init__(self, folder: Path, app: Application, limits: Limits) -> None:
        """`folder` is for the workers' sockets."""
        paths = [str(folder / str(number)) for number in range(2)]
        first, self.second = (Peers(paths, number, limits, ANSWER_S, app, partial(Step, app)) for number in range(2))
        super().__init__(app, first, 0, 2)

    def worker_of(self, session: str) -> int:
        """Returns the number of the second worker."""
        return 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await super().__call__(scope, receive, send)
            return
        async with await self.second.listen():
            await super().__call__(scope, receive, send)


class ServerHarness(SocketServer):
    """A server with the engine of a harness."""

    def __init__(self, harness: EngineHarness, folder: Path | None = None, **changes: Any) -> None:
        """`folder`: if it is not None, the server has two workers, whose sockets are there, and passes each request of
        a session on. `changes` has settings."""
        settings = Settings(**changes)
        self.harness = harness
        self.metrics = Metrics()
        self.models = OneEngine(harness.engine)
        app = create_app(settings, cast(ModelRegistry, self.models), self.metrics, on_load_failure=never)
        worker = Worker()
        if folder is not None:
            worker = Worker(place=partial(OtherWorker, folder))
        super().__init__(app, self.models, worker=worker)
        self.ends = asyncio.Event()
        self.clients: list[Client] = []

    async def main_loop(self) -> None:
        """Waits until the server is told to end. uvicorn's own method checks this ten times a second."""
        await self.on_tick(0)
        await self.ends.wait()

    def counted(self, status: int, route: str = STEP_ROUTE) -> float:
        """Returns the number of POST requests to the route that the server has answered with this status."""
        labels = {"route": route, "method": "POST", "status": str(status)}
        return self.metrics.registry.get_sample_value("wane_http_requests_total", labels) or 0.0


@asynccontextmanager
async def served(harness: EngineHarness, folder: Path | None = None, /, **changes: Any) -> AsyncIterator[ServerHarness]:
    """Runs a server with the sessions a, b and c during the block. Each session has received the token 5, and has a
    resident state. `folder`: see `ServerHarness`."""
    await start_sessions(harness)
    server = ServerHarness(harness, folder, **changes)
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    try:
        yield server
    finally:
        for client in server.clients:
            client.writer.close()
        server.ends.set()
        await task


async def start_sessions(harness: EngineHarness) -> None:
    """Creates the sessions a, b and c, and sends the token 5 to each. Each session then has a resident state."""
    for name in "abc":
        await harness.engine.create_session(name)
        await harness.engine.submit(StepRequest(name, (5,)))


class Client:
    """A client that sends and receives raw bytes on one connection."""

    def __init__(self, server: ServerHarness, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, server: ServerHarness) -> Client:
        """Opens a connection. `served` closes it."""
        server.clients.append(cls(server, *await asyncio.open_connection(*server.address)))
        return server.clients[-1]

    async def send_packets(self, *parts: bytes) -> None:
        """Sends each part in its own packet. Sends a packet only after the server has read the previous packet."""
        await self.server.send_packets(self.writer, *parts)

    async def read_response(self) -> tuple[int, dict[str, str], Document]:
        """Reads the next response. Returns its status, headers and document."""
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(body)

    async def ask(self, *parts: bytes) -> tuple[int, Document]:
        """Sends a request. Returns the response's status and document."""
        await self.send_packets(*parts)
        status, _, document = await self.read_response()
        return status, document


def post(body: object, *headers: str, path: str = STEP, version: str = "1.1") -> bytes:
    """Returns a complete POST request as bytes. `body` is bytes, or a value that this function encodes as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: wane", f"content-length: {len(content)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


def in_two(request: bytes) -> tuple[bytes, bytes]:
    """Returns the head and the body of a request, to be sent as two packets."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def repeatable(document: Any) -> Any:
    """Returns a response document without the fields that differ between the responses to equal requests."""
    if isinstance(document, list):
        return [repeatable(one) for one in document]
    if not isinstance(document, dict):
        return document
    return {name: repeatable(value) for name, value in document.items() if name not in VARIABLE}
