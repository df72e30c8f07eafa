"""The documents of liveness and readiness."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.types.common import ModelDocument


class LivenessDocument(TypedDict):
    """The answer to a liveness probe while the process is alive."""

    live: bool


class ModelStandingDocument(ModelDocument):
    """A served model. `reason` explains why the model is not certified."""

    certified: bool
    reason: str | None


class StoreDocument(TypedDict):
    """The session store. `kind` is memory or redis. While it is not reachable, requests to sessions are answered with
    503."""

    kind: str
    reachable: bool


class FailedModelDocument(TypedDict):
    """A model that failed to load, and the reason. `model` is the model's name, or the name of the bundle's folder if
    the model's name cannot be read."""

    model: str
    reason: str


class ReadinessDocument(TypedDict):
    """The readiness of the server. `ready` is true if every model has loaded or failed to load, the server is not
    draining, and the session store is reachable. `models` lists the models that are ready.
    `loading` lists the models that are being loaded; requests for them wait. `device` is null until the first model is
    loaded. `store` is null until the session store is open."""

    ready: bool
    status: Literal["loading", "ready", "draining", "store_unavailable"]
    device: str | None
    models: list[ModelStandingDocument]
    loading: list[str]
    failed: list[FailedModelDocument]
    store: StoreDocument | None
