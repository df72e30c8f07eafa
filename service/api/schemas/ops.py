"""Liveness and readiness."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.types import ModelDocument


class LivenessDocument(TypedDict):
    """The process lives."""

    live: bool


class ModelStandingDocument(ModelDocument):
    """A model that is served, and why it is not certified where it is not."""

    certified: bool
    reason: str | None


class StoreDocument(TypedDict):
    """Where sessions are kept (memory or redis), whether it can be reached, and how many sessions have tokens that only
    this process has."""

    kind: str
    reachable: bool
    not_durable: int


class FailedModelDocument(TypedDict):
    """A model whose bundle could not be loaded, or a bundle that has no name but its folder's; and why."""

    model: str
    reason: str


class ReadinessDocument(TypedDict):
    """Whether every model is loaded, or failed to be. `models`: those that answer already; `loading`: those that
    requests wait for. The device is null until a model runs on one, and the store until it is open."""

    ready: bool
    status: Literal["loading", "ready", "draining", "store_unavailable"]
    device: str | None
    models: list[ModelStandingDocument]
    loading: list[str]
    failed: list[FailedModelDocument]
    store: StoreDocument | None
