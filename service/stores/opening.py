"""Which store the settings ask for."""

from __future__ import annotations

from service.metrics import Metrics
from service.settings import IN_MEMORY, Settings
from service.stores.memory import MemoryStore
from service.stores.store import Store


def make_store(settings: Settings, tail_tokens: int, metrics: Metrics) -> Store:
    """The store of the sessions, which is not open yet. `tail_tokens` are kept of each."""
    if settings.store == IN_MEMORY:
        return MemoryStore(
            tail_tokens=tail_tokens,
            ttl_s=settings.session_ttl_s,
            budget_bytes=settings.session_budget_bytes,
            on_squeeze=lambda model: metrics.squeezed.labels(model).inc(),
            file=settings.session_file,
        )
    # They take a while to import, and most servers keep sessions in memory.
    from service.stores.degrading import DegradingStore
    from service.stores.redis import RedisStore

    shared = RedisStore(
        settings.store,
        namespace=settings.store_namespace,
        tail_tokens=tail_tokens,
        ttl_s=settings.session_ttl_s,
        budget_bytes=settings.session_budget_bytes,
        timeout_s=settings.store_timeout_ms / 1000,
        metrics=metrics,
    )
    return shared if settings.store_away == "reject" else DegradingStore(shared, settings.session_ttl_s, metrics)
