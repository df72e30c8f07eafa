"""The models that this process serves, by name: loaded at start, then replaced and unloaded as `swap.py` has it.

The index lists every version of a model that this process knows, and its condition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wane.models.bundle import Bundle
from wane.service.engine.engine import Engine
from wane.service.errors import (
    InvalidRequest,
    LoadFailed,
    TokenizerChanged,
    Unavailable,
    UnknownModel,
    UnknownSession,
    truncate_repr,
)
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.registry.repository import FoundBundle, Repository, RepositoryError, RepositoryPoller, look
from wane.service.registry.swap import Epochs, ModelLifecycle, RetiredEngines
from wane.service.sessions.stores.factory import make_store
from wane.service.sessions.stores.store import Ready, Store, StoreHealth
from wane.service.settings import Settings
from wane.service.types import id_of

Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version of a model, and what is with it; `reason` says why it is not ready, or is still there."""

    name: str
    version: str
    condition: Condition
    reason: str = ""


def index(
    served: Iterable[Engine],
    retired_engines: RetiredEngines,
    loading: FoundBundle | None,
    bundles: Iterable[FoundBundle],
    failures: Mapping[str, LoadFailed],
) -> Sequence[IndexEntry]:
    """Every version that is `served`, is on its way in (`loading`) or out, or could be loaded, for it is one of the
    `bundles`: by name. `failures` has, by model, why the last load of it failed."""
    entries = [IndexEntry(engine.name, engine.version, "READY") for engine in served]
    entries += [
        IndexEntry(one.name, one.version, "READY", "for the sessions of its tokenizer only")
        for one in retired_engines.lingering
    ]
    entries += [
        IndexEntry(one.name, one.version, "UNLOADING", "until its last requests are answered")
        for one in retired_engines.leaving
    ]
    if loading is not None:
        entries.append(IndexEntry(loading.name, loading.version, "LOADING"))
    told = {(entry.name, entry.version) for entry in entries if entry.condition in ("READY", "LOADING")}
    for found in bundles:
        if (found.name, found.version) not in told:
            failure = failures.get(found.name)
            reason = found.reason or ("not loaded" if failure is None else failure.reason)
            entries.append(IndexEntry(found.name, found.version, "UNAVAILABLE", reason))
    return sorted(entries, key=lambda entry: (entry.name, int(entry.version or 0)))


logger = logging.getLogger("wane.engine")


class RegistryError(Exception):
    """The bundles asked for cannot be served; the message is for the operator, and the process ends."""


