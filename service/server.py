"""Runs a server process, which is uvicorn with one worker and with limits for its connections (`net/`). Before the
process shuts down, it drains, which means that it finishes the requests in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from threadpoolctl import threadpool_limits

from wane.models.bundle import BundleError
from wane.service.app import VERSION, Application, create_app
from wane.service.auth.keyring import KeySource, MakeBucket, TokenBucket
from wane.service.auth.keys import KeysError
from wane.service.net.connection import Connection, answering
from wane.service.net.limits import Limits
from wane.service.observability import logs
from wane.service.observability.logs import SERVICE
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import Tracing
from wane.service.registry.registry import ModelRegistry
from wane.service.registry.repository import RegistryError
from wane.service.runners.runner import DeviceError
from wane.service.sessions.stores.memory import OwnedSessions
from wane.service.sessions.stores.store import StoreError
from wane.service.settings import Settings, SettingsError

FAILURES = (SettingsError, RegistryError, KeysError, StoreError, BundleError, DeviceError, OSError, UnicodeError)
"""What `run` raises if the server cannot start."""

UNSAVED = 1
"""The exit status if the sessions in memory could not be saved at the end."""

BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def spare_the_processors(environment: Mapping[str, str]) -> None:
    """Limits BLAS to one thread, unless one of the usual environment variables sets another number. The checks of a
    bundle use small matrices, and BLAS threads spin while they wait for each other. Several BLAS threads would slow
    down requests while a model is loaded or another replica starts.
    """
    if not any(environment.get(name) for name in BLAS_VARIABLES):
        threadpool_limits(1, user_api="blas")


KEEP_ALIVE_S = 75  # longer than the usual idle timeout of proxies (60 s), so that the proxy closes an idle connection
GC_THRESHOLDS = (2_000, 10, 10)  # a collection of many more objects would hold the event loop too long
CLOSE_S = 5  # the time after the drain in which clients can read the rest of their responses
END_S = 5  # the time after the server has stopped in which its threads can end


def say_ready(urls: Sequence[str]) -> None:
    """Prints that the server is ready, if the output is a terminal."""
    if sys.stdout.isatty():
        # One write, so that no log line of another thread comes between the text and its line break.
        sys.stdout.write(f"ready: {' '.join(urls)}\n")
        sys.stdout.flush()


def log_addresses(addresses: Sequence[tuple[str, int]], keys: KeySource) -> list[str]:
    """Logs the listening addresses, and returns them as URLs."""
    urls = [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in addresses]
    for (host, _), url in zip(addresses, urls, strict=True):
        SERVICE.info("listening", extra={"fields": {"url": url}})
        if keys.keyring is None and not ip_address(host.partition("%")[0]).is_loopback:
            SERVICE.warning("no API keys are set: every client that can connect to %s has access", url)
    return urls


async def drain(registry: ModelRegistry, notice_s: float) -> None:
    """Drains the registry. The readiness probe fails immediately. The server still accepts requests for `notice_s`, so
    that the load balancer can redirect new requests to other servers. Then the server answers new requests with 503,
    and finishes the requests in flight within `drain_timeout_ms`.
    """
    SERVICE.info("draining")
    if registry.ready:
        registry.leave()
        await asyncio.sleep(notice_s)
    await registry.close()


def refuse_more_workers(environment: Mapping[str, str]) -> None:
    """Raises SettingsError if uvicorn's variable WEB_CONCURRENCY requests several workers. uvicorn's workers would
    share one port, but a session's requests must reach the process that has the session in memory."""
    workers = environment.get("WEB_CONCURRENCY", "1")
    if workers.strip() != "1":
        raise SettingsError(
            f"WEB_CONCURRENCY is {workers}, but it starts workers that do not share sessions: unset "
            "it, and use --workers"
        )


