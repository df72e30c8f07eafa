"""Creates the session store that the settings select."""

from __future__ import annotations

from urllib.parse import urlsplit

from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.memory import MemoryStore, OwnedSessions
from wane.service.sessions.stores.store import Store, StoreError
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

    return RedisStore(
        settings.store,
        password=_password(settings),
        namespace=settings.store_namespace,
        session_history_tokens=session_history_tokens,
        ttl_s=settings.session_ttl_s,
        budget_bytes=settings.session_budget_bytes,
        timeout_s=settings.store_timeout_ms / 1000,
        metrics=metrics,
    )


def _password(settings: Settings) -> str | None:
    """Returns the password from the password file, unless the address of Redis has a password."""
    if settings.store_password_file is None or urlsplit(settings.store).password is not None:
        return None
    try:
        return settings.store_password_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StoreError(f"store_password_file, {error.filename}, cannot be read: {error.strerror}") from error
