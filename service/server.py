"""Runs a server process, which is uvicorn with one worker. Before the process shuts down, it drains, which means that
it finishes the requests in flight. numpy uses one thread, unless the operator sets another number.
"""

from __future__ import annotations

import asyncio
import gc
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
from typing import Any

import uvicorn
from threadpoolctl import threadpool_limits

from wane.models.bundle import BundleError
from wane.service.app import VERSION, Application, create_app
from wane.service.auth.key_file import KeySource
from wane.service.auth.keyring import MakeBucket, own_bucket
from wane.service.auth.keys import KeysError
from wane.service.net.limits import Limits
from wane.service.net.server import DrainingServer, limit_connections
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


# The idle timeout of connections. It exceeds the usual idle timeout of proxies (60 s), so that the proxy, and not the
# server, closes an idle connection.
KEEP_ALIVE_S = 75
GC_THRESHOLDS = (2_000, 10, 10)  # a collection of many more objects would hold the event loop too long
CLOSE_S = 5  # the time after the drain in which clients can read the rest of their responses
END_S = 5  # the time after the server has stopped in which its threads can end


def say_ready(urls: Sequence[str]) -> None:
    """Prints that the server is ready, if the output is a terminal."""
    if sys.stdout.isatty():
        # One write, so that no log line of another thread comes between the text and its line break.
        sys.stdout.write(f"ready: {' '.join(urls)}\n")
        sys.stdout.flush()


class Announcer:
    """Logs the listening addresses when the server listens. Calls `ready` when the server listens and the default model
    is ready."""

    def __init__(self, registry: ModelRegistry, keys: KeySource, ready: Callable[[Sequence[str]], None]) -> None:
        self._registry = registry
        self._keys = keys
        self._ready = ready
        self._urls: list[str] = []

    def listening(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Logs the listening addresses. If there is a key file, installs a SIGHUP handler that reloads the file."""
        if self._keys.has_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._keys.reload)
        for host, port in addresses:
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._urls.append(url)
            SERVICE.info("listening", extra={"fields": {"url": url}})
            if self._keys.keyring is None and not ip_address(host.partition("%")[0]).is_loopback:
                SERVICE.warning("no API keys are set: every client that can connect to %s has access", url)
        self.announce()

    def announce(self) -> None:
        """Is called when the server starts to listen, and when all models are loaded."""
        if self._urls and self._registry.ready:
            self._ready(self._urls)


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
    """What one of several workers of a server does in another way than the only process of a server.

    `place` returns the worker's ASGI application, which gets the server's own and the limits of connections. The worker
    listens on `sockets`. `ready` is called with the addresses when the worker is ready. `number` and `log_turns`: see
    `logs.configure`. `make_bucket` and `owned`: see `Keyring` and `MemoryStore`.
    """

    number: int
    log_turns: Path

    place: Callable[[Application, Limits], Callable[..., Awaitable[None]]]
    sockets: list[socket.socket]
    ready: Callable[[Sequence[str]], None]
    make_bucket: MakeBucket
    owned: OwnedSessions


def configured(app: Application, worker: Worker | None = None, **options: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration with the application's limits for connections. `options` are uvicorn's. The
    options for proxies are always set, because uvicorn trusts the forwarding headers of local clients by default."""
    settings = app.settings
    limits = Limits(settings, app.state.metrics)
    config = uvicorn.Config(
        app if worker is None else worker.place(app, limits),
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
    limit_connections(config, limits)
    return config


def run(settings: Settings, worker: Worker | None = None) -> None:
    """Runs the server until a signal stops it. `worker`: if the process is one of several workers, what it does in
    another way. Raises RegistryError or BundleError if a required model cannot be loaded."""
    if worker is None:
        logs.configure(settings.log_level)
    else:
        logs.configure(settings.log_level, worker.number, worker.log_turns)
    spare_the_processors(os.environ)
    failures: list[Exception] = []

    def end(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def announce() -> None:
        spare_the_collector()
        announcer.announce()

    metrics = Metrics()
    tracing = Tracing.open(os.environ, VERSION)
    registry = ModelRegistry(settings, metrics, None if worker is None else worker.owned)
    app = create_app(
        settings,
        registry,
        metrics,
        on_load_failure=end,
        on_default=spare_the_collector,
        on_ready=announce,
        tracing=tracing,
        make_bucket=own_bucket if worker is None else worker.make_bucket,
    )
    announcer = Announcer(registry, app.state.keys, say_ready if worker is None else worker.ready)
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
    server = DrainingServer(config, partial(drain, registry, settings.shutdown_delay_ms / 1000), announcer.listening)

    async def serve() -> None:
        await server.serve(None if worker is None else worker.sockets)
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