def spare_the_collector() -> None:
    """Excludes the objects of loaded models from garbage collection, because they stay in use. A collection that scans
    these objects would block every request for a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@dataclass(frozen=True, slots=True)
class Worker:
    """What one of several workers of a server does in another way than the only process of a server, which has the
    defaults.

    `place` returns the worker's ASGI application, which gets the server's own and the limits of connections. The worker
    listens on `sockets`. `ready` is called with the addresses when the worker is ready. `number` and `log_turns`: see
    `logs.configure`. `make_bucket`, `owned`, `names_file` and `counts_file`: see `Keyring`, `MemoryStore`,
    `ModelRegistry` and `Continued`.
    """

    number: int | None = None
    log_turns: Path | None = None

    place: Callable[[Application, Limits], Callable[..., Awaitable[None]]] = lambda app, _: app
    sockets: list[socket.socket] | None = None
    ready: Callable[[Sequence[str]], object] = say_ready
    make_bucket: MakeBucket = TokenBucket
    owned: OwnedSessions | None = None
    names_file: Path | None = None
    counts_file: Path | None = None


ALONE = Worker()
"""The only process of a server."""


def configured(app: Application, worker: Worker = ALONE, **options: Any) -> uvicorn.Config:
    """Returns uvicorn's loaded configuration, with a `Connection` in front of uvicorn's protocol class. `options` are
    uvicorn's. The options for proxies are always set, because uvicorn trusts the forwarding headers of local clients by
    default."""
    settings = app.settings
    limits = Limits(settings, app.state.metrics)
    config = uvicorn.Config(
        worker.place(app, limits),
        http="httptools",
        ws="websockets-sansio",
        # WebSocket messages are short, so compressing a message would take longer than answering it.
        ws_per_message_deflate=False,
        ws_max_size=settings.max_body_bytes,
        # A client's pong may wait behind its unanswered messages. TCP_USER_TIMEOUT ends the connection to a dead
        # client, because pings are sent in any case.
        ws_ping_timeout=None,
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies or "",
        server_header=False,
        log_config=None,
        **options,
    )
    config.load()
    logging.getLogger("uvicorn.error").addFilter(is_about_the_server)
    config.loaded_app = answering(config.loaded_app)
    config.http_protocol_class = partial(Connection, config.http_protocol_class, limits)  # type: ignore[assignment]
    return config


def is_about_the_server(record: logging.LogRecord) -> bool:
    """Returns False for uvicorn's messages about invalid requests and frames, which a `Connection` counts and logs."""
    return not str(record.msg).startswith("Invalid ")


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with a drain before shutdown.

    On the first SIGTERM or SIGINT the server calls `drain`, and continues to serve until `drain` returns. Then it stops
    listening, and closes WebSockets with 1012. A second SIGINT stops the server immediately.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], Awaitable[None]],
        on_listening: Callable[[Sequence[tuple[str, int]]], None],
    ) -> None:
        """`on_listening` is called once, on the event loop's thread, with the host and the port of each listening
        socket."""
        super().__init__(config)
        self.draining: asyncio.Task[None] | None = None
        self._drain = drain
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        listeners = [listener for server in self.servers for listener in server.sockets]
        self._on_listening([listener.getsockname()[:2] for listener in listeners])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            super().handle_exit(sig, frame)
        elif self.draining is None:
            self._loop.call_soon_threadsafe(self._start_draining)
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def _start_draining(self) -> None:
        if self.draining is None:
            self.draining = self._loop.create_task(self._stop_drained())

    async def _stop_drained(self) -> None:
        try:
            await self._drain()
        finally:
            self.should_exit = True


def run(settings: Settings, worker: Worker = ALONE) -> None:
    """Runs the server until a signal stops it. Raises RegistryError or BundleError if a required model cannot be
    loaded."""
    logs.configure(settings.log_level, worker.number, worker.log_turns)
    spare_the_processors(os.environ)
    failures: list[Exception] = []

    def end(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    urls: list[str] = []

    def announce() -> None:
        if urls and registry.ready:
            worker.ready(urls)

    def listening(addresses: Sequence[tuple[str, int]]) -> None:
        if settings.api_keys_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
        urls.extend(log_addresses(addresses, keys))
        announce()

    def loaded() -> None:
        spare_the_collector()
        announce()

    metrics = Metrics(worker.counts_file)
    tracing = Tracing.open(os.environ, VERSION)
    registry = ModelRegistry(settings, metrics, worker.owned, worker.names_file)
    app = create_app(
        settings,
        registry,
        metrics,
        on_load_failure=end,
        on_default=spare_the_collector,
        on_ready=loaded,
        tracing=tracing,
        make_bucket=worker.make_bucket,
    )
    app.openapi()  # builds the description now, because that would hold the event loop at its first request
    keys: KeySource = app.state.keys
    config = configured(
        app,
        worker,
        host=settings.host,
        port=settings.port,
        workers=1,
        lifespan="on",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = DrainingServer(config, partial(drain, registry, settings.shutdown_delay_ms / 1000), listening)

    async def serve() -> None:
        await server.serve(worker.sockets)
        if tracing is not None:
            tracing.close()
        end_at_the_latest(failed=bool(failures) or registry.unsaved is not None)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())
    SERVICE.info("stopped")
    logs.flush()
    if failures:
        raise failures[0]
    if registry.unsaved is not None:
        raise registry.unsaved
    if any(thread.name.startswith("load-") for thread in threading.enumerate()):
        os._exit(0)  # an abandoned load that returns from native code while Python ends would abort the process


def end_at_the_latest(*, failed: bool) -> None:
    """Ends the process after END_S seconds, even if a thread still runs, for example one that reads a disk that does
    not answer. Python itself waits for its threads forever. `failed`: whether the exit status is 1."""

    def end() -> None:
        SERVICE.warning("the process ends although a thread still runs")
        logs.flush()
        os._exit(int(failed))

    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()
