"""The models that this process serves, by name.

The default model is loaded first, and answers requests while the other models load. A request for another model waits
until that model is loaded.

A model's new version is loaded, verified and warmed up while the old version serves. Then the new version replaces the
old version between two iterations of the event loop. If the load fails, the old version stays. `swap.py` closes
replaced engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from wane.models.bundle import BundleError
from wane.service.deadline import until
from wane.service.engine.engine import Engine
from wane.service.engine.stats import Report
from wane.service.errors import (
    InvalidRequest,
    LoadFailed,
    TokenizerChanged,
    Unavailable,
    UnknownModel,
    WaneError,
    truncate_repr,
)
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.registry.loader import LoadedBundle
from wane.service.registry.repository import FoundBundle, RegistryError, Repository, tell
from wane.service.registry.swap import Epochs, RetiredEngines
from wane.service.runners.runner import DeviceError
from wane.service.sessions.sessions import unknown
from wane.service.sessions.stores.factory import make_store
from wane.service.sessions.stores.memory import OwnedSessions
from wane.service.sessions.stores.store import Store, StoreHealth, UnsavedSessions
from wane.service.settings import Settings
from wane.service.types.common import Condition, says
from wane.service.types.request import id_of


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the index of models, for one version of a model."""

    name: Annotated[str, says("the model's name")]
    version: Annotated[str, says("the version; empty if it is not known")]
    state: Annotated[Condition, says("the version's state")]
    reason: Annotated[str, says("why the version is not ready, or why it is still loaded")]


logger = logging.getLogger("wane.engine")


LAST_LOAD_S = 5
"""The time in seconds that a stopping process waits for unfinished loads."""


def other_model(session: str, own: str, asked: str) -> InvalidRequest:
    """Returns the error for a request that names another model than the session's own model."""
    return InvalidRequest(
        f"session {id_of(session)!r} belongs to model {own!r}, not to {truncate_repr(asked)}", "model"
    )


