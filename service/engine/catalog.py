"""The models that this process serves, by name."""

from __future__ import annotations

from service.engine.engine import Engine
from service.metrics import Metrics
from service.settings import Settings


class CatalogError(Exception):
    """The bundles asked for cannot be served; the message is for the operator, and the process ends."""


class Catalog:
    """Loads, lists and closes engines, and finds the engine of a session."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Nothing is loaded yet: `load` does that, `ready` says when."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether every model is loaded, verified and warmed up, and the process is not draining."""
        raise NotImplementedError

    @property
    def status(self) -> str:
        """`loading`, `ready` or `draining`."""
        raise NotImplementedError

    @property
    def device(self) -> str:
        """`cpu` or `cuda`; before loading, the device that was asked for."""
        raise NotImplementedError

    @property
    def default(self) -> str:
        """The name of the model that answers where none is named."""
        raise NotImplementedError

    async def load(self) -> None:
        """Reads, verifies and warms up every bundle. Raises CatalogError, BundleError, DeviceError."""
        raise NotImplementedError

    def get(self, name: str | None = None) -> Engine:
        """The engine of a model, or the default one. Raises UnknownModel; Unavailable unless ready."""
        raise NotImplementedError

    async def engine_for(self, session: str, model: str | None = None) -> Engine:
        """The engine that a session lives on. Raises UnknownSession; InvalidRequest if `model` is another."""
        raise NotImplementedError

    def list(self) -> list[Engine]:
        """Every engine: the default first, the others by name."""
        raise NotImplementedError

    async def report(self) -> dict[str, object]:
        """The body of /v1/report: `{"device", "models": [engine reports]}`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Not ready from now on; waits for what was admitted, then ends every engine."""
        raise NotImplementedError
