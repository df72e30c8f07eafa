"""Loads, swaps and unloads models while others are served.

A model's new version is loaded, verified and warmed up while the old version serves. Then the new version replaces the
old version between two iterations of the event loop. The new version answers later requests. The old version answers
the requests in flight, and is closed after the last of these requests. If a load fails, the old version stays.

If the new version has the same tokenizer, sessions continue on it, and their states are rebuilt from their last tokens.
Otherwise sessions stay on the old version. The old version is then kept until it has been unused for a session's time
to live.

Requests in flight are counted by epoch (`Epochs`). A new epoch begins whenever an engine is replaced or unloaded. A
replaced engine is closed after the last request that arrived before the replacement, whichever engine that request
uses.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from functools import partial

from wane.models.bundle import BundleError
from wane.service.deadline import until
from wane.service.engine.engine import Engine
from wane.service.errors import LoadFailed, Unavailable, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.registry.loader import LoadedBundle
from wane.service.registry.repository import FoundBundle, Repository, tell
from wane.service.runners.runner import DeviceError
from wane.service.sessions.stores.store import Store
from wane.service.settings import Settings


class Epoch:
    """The number of requests in flight that arrived between two calls of `Epochs.depart`."""

    __slots__ = ("_gone", "count")

    def __init__(self) -> None:
        self.count = 0
        self._gone: asyncio.Event | None = None

    def leave(self) -> None:
        """Records the end of one request of this epoch."""
        self.count -= 1
        if not self.count and self._gone is not None:
            self._gone.set()

    async def gone(self) -> None:
        """Waits until the last request of this epoch has ended. No request may enter the epoch after this call."""
        if self.count:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()


class Epochs:
    """The epochs of all requests. All methods must be called on the event loop's thread."""

    def __init__(self) -> None:
        self._latest = Epoch()
        self._earlier: list[Epoch] = []

    def enter(self) -> Epoch:
        """Counts a new request, and returns its epoch. The request must leave that epoch when it ends."""
        self._latest.count += 1
        return self._latest

    async def depart(self) -> None:
        """Waits until all requests that are in flight now have ended. Does not wait for later requests."""
        here = [*self._earlier, self._latest]
        self._earlier.append(self._latest)
        self._latest = Epoch()
        for epoch in here:
            await epoch.gone()
            if epoch in self._earlier:
                self._earlier.remove(epoch)


class RetiredEngines:
    """Replaced and unloaded engines. Engines in `leaving` answer their last requests. Engines in `lingering` serve the
    sessions of their tokenizer. All methods must be called on the event loop's thread."""

    def __init__(self, epochs: Epochs, session_ttl_s: float) -> None:
        """`epochs`: the epochs of all requests. `session_ttl_s`: the idle time after which a session expires."""
        self._epochs = epochs
        self._session_ttl_s = session_ttl_s
        self.leaving: dict[Engine, asyncio.Task[None]] = {}
        self.lingering: dict[Engine, asyncio.Task[None]] = {}
        self._tidying: set[asyncio.Task[None]] = set()

    def of(self, model: str, vocabulary: str) -> Engine | None:
        """Returns the lingering engine that serves the sessions of a model and a tokenizer, or None."""
        return next((one for one in self.lingering if (one.name, one.tokenizer) == (model, vocabulary)), None)

    def retire(self, engine: Engine) -> None:
        """Closes a replaced engine after its last in-flight request."""
        lingering = self.lingering.pop(engine, None)
        if lingering is not None:
            lingering.cancel()
        engine.retire()
        task = self.leaving[engine] = asyncio.create_task(self._end(engine))
        task.add_done_callback(lambda _: self._gone(engine))

    def linger(self, engine: Engine) -> None:
        """Keeps a replaced engine to serve the sessions of its tokenizer."""
        self.lingering[engine] = asyncio.create_task(self._retire_unused(engine))

    async def _end(self, engine: Engine) -> None:
        await self._epochs.depart()
        await engine.drain()
        await engine.close()
        engine.discard()

    def _gone(self, engine: Engine) -> None:
        self.leaving.pop(engine, None)
        task = asyncio.create_task(tidy())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _retire_unused(self, engine: Engine) -> None:
        """Retires an engine that has been unused for a session's time to live. All of its sessions have then
        expired."""
        asked = -1
        while asked != engine.asked:
            asked = engine.asked
            await asyncio.sleep(self._session_ttl_s)
        del self.lingering[engine]
        self.retire(engine)

    async def settled(self) -> None:
        """Waits until all leaving engines are closed and their memory is freed."""
        while waited := [*self.leaving.values(), *self._tidying]:
            await asyncio.wait(waited)

    def stop(self) -> list[Engine]:
        """Cancels the closing of engines, and returns the engines. The caller must close them."""
        engines = [*self.leaving, *self.lingering]
        for task in (*self.leaving.values(), *self.lingering.values()):
            task.cancel()
        return engines


