"""Whether the process lives, and whether it takes requests."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from service.documents.answers import ModelDocument


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


class ReadinessDocument(TypedDict):
    """Whether requests are taken; the device is null until models run on one, and models are listed once ready. The
    store is null until models are loaded."""

    ready: bool
    status: Literal["loading", "ready", "draining", "store_away"]
    device: str | None
    models: list[ModelStandingDocument]
    store: StoreDocument | None
