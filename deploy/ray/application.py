"""Wane as a Ray Serve deployment. Each replica of the deployment is a complete Wane application.

Ray's proxies and routers replace HAProxy, and Ray's controller starts and stops replicas. A replica is healthy once its
models are loaded. Before a replica stops, Ray sends it no more requests. Like a server, a replica shuts down when the
lifespan of its application ends.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Mapping

from ray import serve
from starlette.types import ASGIApp

from wane.service.app import VERSION, create_app
from wane.service.observability import logs
from wane.service.observability.metrics import Metrics
from wane.service.observability.tracing import Tracing
from wane.service.registry.registry import ModelRegistry
from wane.service.server import spare_the_collector
from wane.service.settings import Settings

NAME = "wane"
Chosen = Mapping[str, object]
"""Settings by name. The values have the syntax of the command line."""


class LoadEnded(Exception):
    """The models could not be loaded. The message says why. Ray shows the message in the deployment's status."""


class Replica:
    """One replica of the server. Its settings come from the environment. The configuration's `args` override them."""

    def __init__(self, chosen: Chosen) -> None:
        self.settings = read(chosen)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application. Ray runs the application's lifespan and requests on the same event loop."""
        logs.configure(self.settings.log_level)
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        metrics = Metrics()
        self.tracing = Tracing.open(os.environ, VERSION)
        return create_app(
            self.settings,
            ModelRegistry(self.settings, metrics),
            metrics,
            on_load_failure=self._fail,
            on_ready=self._ready,
            tracing=self.tracing,
        )

    def __del__(self) -> None:
        """Exports the last spans and flushes the log. Ray calls this after the lifespan has ended."""
        if self.tracing is not None:
            self.tracing.close()
        logs.flush()

    async def check_health(self) -> None:
        """Waits until the models are loaded. Ray calls this before it sends the first request. Afterwards, a replica
        that answers this call is healthy. An unreachable session store does not make a replica unhealthy, because a new
        replica could not reach the store either. Raises LoadEnded if the models could not be loaded. Ray then removes
        the replica.
        """
        await asyncio.shield(self.loaded)

    def _ready(self) -> None:
        spare_the_collector()
        self.loaded.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.loaded.set_exception(LoadEnded(f"{type(error).__name__}: {error}"))


def read(chosen: Chosen) -> Settings:
    """Returns the settings. Raises SettingsError, which names the invalid setting."""
    return Settings.read(os.environ, Namespace(**chosen))


def wane(chosen: dict[str, object]) -> serve.Application:
    """Builds the application for `import_path` in serve.yaml. `chosen` has the `args` of serve.yaml. Raises
    SettingsError if a setting is invalid, before any replica starts.
    """
    read(chosen)
    deployment = serve.deployment(serve.ingress()(Replica), name=NAME)
    return deployment.bind(chosen)
