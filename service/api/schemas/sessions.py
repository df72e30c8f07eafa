"""A session."""

from __future__ import annotations

from typing import NotRequired

from wane.service.api.schemas.predict import Durable, ErrorBound, ModelDocument
from wane.service.types import Mode, StateSource


class SessionDocument(ModelDocument):
    """A session as its owner may see it. `position` counts its tokens, the start token <eos> not among them."""

    session: str
    mode: Mode
    position: int
    state: StateSource
    error_bound: ErrorBound
    idle_s: float
    durable: NotRequired[Durable]
