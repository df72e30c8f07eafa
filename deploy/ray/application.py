"""Wane as a Ray Serve deployment: each of Ray's replicas is a server's own application, with all that it is.

Ray's proxies and routers stand where HAProxy does, and its controller where somebody would start and stop processes.
What they need of a server is mapped here, and nothing else is: a replica is healthy once its models are loaded; it is
told to go by Ray no longer sending it requests, and ends as a server does, with the lifespan of the application.
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
"""Settings by their names, as the command line has them."""


class LoadEnded(Exception):
    """The models could not be loaded; the message says why, and Ray tells it with the deployment's status."""


class Replica:
    """One server. Settings are those of the environment, and over them what the configuration names under `args`."""

    def __init__(self, chosen: Chosen) -> None:
        self.settings = read(chosen)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; Ray runs its lifespan, on the loop that it runs its requests on."""
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
        """Ray calls this once the lifespan is over."""
        if self.tracing is not None:
            self.tracing.close()
        logs.flush()

    async def check_health(self) -> None:
        """Healthy is a replica that answers. The first time, before it is sent any request, this waits for the models.

        A store that is away makes no replica unhealthy: another one would not reach it either. Raises LoadEnded, and
        Ray gives the replica up.
        """
        await asyncio.shield(self.loaded)

    def _ready(self) -> None:
        spare_the_collector()
        self.loaded.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.loaded.set_exception(LoadEnded(f"{type(error).__name__}: {error}"))


def read(chosen: Chosen) -> Settings:
    """Raises SettingsError naming what is wrong."""
    return Settings.read(os.environ, Namespace(**chosen))


def wane(chosen: dict[str, object]) -> serve.Application:
    """What `import_path` in serve.yaml names; `chosen` is what is there under `args`.

    Raises SettingsError before there is any replica.
    """
    read(chosen)
    deployment = serve.deployment(serve.ingress()(Replica), name=NAME)
    return deployment.bind(chosen)
