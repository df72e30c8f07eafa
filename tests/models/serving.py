"""Answers of an engine that serves a bundle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from wane.models.bundle import Bundle
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.request import PredictRequest


def answers(bundle: Bundle, requests: Sequence[PredictRequest]) -> list[Answer]:
    """Returns the answers of an engine that has loaded the bundle's graphs."""
    settings = Settings()

    async def ask() -> list[Answer]:
        store = MemoryStore(2048, settings.session_ttl_s, settings.session_budget_bytes)
        engine = await loader.start(loader.open_graphs(bundle, settings), store, settings, Metrics())
        try:
            return [await engine.submit(request) for request in requests]
        finally:
            await engine.close()

    return asyncio.run(ask())
