"""The server process: uvicorn with one worker, which drains before it stops listening.

numpy multiplies with one thread unless the operator sets another number.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any

import uvicorn
from threadpoolctl import threadpool_limits

from wane.service.api.dispatch import Dispatcher
from wane.service.app import VERSION, create_app
from wane.service.auth.key_file import KeySource
from wane.service.net.connection import ReceiveBudget, RejectedConnections
from wane.service.net.releases import NOT_IN_FORCE, untested_releases
from wane.service.net.server import DrainingServer
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
# The collector looks at what is new this many allocations after the last time, and at what is older every tenth time:
# next to nothing that a request leaves behind needs it.
GC_THRESHOLDS = (20_000, 10, 10)
CLOSE_S = 5  # for connections to take their last bytes once everything is answered


class Announcer:
    """Says where the server listens, and, to a person at a terminal, that the default model answers."""

    def __init__(self, registry: ModelRegistry, keys: KeySource) -> None:
        self._registry = registry
        self._keys = keys
        self._urls: list[str] = []

    def listening(self, addresses: Sequence[tuple[str, int]]) -> None:
        """The server listens there. From now on it reads the file of keys again, if there is one, on SIGHUP."""
        if self._keys.has_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._keys.reload)
        for host, port in addresses:
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._urls.append(url)
            SERVICE.info("listening", extra={"fields": {"url": url}})
            if self._keys.keyring is None and not ip_address(host.partition("%")[0]).is_loopback:
                SERVICE.warning("no API keys are set: open to everybody who reaches %s", url)
        self.announce()

    def announce(self) -> None:
        """To be called when the server listens, and when the default model answers: the later call says it."""
        if self._urls and self._registry.served and sys.stdout.isatty():
            print(f"ready: {' '.join(self._urls)}", flush=True)  # noqa: T201


async def drain(registry: ModelRegistry, notice_s: float) -> None:
    """Ends what the registry serves.

    The server is unready at once. For `notice_s` it goes on as before, so that the load balancer notices and sends
    requests elsewhere. Then new work is refused with 503, and what was admitted is finished, as long as the settings
    allow.
    """
    SERVICE.info("draining")
    if registry.ready:
        registry.leave()
        await asyncio.sleep(notice_s)
    await registry.close()


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


def protocols(
    settings: Settings, metrics: Metrics, dispatcher: Dispatcher | None = None, *, plain_uvicorn: bool = False
) -> dict[str, Any]:
    """The part of uvicorn's configuration that names the protocol classes and the proxies that are trusted.

    uvicorn itself would trust every client on this machine. `dispatcher`: the application's. `plain_uvicorn`: whether
    the classes are uvicorn's own, which are slower and have no limits for slow clients.
    """
    proxies = {
        "proxy_headers": settings.trusted_proxies is not None,
        "forwarded_allow_ips": settings.trusted_proxies or "",
    }
    # Messages of WebSockets are short: to compress one costs more than to answer it.
    common = {"ws_per_message_deflate": False, "ws_max_size": settings.max_body_bytes, **proxies}
    if plain_uvicorn:
        return {"http": "auto", "ws": "auto", **common}
    # Imported here because another release of uvicorn or websockets may lack what these import of it.
    from wane.service.net.http_protocol import HttpProtocol, ProxyHeaders
    from wane.service.net.websocket_protocol import WebSocketProtocol

    trusted_headers = None if settings.trusted_proxies is None else ProxyHeaders(settings.trusted_proxies)
    named = {
        "settings": settings,
        "rejected": RejectedConnections(metrics),
        "receive_budget": ReceiveBudget(max(settings.receive_budget_bytes, 2 * settings.max_body_bytes)),
    }
    return {
        "http": partial(HttpProtocol, dispatcher=dispatcher, trusted_headers=trusted_headers, **named),
        "ws": partial(WebSocketProtocol, **named),
        **common,
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
        announcer.announce()

    untested = untested_releases()
    if untested:
        SERVICE.warning(
            "not tested with %s: serving on uvicorn's own protocol classes, slower and without the limits for slow"
            " clients; not in force: %s; body_timeout_s in part; see docs/security.md",
            " and ".join(untested),
            ", ".join(NOT_IN_FORCE),
        )
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
    announcer = Announcer(registry, app.state.keys)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        workers=1,
        **protocols(settings, metrics, app.dispatcher, plain_uvicorn=bool(untested)),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = DrainingServer(config, partial(drain, registry, settings.shutdown_delay_ms / 1000), announcer.listening)
    server.run()
    if tracing is not None:
        tracing.close()
    SERVICE.info("stopped")
    logs.flush()
    if failures:
        raise failures[0]
