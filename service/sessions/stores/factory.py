"""Creates the session store that the settings select."""

from __future__ import annotations

from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.memory import MemoryStore, OwnedSessions
from wane.service.sessions.stores.store import Store
from wane.service.settings import IN_MEMORY, Settings


def make_store(
    settings: Settings, session_history_tokens: int, metrics: Metrics, owned: OwnedSessions | None = None
) -> Store:
    """Returns the session store, which is not open yet. It keeps the last `session_history_tokens` tokens of each
    session. `owned`: see `MemoryStore`.

    Raises StoreError if the password file cannot be read.
    """
    if settings.store == IN_MEMORY:
        return MemoryStore(
            session_history_tokens=session_history_tokens,
            ttl_s=settings.session_ttl_s,
            budget_bytes=settings.session_budget_bytes,
            on_memory_eviction=lambda model: metrics.sessions_evicted_memory.labels(model).inc(),
            file=settings.session_file,
            owned=owned,
        )
    # Imported here because the import takes long, and most servers keep sessions in memory.
    from wane.service.sessions.stores.redis import RedisStore

    return RedisStore(settings, session_history_tokens, metrics)
