"""The entrances (HTTP, WebSocket and direct calls) through which an engine receives steps. Each is a subclass of
`Entrance`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect

from tests.service.engine_harness import EngineHarness
from tests.service.server_harness import Client, Document, OneEngine, ServerHarness, post, served, start_sessions
from wane.service.api import encode
from wane.service.api.problem import describe
from wane.service.engine.engine import Engine
from wane.service.engine.pending import Pending
from wane.service.errors import WaneError
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.request import ANYBODY, StepRequest

TIMEOUT_S = Settings().request_timeout_ms / 1000
"""The timeout of every step."""


class Call(Protocol):
    """A step that the client has sent."""

    async def outcome(self) -> Document:
        """Returns the answer's document, or the problem document."""
        ...

    async def disconnect(self) -> None:
        """Disconnects without reading the answer."""
        ...


class Entrance:
    """A way by which a test sends steps to an engine. `models` is the registry that contains the engine."""

    def __init__(self, models: OneEngine) -> None:
        self.models = models

    async def send(self, session: str, **step: Any) -> Call:
        """Sends a step. `step` has the field `tokens` or `input`, and optionally `expected_position`,
        `idempotency_key`, `mode`, `prove` and `create`."""
        raise NotImplementedError

    async def step(self, session: str, **step: Any) -> Document:
        """Sends a step, and waits for its outcome."""
        return await (await self.send(session, **step)).outcome()

    async def none_in_flight(self) -> None:
        """Waits until the server has no request in flight."""
        await self.models.epochs.depart()

    async def close(self) -> None:
        """Closes the connections. Fails if a step reached the engine through another entrance."""


class EngineCall:
    def __init__(self, engine: Engine, pending: Pending[Answer]) -> None:
        self._engine = engine
        self._pending = pending

    async def outcome(self) -> Document:
        try:
            answer = await self._pending
        except WaneError as error:
            return describe(error).body("")
        document: Document = json.loads(encode.json_bytes(answer))
        return document

    async def disconnect(self) -> None:
        self._pending.cancel()


class EngineEntrance(Entrance):
    """Calls `Engine.submit` directly."""

    async def send(self, session: str, **step: Any) -> EngineCall:
        engine = await self.models.engine_for(session)
        if "input" in step:
            step["tokens"] = await engine.encode(step.pop("input"))
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        creator = ANYBODY if step.pop("create", False) else None
        request = StepRequest(session, tuple(step.pop("tokens")), deadline=deadline, creator=creator, **step)
        return EngineCall(engine, engine.submit(request))


class HttpCall:
    def __init__(self, client: Client, idle: list[Client]) -> None:
        self._client = client
        self._idle = idle

    async def outcome(self) -> Document:
        _, headers, document = await self._client.read_response()
        if headers.get("connection") != "close":
            self._idle.append(self._client)
        if "results" not in document:
            return document
        (result,) = document["results"]
        failure: Document | None = result.get("error")
        return failure or result

    async def disconnect(self) -> None:
        self._client.writer.close()


class HttpEntrance(Entrance):
    """Sends POST /v1/sessions/{session}/tokens."""

    def __init__(self, server: ServerHarness) -> None:
        super().__init__(server.models)
        self.server = server
        self.idle: list[Client] = []

    async def send(self, session: str, **step: Any) -> HttpCall:
        key = step.pop("idempotency_key", None)
        headers = [] if key is None else [f"idempotency-key: {key}"]
        return await self.send_request(post(step, *headers, path=f"/v1/sessions/{session}/tokens"))

    async def send_request(self, request: bytes) -> HttpCall:
        client = self.idle.pop() if self.idle else await Client.of(self.server)
        client.writer.write(request)
        return HttpCall(client, self.idle)


class BulkEntrance(HttpEntrance):
    """Sends POST /v1/sessions/tokens. The list of steps in the body has one step."""

    async def send(self, session: str, **step: Any) -> HttpCall:
        return await self.send_request(post({"steps": [{"session": session, **step}]}, path="/v1/sessions/tokens"))


class WebSocketCall:
    def __init__(self, socket: ClientConnection, idle: list[ClientConnection]) -> None:
        self._socket = socket
        self._idle = idle

    async def outcome(self) -> Document:
        document: Document = json.loads(await self._socket.recv())
        failure: Document | None = document.get("error")
        # After these errors the server closes the WebSocket.
        if failure is not None and failure["status"] in (404, 409, 503):
            await self._socket.wait_closed()
        else:
            self._idle.append(self._socket)
        return failure or document

    async def disconnect(self) -> None:
        await self._socket.close()


class WebSocketEntrance(Entrance):
    """Sends steps over WebSockets on /v1/sessions/{session}/stream. All steps of a session use one WebSocket."""

    def __init__(self, server: ServerHarness) -> None:
        super().__init__(server.models)
        self.server = server
        self.idle: dict[str, list[ClientConnection]] = {}

    async def send(self, session: str, **step: Any) -> WebSocketCall:
        idle = self.idle.setdefault(session, [])
        if not idle:
            url = self.server.url.replace("http://", "ws://")
            idle.append(await connect(f"{url}/v1/sessions/{session}/stream", proxy=None))
        socket = idle.pop()
        await socket.send(json.dumps(step))
        return WebSocketCall(socket, idle)

    async def close(self) -> None:
        for socket in chain.from_iterable(self.idle.values()):
            await socket.close()


SERVED: dict[str, type[HttpEntrance | WebSocketEntrance]] = {
    "http": HttpEntrance,
    "bulk": BulkEntrance,
    "websocket": WebSocketEntrance,
    "passed on": HttpEntrance,
    "passed on, websocket": WebSocketEntrance,
}
"""The entrances of a server. A request at the last two is passed to a second worker, which answers it."""
ENTRANCES = ["engine", *SERVED]


@asynccontextmanager
async def entered(name: str, harness: EngineHarness) -> AsyncIterator[Entrance]:
    """Creates the sessions a, b and c, each of which receives one token. Then yields the entrance with this name to the
    harness's engine."""
    if name == "engine":
        await start_sessions(harness)
        yield EngineEntrance(OneEngine(harness.engine))
        return
    with TemporaryDirectory() as folder:
        async with served(harness, Path(folder) if name.startswith("passed on") else None) as server:
            entrance = SERVED[name](server)
            yield entrance
            await entrance.close()