class ModelRegistry:
    """Loads, lists and closes engines, and finds the engine of a session."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Nothing is loaded yet: `load` does that, `ready` says when."""
        self._settings = settings
        self._metrics = metrics
        self._engines: dict[str, Engine] = {}
        self._digests: dict[str, str] = {}
        self._default = settings.default_model
        self._status = "loading"
        self._leaving = False
        self._store: Store | None = None
        self._ready: Ready | None = None  # the store, if it answers at once
        self.epochs = Epochs()
        self._repository = Repository(settings.bundles)
        self._retired_engines = RetiredEngines(self.epochs, settings.session_ttl_s)
        self._changes = ModelLifecycle(
            self._engines,
            self._digests,
            self.get,
            self.check_ready,
            self._repository,
            self._retired_engines,
            settings,
            metrics,
        )
        self._watching: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether every model is loaded, verified and warmed up, and the process is not draining."""
        return self._status == "ready" and not self._leaving

    @property
    def status(self) -> str:
        """`loading`, `ready` or `draining`."""
        return "draining" if self._leaving else self._status

    @property
    def device(self) -> str:
        """`cpu` or `cuda`; before loading, the device that was asked for."""
        return next((engine.device for engine in self._engines.values()), self._settings.device)

    @property
    def store(self) -> StoreHealth | None:
        """How the store of the sessions is; None before there is one."""
        return None if self._store is None else self._store.standing

    @property
    def default(self) -> str:
        """The name of the model that answers where none is named."""
        return self._default

    async def load(self) -> None:
        """Reads, verifies and warms up every bundle. Raises CatalogError, BundleError, DeviceError.

        A model whose certificate does not hold is served as uncertified; its certificate then says why.
        """
        poller = await asyncio.to_thread(RepositoryPoller, self._repository, self.load_model)
        found, bundles = await asyncio.to_thread(self._read_all)
        names = [bundle.manifest.name for bundle in bundles]
        self._default = self._choose_default(names)
        opened = await asyncio.gather(
            *(asyncio.to_thread(loader.open_graphs, bundle, self._settings) for bundle in bundles)
        )
        if self._status != "loading":  # closed meanwhile: the sessions that there are are the next process's
            for one in opened:
                await asyncio.to_thread(one.close)
            return
        # Every session can then be asked for every window that its model takes.
        longest = max(bundle.manifest.max_window for bundle in bundles)
        store = self._store = self._changes.store = self._make_store(
            max(self._settings.session_history_tokens, longest)
        )
        self._ready = store if isinstance(store, Ready) else None
        await store.open()
        engines: dict[str, Engine] = {}
        for one in opened:
            try:
                engine = await loader.start(one, store, self._settings, self._metrics)
            except ValueError as error:
                raise RegistryError(f"model {one.bundle.manifest.name}: {error}") from error
            engine.publish()
            engine.keep()
            engines[engine.name] = engine
        self._engines.update(engines)
        self._digests.update({one.name: one.digest for one in found})
        if self._status == "loading":
            self._status = "ready"
            self._metrics.ready.set(1)
            if self._settings.model_poll_interval_s is not None:
                self._watching = asyncio.create_task(poller.run(self._settings.model_poll_interval_s))

    def get(self, name: str | None = None) -> Engine:
        """The engine of a model, or the default one. Raises UnknownModel; Unavailable unless ready."""
        self.check_ready()
        engine = self._engines.get(self._default if name is None else name)
        if engine is None:
            there = ", ".join(sorted(self._engines)) or "none"
            raise UnknownModel(
                f"there is no model {truncate_repr(self._default if name is None else name)}; there are {there}"
            )
        return engine

    async def engine_for(self, session: str, model: str | None = None) -> Engine:
        """The engine that a session lives on, which goes by its name within: see `ownership`.

        Raises UnknownSession; InvalidRequest if `model` is another; TokenizerChanged where its tokens are none of this
        version's.
        """
        self.check_ready()
        assert self._store is not None, "ready without a store: this is a bug"
        record = self._store.get_cached(session) or await self._store.get(session)
        kind = None if record is None else (record.model, record.vocabulary)
        return self._engine_of(session, kind, model)

    def engine_at_once(self, session: str) -> Engine | None:
        """As `engine_for`; None where the store has to be waited for. Raises as `engine_for`."""
        self.check_ready()
        return None if self._ready is None else self._engine_of(session, self._ready.kind(session))

    def _engine_of(self, session: str, kind: tuple[str, str] | None, model: str | None = None) -> Engine:
        """That of a session of this model, whose token ids are these; None: of one that there is not."""
        own, vocabulary = kind or ("", "")
        engine = self._engines.get(own)
        if kind is None or engine is None:
            raise UnknownSession(f"there is no session {id_of(session)!r}: it never was, was deleted, or has expired")
        if model is not None and model != own:
            raise InvalidRequest(
                f"session {id_of(session)!r} is of model {own!r}, not of {truncate_repr(model)}", "model"
            )
        if vocabulary != engine.tokenizer:
            older = self._retired_engines.of(own, vocabulary)
            if older is None:
                raise TokenizerChanged(id_of(session), engine.name, engine.version)
            return older
        return engine

    def list(self) -> list[Engine]:
        """Every engine: the default first, the others by name. Raises Unavailable unless ready."""
        self.check_ready()
        return sorted(self._engines.values(), key=lambda engine: (engine.name != self._default, engine.name))

    async def report(self) -> dict[str, object]:
        """The body of /v1/report: `{"device", "models": [engine reports]}`, of versions that only have sessions left
        too. Raises Unavailable unless ready."""
        engines = [*self.list(), *self._retired_engines.lingering]
        return {"device": self.device, "models": [await engine.report() for engine in engines]}

    # Changes

    async def load_model(self, name: str, deadline: float | None = None) -> Engine:
        """The model as its bundle is now: loaded if it was not, replaced if it was another version, or left as it is.

        A caller that leaves, or whose deadline passes, leaves the load to go on. One model is loaded at a time.
        Raises UnknownModel where there is no such bundle; LoadFailed, with the reason, and then what was served before
        still is; DeadlineExceeded, Unavailable.
        """
        return await self._changes.load(name, deadline)

    async def unload_model(self, name: str) -> None:
        """The model is served no more; its sessions are there again if it is loaded again before they expire.

        Raises UnknownModel, Unavailable.
        """
        await self._changes.unload(name)

    async def index(self) -> Sequence[IndexEntry]:
        """Every version that is served, is on its way in or out, or could be loaded: by name. Raises Unavailable."""
        self.check_ready()
        bundles = await asyncio.to_thread(self._repository.list)
        return index(self.list(), self._retired_engines, self._changes.loading, bundles, self._changes.failures)

    async def settled(self) -> None:
        """Waits until what was replaced or unloaded is gone."""
        await self._retired_engines.settled()

    # The end

    def leave(self) -> None:
        """Not ready from now on, though requests are still taken: others will stop sending them."""
        self._leaving = True
        self._metrics.ready.set(0)

    async def close(self) -> None:
        """Not ready from now on; refuses new requests, waits for what was admitted, then ends every engine."""
        self._status = "draining"
        self._metrics.ready.set(0)
        if self._watching is not None:
            self._watching.cancel()
        engines = [*self._engines.values(), *self._retired_engines.stop()]
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1e3):
                await asyncio.gather(*(engine.drain() for engine in engines))
        except TimeoutError:
            logger.warning("requests were still running after %d ms", self._settings.drain_timeout_ms)
        await asyncio.gather(*(engine.close() for engine in engines))
        if self._store is not None:  # before loads are waited for, which may take longer than the process has
            await self._store.close()
        await asyncio.gather(*self._changes.tasks, return_exceptions=True)

    def check_ready(self) -> None:
        """Raises Unavailable while nothing is served."""
        if self._status != "ready":
            raise Unavailable(
                "the server is loading its models" if self._status == "loading" else "the server is stopping"
            )

    def _choose_default(self, names: Sequence[str]) -> str:
        wanted = self._settings.default_model
        if wanted in names:
            return wanted
        if self._settings.default_model_is_chosen:
            raise RegistryError(f"default_model is {wanted!r}, but the bundles hold {', '.join(names)}")
        return names[0]

    def _make_store(self, session_history_tokens: int) -> Store:
        return make_store(self._settings, session_history_tokens, self._metrics)

    def _read_all(self) -> tuple[Sequence[FoundBundle], Sequence[Bundle]]:
        """Every model's bundle, by name. Raises CatalogError, BundleError."""
        try:
            paths = self._repository.paths()
        except RepositoryError as error:
            raise RegistryError(str(error)) from error
        bundles = sorted(map(loader.read, paths), key=lambda one: (one.manifest.name, int(one.manifest.version)))
        latest = {bundle.manifest.name: bundle for bundle in bundles}
        versions = [(bundle.manifest.name, bundle.manifest.version) for bundle in bundles]
        if len(set(versions)) < len(versions):
            raise RegistryError(f"two bundles hold models of the same name and version: {', '.join(latest)}")
        return [look(bundle.path) for bundle in latest.values()], [*latest.values()]