class ModelRegistry:
    """Loads, replaces, lists, unloads and closes engines, and finds the engine of a session. One model is loaded or
    unloaded at a time."""

    def __init__(
        self, settings: Settings, metrics: Metrics, owned: OwnedSessions | None = None, names_file: Path | None = None
    ) -> None:
        """`owned`: see `MemoryStore`. `names_file` has the names of the default model, and of the models that the first
        ready worker loaded or that were loaded later. A worker that starts again loads these models, so that all
        workers serve the same ones."""
        self._settings = settings
        self._names_file = names_file
        self._owned = owned
        self._metrics = metrics
        self._bundles: dict[str, FoundBundle] = {}  # the bundles to load at start, by model name
        self._loads: dict[str, asyncio.Task[Engine]] = {}  # the unfinished loads of these bundles, by model name
        # set when the store is open and the names of the models are known, and at shutdown
        self._open = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self.default = settings.default_model  # the name of the model that answers requests without a model name
        self._status = "loading"
        self._leaving = False
        self.session_store: Store | None = None
        self.unsaved: UnsavedSessions | None = None  # why `close` could not save the sessions in memory
        self.epochs = Epochs()
        self._repository = Repository(settings.bundles)
        self.retired_engines = RetiredEngines(self.epochs, settings.session_ttl_s)
        self._engines: dict[str, Engine] = {}  # the served engines, by model name
        self._digests: dict[str, str] = {}  # the digests of their bundles
        self.failures: dict[str, LoadFailed] = {}  # by model name: the error of the model's last load, if it failed
        self._lock = asyncio.Lock()  # held by every load, unload and measurement
        self._opening: FoundBundle | None = None  # the bundle that is being loaded
        self._unfinished: set[asyncio.Task[Engine]] = set()  # all unfinished loads
        self._background: set[asyncio.Task[None]] = set()  # measurements, and the poll of the folder of bundles

    @property
    def ready(self) -> bool:
        """Whether every load at start has ended and the process is not draining."""
        return self._status == "ready" and not self._leaving

    @property
    def status(self) -> str:
        """`loading`, `ready` or `draining`."""
        return "draining" if self._leaving else self._status

    @property
    def served(self) -> Sequence[Engine]:
        """The engines that are loaded so far, in the order of `list`. Empty while the process shuts down."""
        return [] if self.status == "draining" or not self._open.is_set() else self.list()

    @property
    def loading(self) -> Sequence[str]:
        """The names of the models whose load at start is unfinished, in load order."""
        return [name for name in self._loads if self.is_coming(name)]

    @property
    def device(self) -> str:
        """The device of the loaded engines, `cpu` or `cuda`. Before the first load, the device in the settings."""
        return next((engine.device for engine in self._engines.values()), self._settings.device)

    @property
    def store(self) -> StoreHealth | None:
        """The health of the session store. None before the store is created."""
        return None if self.session_store is None else self.session_store.standing

    async def load(self, on_default: Callable[[], None] = lambda: None) -> None:
        """Opens the session store, then loads all models one by one. Calls `on_default` after the default model is
        loaded. A model that cannot be loaded is skipped, and `failures` holds the error. Raises RegistryError,
        BundleError or DeviceError if a model that the settings require cannot be loaded: the default model, or any
        model if the settings require all models. The caller must then close the registry."""
        await asyncio.to_thread(self._repository.changed)
        bundles = await asyncio.to_thread(self._find)
        if self._names_file is None or not self._names_file.exists():
            self.default = self._choose_default(bundles)
        else:
            self.default, *names = self._names_file.read_text(encoding="utf-8").split("\n")
            if self.default in names and self.default not in bundles:
                raise RegistryError(f"there is no bundle of the default model {self.default!r} any more")
            bundles = {name: bundle for name, bundle in bundles.items() if name in names}
        self._bundles = dict(sorted(bundles.items(), key=lambda item: (item[0] != self.default, item[0])))
        # If the registry was closed meanwhile, the saved sessions stay in their file for the next process.
        if self._status != "loading":
            return
        longest = max([self._settings.session_history_tokens, *(bundle.history_tokens for bundle in bundles.values())])
        store = self.session_store = make_store(self._settings, longest, self._metrics, self._owned)
        await store.open()
        if self._status != "loading":
            return
        self._loads = {name: asyncio.create_task(self.load_model(name)) for name in self._bundles}
        self._open.set()
        for name, task in [*self._loads.items()]:
            await asyncio.wait([task])
            self._check_loaded(name, task)
            del self._loads[name]
            if name == self.default and self._status == "loading":
                on_default()
        if self._status == "loading":
            self._status = "ready"
            self._metrics.ready.set(1)
            if self._names_file is not None and not self._names_file.exists():
                self._write_names()
            if self._settings.model_poll_interval_s is not None:
                self._background.add(asyncio.create_task(self._poll(self._settings.model_poll_interval_s)))

    async def _poll(self, every_s: float) -> None:
        """Loads changed bundles, until it is cancelled. A failed load is repeated when the model's bundles change
        again."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.load_changed()
            except Exception:  # the disk may be unavailable for some time, so polling continues
                logger.exception("the folder of bundles could not be read")

    async def load_changed(self) -> None:
        for name in await asyncio.to_thread(self._repository.changed):
            try:
                await self.load_model(name)
            except WaneError as error:
                logger.warning("the bundles of model %s have changed, but: %s", name, error.message)

    def _check_loaded(self, name: str, task: asyncio.Task[Engine]) -> None:
        """Raises the error of a finished load at start if the server requires the model."""
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, Unavailable):  # Unavailable: the registry was closed meanwhile
            return
        if not isinstance(error, WaneError):
            raise error
        if name == self.default or self._settings.require_all:
            cause = error.__cause__
            raise cause if isinstance(cause, BundleError | DeviceError) else RegistryError(error.message) from None

    def get(self, name: str | None = None) -> Engine:
        """Returns the engine of a model. None stands for the default model. Raises UnknownModel if the model is not
        loaded, and Unavailable while it is loading."""
        self.check_ready()
        name = self.default if name is None else name
        engine = self._engines.get(name)
        if engine is not None:
            return engine
        if self.is_coming(name):
            raise Unavailable(f"the server is loading model {truncate_repr(name)}")
        if (failure := self.failures.get(name)) is not None:
            raise UnknownModel(failure.message)
        there = ", ".join(sorted(self._engines)) or "none"
        raise UnknownModel(f"there is no model {truncate_repr(name)}; loaded models: {there}")

    def is_coming(self, name: str | None = None) -> bool:
        """Returns whether the load of a model at start is unfinished. None stands for the default model. See
        `wait_for`."""
        if not self._open.is_set():
            return self._status == "loading"
        name = self.default if name is None else name
        load = self._loads.get(name)
        return load is not None and not load.done() and name not in self._engines

    async def wait_for(self, name: str | None = None, deadline: float | None = None) -> None:
        """Waits until the load of a model at start has succeeded or failed. None stands for the default model. Raises
        DeadlineExceeded, and Unavailable if the server stops meanwhile."""
        async with until(deadline, "the deadline passed while the server was loading the model"):
            await self._open.wait()
            load = self._loads.get(self.default if name is None else name)
            if load is not None:
                await asyncio.wait([load])
        self.check_ready()

    async def wait_for_all(self, deadline: float | None = None) -> None:
        """Waits until the loads of all models at start have ended. Raises the errors of `wait_for`."""
        await self.wait_for(None, deadline)
        for name in self.loading:
            await self.wait_for(name, deadline)

    async def engine_for(self, session: str, model: str | None = None, deadline: float | None = None) -> Engine:
        """Returns the engine of a session. `session` is the session's internal name (see `types/request.py`). Waits
        while the session's model is loading. Raises UnknownSession and DeadlineExceeded. Raises InvalidRequest if
        `model` is not the session's model, TokenizerChanged if the session's tokens are from a tokenizer that is not
        loaded, and Unavailable if the session's model could not be loaded."""
        if not self._open.is_set():
            await self.wait_for(deadline=deadline)
        if self._status == "draining":
            self.check_ready()
        assert self.session_store is not None, "the registry is open without a store: this is a bug"
        kind = self.session_store.kind(session)
        if kind is not None and (kind[0] in self._engines or not self.is_coming(kind[0])):
            try:
                return self._engine_of(session, kind, model)
            # the cached record may be outdated: another replica may have recreated the session with another model
            except WaneError:
                pass
        record = await self.session_store.get(session)
        kind = None if record is None else (record.model, record.vocabulary)
        if kind is not None and self.is_coming(kind[0]):
            await self.wait_for(kind[0], deadline)
        return self._engine_of(session, kind, model)

    def resident_engine(self, session: str) -> Engine | None:
        """Returns the engine that has the session's state in its cache. Returns None if no engine has the state, or if
        the server is shutting down."""
        if self._status != "draining":
            for engine in self._engines.values():
                if engine.has_state(session):
                    return engine
        return None

    def _engine_of(self, session: str, kind: tuple[str, str] | None, model: str | None = None) -> Engine:
        """See `engine_for`. `kind` is the session's model and vocabulary, or None if the session does not exist."""
        own, vocabulary = kind or ("", "")
        engine = self._engines.get(own)
        if engine is None and own in self.failures:
            raise Unavailable(self.failures[own].message)
        if kind is None or engine is None:
            raise unknown(session)
        if model is not None and model != own:
            raise other_model(session, own, model)
        if vocabulary != engine.tokenizer:
            older = self.retired_engines.of(own, vocabulary)
            if older is None:
                raise TokenizerChanged(id_of(session), engine.name, engine.version)
            return older
        return engine

    def list(self) -> Sequence[Engine]:
        """Returns the engines of all loaded models. The default model is first, and the other models follow by name.
        Raises Unavailable."""
        self.check_ready()
        return sorted(self._engines.values(), key=lambda engine: (engine.name != self.default, engine.name))

    async def report(self) -> Report:
        """Returns the body of /v1/report. It includes replaced versions that are kept for their sessions. Raises
        Unavailable."""
        engines = [*self.list(), *self.retired_engines.lingering]
        return Report(self.device, [await engine.report() for engine in engines])

    # Loading and unloading models while the server runs

    async def load_model(self, name: str, deadline: float | None = None) -> Engine:
        """Serves the current bundle of a model. Replaces another loaded version. Does nothing if this bundle is loaded
        already. The load continues if the caller disconnects or its deadline passes. Raises UnknownModel if there is no
        such bundle, LoadFailed if the load fails, DeadlineExceeded and Unavailable. After LoadFailed the earlier
        version is still served."""
        self.check_ready()
        task = asyncio.create_task(self._load(name))
        self._unfinished.add(task)
        task.add_done_callback(self._load_ended)
        async with until(
            deadline, "the deadline passed, but the load continues: the index of models shows when the load has ended"
        ):
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    self.check_ready()  # `close` has cancelled the load, not the caller
                raise

    def _load_ended(self, task: asyncio.Task[Engine]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, because the caller may have disconnected

    async def _load(self, name: str) -> Engine:
        async with self._lock:
            self.check_ready()
            current = self._engines.get(name)
            try:
                bundle = await asyncio.to_thread(self._repository.find, name)
                is_same = bundle.digest == self._digests.get(name)
                if current is not None and not is_same and bundle.version == current.version:
                    raise LoadFailed(name, f"its bundle has changed, but its version is still {bundle.version}")
                engine = current if current is not None and is_same else await self._start(bundle)
            except LoadFailed as error:
                self.failures[name] = error
                self._metrics.model_loads.labels("failed").inc()
                logger.warning("%s", error.message)
                raise
            if self._status == "draining" and not is_same:
                await engine.close()
                self.check_ready()
            self.failures.pop(name, None)
            self._metrics.model_loads.labels("same" if is_same else "loaded").inc()
            if not is_same:
                self._serve(engine, bundle.digest)
                self._write_names()
            return engine

    async def _start(self, bundle: FoundBundle) -> Engine:
        """Loads a bundle and returns its engine. Raises LoadFailed."""
        assert self.session_store is not None, "a model is loaded before the store is open: this is a bug"
        self._opening, limit_s = bundle, self._settings.load_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                opened = await loader.read_and_open(partial(self._read, bundle), bundle.name)
            longest = opened.bundle.manifest.history_tokens
            self.session_store.session_history_tokens = max(self.session_store.session_history_tokens, longest)
            return await loader.start(opened, self.session_store, self._settings, self._metrics)
        except TimeoutError as error:
            why = f"its bundle was not read within load_timeout_s, {limit_s:g} s"
            raise LoadFailed(bundle.name, why) from error
        except (BundleError, DeviceError, ValueError) as error:
            raise LoadFailed(bundle.name, tell(error, bundle.path, bundle.folder)) from error
        except WaneError:
            raise
        except Exception as error:
            logger.exception("model %s was not loaded", bundle.name)
            raise LoadFailed(bundle.name, "unexpected error, see the server's log") from error
        finally:
            self._opening = None

    def _read(self, bundle: FoundBundle) -> LoadedBundle:
        """Reads a bundle and opens its graphs. Blocks. Raises LoadFailed if the bundle changes meanwhile."""
        opened = loader.open_graphs(loader.read(bundle.path), self._settings)
        if self._repository.look(bundle.path).digest != bundle.digest:
            opened.close()
            raise LoadFailed(bundle.name, "its bundle changed while it was read: try again")
        return opened

    def _serve(self, engine: Engine, digest: str) -> None:
        """Serves `engine` instead of the model's other version, if one is served. Does not await, so no request sees an
        intermediate state."""
        before, older = self._engines.get(engine.name), self.retired_engines.of(engine.name, engine.tokenizer)
        self._engines[engine.name] = engine
        self._digests[engine.name] = digest
        if older is not None:  # the older version has the same tokenizer, so its sessions continue on the new engine
            self.retired_engines.retire(older)
        if before is not None:
            before.unpublish()
            if before.tokenizer == engine.tokenizer:
                self.retired_engines.retire(before)
            else:
                logger.info("version %s of model %s is kept for its sessions", before.version, before.name)
                self.retired_engines.linger(before)
        engine.publish()
        engine.keep()
        # The measurement runs after the loads that were requested already, because requests wait for these loads.
        task = asyncio.create_task(self._measure(engine))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _measure(self, engine: Engine) -> None:
        async with self._lock:
            if not engine.retired:
                try:
                    await engine.measure()
                except Exception:  # without measurements, long sequences run piece by piece
                    logger.exception(
                        "the measurement of model %s failed, so its long sequences run without chunks", engine.name
                    )

    async def unload_model(self, name: str, deadline: float | None = None) -> None:
        """Stops serving a model. Its sessions continue if the model is loaded again before they expire. Raises
        UnknownModel, Unavailable, DeadlineExceeded."""
        if self._open.is_set():
            await self.wait_for(name, deadline)
        self.check_ready()
        async with self._lock:
            engine = self.get(name)
            del self._engines[name], self._digests[name]
            self.failures.pop(name, None)  # removes the error of a version that failed to replace this version
            engine.unpublish()
            for retiring in (engine, *(other for other in self.retired_engines.lingering if other.name == name)):
                self.retired_engines.retire(retiring)
            self._write_names()
            logger.info("model %s was unloaded", name)

    def _write_names(self) -> None:
        """Writes the names of the default model, of the served models, and of those that failed to load, for the
        workers that start later. While this worker loads its first models, the names are not complete."""
        if self._names_file is not None and self._status == "ready":
            part = self._names_file.with_suffix(f".{os.getpid()}")
            try:
                part.write_text("\n".join([self.default, *self._engines, *self.failures]), encoding="utf-8")
                part.replace(self._names_file)
            except OSError as error:
                logger.warning("a worker that starts again will not know the served models: %s", error)

    async def index(self) -> Sequence[IndexEntry]:
        """Returns every model version that is served, loading, unloading or in the folder of bundles, sorted by name.
        Raises Unavailable."""
        self.check_ready()
        bundles = await asyncio.to_thread(self._repository.list)
        retired = self.retired_engines
        sessions_only, last_requests = "serves only the sessions of its tokenizer", "answers its last requests"
        entries = [IndexEntry(engine.name, engine.version, "READY", "") for engine in self.list()]
        entries += [IndexEntry(engine.name, engine.version, "READY", sessions_only) for engine in retired.lingering]
        entries += [IndexEntry(engine.name, engine.version, "UNLOADING", last_requests) for engine in retired.leaving]
        coming = [*(self._bundles[name] for name in self.loading), *filter(None, [self._opening])]
        named = {(bundle.name, bundle.version) for bundle in coming if bundle.reason is None}
        entries += [IndexEntry(name, version, "LOADING", "") for name, version in named]
        told = {(entry.name, entry.version) for entry in entries if entry.state in ("READY", "LOADING")}
        for bundle in bundles:
            if (bundle.name, bundle.version) not in told:
                failure = self.failures.get(bundle.name)
                reason = bundle.reason or ("not loaded" if failure is None else failure.reason)
                entries.append(IndexEntry(bundle.name, bundle.version, "UNAVAILABLE", reason))
        return sorted(entries, key=lambda entry: (entry.name, int(entry.version or 0)))

    # Shutdown

    def leave(self) -> None:
        """Marks the registry as not ready, so that load balancers send requests elsewhere. It still accepts them."""
        self._leaving = True
        self._metrics.ready.set(0)

    async def close(self) -> None:
        """Rejects new requests and requests that wait for a model. Waits for the requests in flight for at most
        `drain_timeout_ms`. Then closes every engine. A second call waits until the first call has ended."""
        if self._closing is None:
            self._status = "draining"
            self._metrics.ready.set(0)
            self._open.set()
            for load in self._loads.values():  # requests that wait for this load fail immediately
                load.cancel()
            for task in self._background:
                task.cancel()
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        engines = [*self._engines.values(), *self.retired_engines.stop()]
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1e3):
                await asyncio.gather(*(engine.drain() for engine in engines))
        except TimeoutError:
            logger.warning("shutdown: requests were still running after %d ms", self._settings.drain_timeout_ms)
        await asyncio.gather(*(engine.close() for engine in engines))
        # The store is closed before the wait for loads, because that wait may exceed the shutdown timeout.
        if self.session_store is not None:
            try:
                await self.session_store.close()
            except UnsavedSessions as error:
                self.unsaved = error
        # A disk that does not answer must not keep the process alive.
        if unfinished := [*self._unfinished]:
            _, late = await asyncio.wait(unfinished, timeout=LAST_LOAD_S)
            for task in late:
                logger.warning("shutdown: a load has not ended within %d s, and is abandoned", LAST_LOAD_S)
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        for engine in engines:
            engine.discard()

    def check_ready(self) -> None:
        """Raises Unavailable before the store is open and after `close`."""
        if self._status == "draining":
            raise Unavailable("the server is stopping")
        if not self._open.is_set():
            raise Unavailable("the server is loading its models")

    def _choose_default(self, bundles: Mapping[str, FoundBundle]) -> str:
        """Returns the name of the default model, and logs it with the reason for the choice. Raises RegistryError if
        there is no bundle of the model that the operator chose."""
        wanted = self._settings.default_model
        if "default_model" in self._settings.model_fields_set:
            if wanted not in bundles:
                raise RegistryError(f"default_model is {wanted!r}, but there are only bundles of {', '.join(bundles)}")
            name, why = wanted, "set by default_model"
        elif len(bundles) == 1:
            name, why = next(iter(bundles)), "the only model"
        elif wanted in bundles:
            name, why = wanted, "set default_model to choose another"
        else:
            name = min([name for name, bundle in bundles.items() if bundle.reason is None] or bundles)
            why = "the first by name; set default_model to choose another"
        logger.info("the default model is %s: %s", name, why)
        return name

    def _find(self) -> dict[str, FoundBundle]:
        """Returns the latest bundle of every model, by model name. Raises RegistryError."""
        self._repository.paths()  # raises RegistryError if there is no bundle
        bundles = self._repository.list()
        by_name = {bundle.name: bundle for bundle in bundles}
        for bundle in bundles:
            # The name of an unreadable bundle is the name of its folder. `by_name` lacks the unreadable bundle
            # if another bundle's model has the same name.
            if bundle.reason is not None and by_name[bundle.name] is not bundle:
                if self._settings.require_all:
                    raise RegistryError(bundle.reason)
                logger.warning("a bundle was not loaded: %s", bundle.reason)
        return by_name
