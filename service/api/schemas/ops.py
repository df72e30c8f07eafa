"""Liveness and readiness."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from wane.service.types import ModelDocument


class LivenessDocument(TypedDict):
    """The process is alive."""

    live: bool


class ModelStandingDocument(ModelDocument):
    """A served model. `reason` explains why it is not certified."""

    certified: bool
    reason: str | None


class StoreDocument(TypedDict):
    """The session store: its kind (memory or redis), whether it is reachable, and the number of sessions with tokens
    that only this process has."""

    kind: str
    reachable: bool
    not_durable: int


class FailedModelDocument(TypedDict):
    """A model that failed to load, and the reason. A bundle without a readable name has its folder's name."""

    model: str
    reason: str


class ReadinessDocument(TypedDict):
    """`ready`: every model has loaded or failed, and the server is not draining. `models`: those that are ready;
    `loading`: those that requests wait for. `device` is null until a model runs on it, `store` until it is open."""

    ready: bool
    status: Literal["loading", "ready", "draining", "store_unavailable"]
    device: str | None
    models: list[ModelStandingDocument]
    loading: list[str]
    failed: list[FailedModelDocument]
    store: StoreDocument | None
