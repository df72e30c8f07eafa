"""The server process: uvicorn with one worker, which drains before it stops listening.

numpy multiplies with one thread unless the operator sets another number.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from threadpoolctl import threadpool_limits

from wane.service.app import VERSION, create_app
from wane.service.auth.key_file import KeySource
from wane.service.net.connection import ConnectionLimits, ReceiveBudget, RejectedConnections
from wane.service.net.http_protocol import HttpProtocol, ProxyHeaders, RequestDispatcher
from wane.service.net.websocket_protocol import WebSocketProtocol
from wane.service.observability import logs
from wane.service.observability.logs import SERVICE
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import Tracing
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings, SettingsError

SAID_BY = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def spare_the_processors(environment: Mapping[str, str]) -> None:
    """Keeps BLAS to one thread, for the rest of the process, where none of the usual variables says how many.

    The matrices of a bundle's checks are small, and BLAS's threads wait for each other by spinning: on processors that
    requests need while a model is loaded beside another one, or a replica is started beside others.
    """
    if not any(environment.get(name) for name in SAID_BY):
        threadpool_limits(1, user_api="blas")


KEEP_ALIVE_S = 75  # longer than the idle time of the usual proxies (60 s), so that it is them who hang up
# Messages are short: to compress one costs more than to answer it.
WEBSOCKETS: dict[str, Any] = {"ws": "websockets-sansio", "ws_per_message_deflate": False}
# The collector looks at what is new this many allocations after the last time, and at what is older every tenth time:
# next to nothing that a request leaves behind needs it.
GC_THRESHOLDS = (20_000, 10, 10)
CLOSE_S = 5  # for connections to take their last bytes once everything is answered


class Server(uvicorn.Server):
    """uvicorn, which drains before it stops listening.

    On the first SIGTERM or SIGINT the server is unready. For `notice_s` it goes on as before, so that the load
    balancer notices and sends requests elsewhere. Then it refuses new work with 503 and finishes what it has admitted,
    as long as the settings allow; then it stops listening, and WebSockets are closed with 1012. Another SIGINT stops it
    without that. On SIGHUP it reads the file of its `keys`, if there is one.
    """

    def __init__(
        self, config: uvicorn.Config, registry: ModelRegistry, notice_s: float = 0.0, keys: KeySource | None = None
    ) -> None:
        super().__init__(config)
        self.keys = keys
        self.registry = registry
        self.notice_s = notice_s
        self.draining: asyncio.Task[None] | None = None
        self._urls: list[str] = []
        self._announced = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.keys is not None and self.keys.has_file:
            self.loop.add_signal_handler(signal.SIGHUP, self.keys.reload)
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                self._urls.append(url)
                SERVICE.info("listening", extra={"fields": {"url": url}})
                is_open = self.keys is None or self.keys.keyring is None
                if is_open and not ip_address(host.partition("%")[0]).is_loopback:
                    SERVICE.warning("no API keys are set: open to everybody who reaches %s", url)
        self.announce()

    def announce(self) -> None:
        """Says to a person at a terminal, once, that the default model answers, and where."""
        if self._urls and not self._announced and self.registry.served and sys.stdout.isatty():
            self._announced = True
            print(f"ready: {' '.join(self._urls)}", flush=True)  # noqa: T201

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            super().handle_exit(sig, frame)
        elif self.draining is None:
            self.loop.call_soon_threadsafe(self._start_draining)
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def _start_draining(self) -> None:
        if self.draining is None:
            self.draining = self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        SERVICE.info("draining")
        try:
            if self.registry.ready:
                self.registry.leave()
                await asyncio.sleep(self.notice_s)
            await self.registry.close()
        finally:
            self.should_exit = True


def refuse_more_workers(environment: Mapping[str, str]) -> None:
    """One process is one replica: sessions live in it. Raises SettingsError where uvicorn is told otherwise."""
    workers = environment.get("WEB_CONCURRENCY", "1")
    if workers.strip() != "1":
        raise SettingsError(f"WEB_CONCURRENCY is {workers}, but one process is one replica: start more processes")


def spare_the_collector() -> None:
    """What a loaded model has made stays to the end: the garbage collector need not walk through it, which takes
    it a tenth of a second each time, with every request waiting."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def protocols(settings: Settings, metrics: Metrics, dispatcher: RequestDispatcher | None = None) -> dict[str, Any]:
    """The part of uvicorn's configuration that names the protocol classes and the proxies that are trusted.

    uvicorn itself would trust every client on this machine. `dispatcher`: the application's."""
    trusted_headers = None if settings.trusted_proxies is None else ProxyHeaders(settings.trusted_proxies)
    named = {
        "connection_limits": ConnectionLimits.of(settings),
        "rejected": RejectedConnections(metrics),
        "receive_budget": ReceiveBudget(max(settings.receive_budget_bytes, 2 * settings.max_body_bytes)),
    }
    return {
        "http": partial(HttpProtocol, dispatcher=dispatcher, trusted_headers=trusted_headers, **named),
        "ws": partial(WebSocketProtocol, **named),
        "proxy_headers": settings.trusted_proxies is not None,
        "forwarded_allow_ips": settings.trusted_proxies or "",
    }


def run(settings: Settings) -> None:
    """Serves until told to stop. Raises what kept a model from being loaded: RegistryError, BundleError, ..."""
    logs.configure(settings.log_level)
    spare_the_processors(os.environ)
    failures: list[Exception] = []

    def end(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def announce() -> None:
        spare_the_collector()
        server.announce()

    metrics = Metrics()
    tracing = Tracing.open(os.environ, VERSION)
    registry = ModelRegistry(settings, metrics)
    app = create_app(
        settings,
        registry,
        metrics,
        on_load_failure=end,
        on_default=announce,
        on_ready=spare_the_collector,
        tracing=tracing,
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        workers=1,
        **(WEBSOCKETS | protocols(settings, metrics, app.dispatcher)),
        ws_max_size=settings.max_body_bytes,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = Server(config, registry, notice_s=settings.shutdown_delay_ms / 1000, keys=app.state.keys)
    server.run()
    if tracing is not None:
        tracing.close()
    SERVICE.info("stopped")
    logs.flush()
    if failures:
        raise failures[0]
