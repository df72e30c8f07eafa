"""Wane as a Ray Serve deployment: each replica of Ray is a complete Wane application.

Ray's proxies and routers replace HAProxy, and its controller starts and stops replicas. This module maps only what they
need: a replica is healthy once its models are loaded; before it stops, Ray sends it no more requests; it stops with the
lifespan of the application, like a server.
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
"""Settings by name, with the command line's values."""


class LoadEnded(Exception):
    """The models could not be loaded. The message says why; Ray shows it in the deployment's status."""


class Replica:
    """One server. Its settings come from the environment; the configuration's `args` override them."""

    def __init__(self, chosen: Chosen) -> None:
        self.settings = read(chosen)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application. Ray runs its lifespan on the event loop of its requests."""
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
        """Waits until the models are loaded; Ray calls this before it sends the first request. After that, a replica
        that answers is healthy.

        An unreachable store does not make a replica unhealthy, because no other replica would reach it either. Raises
        LoadEnded; Ray then drops the replica.
        """
        await asyncio.shield(self.loaded)

    def _ready(self) -> None:
        spare_the_collector()
        self.loaded.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.loaded.set_exception(LoadEnded(f"{type(error).__name__}: {error}"))


def read(chosen: Chosen) -> Settings:
    """Returns the settings. Raises SettingsError, which names the setting at fault."""
    return Settings.read(os.environ, Namespace(**chosen))


def wane(chosen: dict[str, object]) -> serve.Application:
    """Builds the application for `import_path` in serve.yaml; `chosen` is its `args`.

    Raises SettingsError before any replica starts.
    """
    read(chosen)
    deployment = serve.deployment(serve.ingress()(Replica), name=NAME)
    return deployment.bind(chosen)