async def tidy() -> None:
    """Frees a closed engine, and returns its memory to the operating system.

    The engine's parts refer to one another, so only the garbage collector frees them. A garbage collection takes only
    some milliseconds, because it skips the objects that existed when the server became ready. Without `trim`, the C
    library would keep tens of megabytes for each closed engine.
    """
    await asyncio.sleep(0)  # waits until the caller has dropped its reference to the engine
    gc.collect()
    await asyncio.to_thread(loader.trim)


logger = logging.getLogger("wane.engine")


LAST_LOAD_S = 5
"""The time in seconds that a stopping process waits for unfinished loads."""


class ModelLifecycle:
    """Loads and unloads models one at a time. Every load and every unload holds `lock`.

    `engines`: the served engines by model. `loading`: the bundle that is being loaded, or None. `failures`: by model,
    the error of the last load of the model, if that load failed. `tasks`: the unfinished loads. `store`: the session
    store, which must be open before the first load.
    """

    def __init__(
        self, repository: Repository, retired_engines: RetiredEngines, settings: Settings, metrics: Metrics
    ) -> None:
        self._repository = repository
        self._retired_engines = retired_engines
        self._settings = settings
        self._metrics = metrics
        self.engines: dict[str, Engine] = {}
        self.digests: dict[str, str] = {}  # the digests of the served bundles, by model
        self.lock = asyncio.Lock()
        self._stopping = False
        self.store: Store | None = None
        self.tasks: set[asyncio.Task[Engine]] = set()
        self._measuring: set[asyncio.Task[None]] = set()
        self.loading: FoundBundle | None = None
        self.failures: dict[str, LoadFailed] = {}

    async def load(self, name: str, deadline: float | None = None) -> Engine:
        """See `ModelRegistry.load_model`."""
        task = asyncio.create_task(self._load(name))
        self.tasks.add(task)
        task.add_done_callback(self._changed)
        async with until(
            deadline, "the deadline passed, but the load continues: the index of models shows when the load has ended"
        ):
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    self._check_running()  # `end_loads` has cancelled the load, not the caller
                raise

    def unload(self, engine: Engine) -> None:
        """Stops serving the engine's model. The caller must hold `lock`."""
        name = engine.name
        del self.engines[name], self.digests[name]
        self.failures.pop(name, None)  # removes the error of a version that failed to replace this version
        engine.unpublish()
        for one in (engine, *(other for other in self._retired_engines.lingering if other.name == name)):
            self._retired_engines.retire(one)
        logger.info("model %s was unloaded", name)

    def replace(self, engine: Engine, digest: str) -> None:
        """Serves `engine` instead of the model's other version, if one is served. Does not await, so no request sees an
        intermediate state."""
        before, older = self.engines.get(engine.name), self._retired_engines.of(engine.name, engine.tokenizer)
        self.engines[engine.name] = engine
        self.digests[engine.name] = digest
        if older is not None:  # the older version has the same tokenizer, so its sessions continue on the new engine
            self._retired_engines.retire(older)
        if before is not None:
            before.unpublish()
            if before.tokenizer == engine.tokenizer:
                self._retired_engines.retire(before)
            else:
                logger.info("version %s of model %s is kept for its sessions", before.version, before.name)
                self._retired_engines.linger(before)
        engine.publish()
        engine.keep()
        # The measurement runs after the loads that were requested already, because requests wait for these loads.
        task = asyncio.create_task(self._measure(engine))
        self._measuring.add(task)
        task.add_done_callback(self._measuring.discard)

    def stop(self) -> None:
        """Cancels all measurements. Unfinished loads raise Unavailable."""
        self._stopping = True
        for task in self._measuring:
            task.cancel()

    async def end_loads(self) -> None:
        """Waits for the unfinished loads after `stop`, but not longer than LAST_LOAD_S: a disk that does not answer
        must not keep the process alive."""
        tasks = [*self.tasks]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LAST_LOAD_S)
            for task in late:
                logger.warning("shutdown: a load has not ended within %d s, and is abandoned", LAST_LOAD_S)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure(self, engine: Engine) -> None:
        async with self.lock:
            if not engine.retired:
                try:
                    await engine.measure()
                except Exception:  # without measurements, long sequences run piece by piece
                    logger.exception(
                        "the measurement of model %s failed, so its long sequences run without chunks", engine.name
                    )

    def _changed(self, task: asyncio.Task[Engine]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, because the caller may have disconnected

    async def _load(self, name: str) -> Engine:
        async with self.lock:
            self._check_running()
            current = self.engines.get(name)
            try:
                found = await asyncio.to_thread(self._repository.find, name)
                if current is not None and found.digest == self.digests[name]:
                    self.failures.pop(name, None)
                    self._metrics.model_loads.labels("same").inc()
                    return current
                if current is not None and found.version == current.version:
                    why = f"its bundle has changed, but its version is still {found.version}"
                    raise LoadFailed(name, why)
                engine = await self._open(found)
            except LoadFailed as error:
                self.failures[name] = error
                self._metrics.model_loads.labels("failed").inc()
                logger.warning("%s", error.message)
                raise
            try:
                self._check_running()
            except Unavailable:
                await engine.close()
                raise
            self.failures.pop(name, None)
            self._metrics.model_loads.labels("loaded").inc()
            self.replace(engine, found.digest)
            return engine

    def _check_running(self) -> None:
        if self._stopping:
            raise Unavailable("the server is stopping")

    async def _open(self, found: FoundBundle) -> Engine:
        """Loads a bundle and returns its engine. Raises LoadFailed."""
        assert self.store is not None, "a model is loaded before the store is open: this is a bug"
        self.loading = found
        try:
            limit_s = self._settings.load_timeout_s
            try:
                async with asyncio.timeout(limit_s):
                    opened = await loader.read_and_open(partial(self.read, found), found.name)
            except TimeoutError as error:
                why = f"its bundle was not read within load_timeout_s, {limit_s:g} s"
                raise LoadFailed(found.name, why) from error
            longest = opened.bundle.manifest.history_tokens
            self.store.session_history_tokens = max(self.store.session_history_tokens, longest)
            return await loader.start(opened, self.store, self._settings, self._metrics)
        except (BundleError, DeviceError, ValueError) as error:
            raise LoadFailed(found.name, tell(error, found.path, found.folder)) from error
        except Exception as error:
            if isinstance(error, WaneError):
                raise
            logger.exception("model %s was not loaded", found.name)
            raise LoadFailed(found.name, "unexpected error, see the server's log") from error
        finally:
            self.loading = None

    def read(self, found: FoundBundle) -> LoadedBundle:
        """Reads a bundle and opens its graphs. Blocks. Raises LoadFailed if the bundle changes meanwhile."""
        opened = loader.open_graphs(loader.read(found.path), self._settings)
        if self._repository.look(found.path).digest != found.digest:
            opened.close()
            raise LoadFailed(found.name, "its bundle changed while it was read: try again")
        return opened
