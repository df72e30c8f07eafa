"""What becomes of models while they are served: loaded beside what is there, put in its place, and unloaded.

A model's new version is loaded beside the old one, verified and warmed up as at start. Then it takes the old one's
place between two turns of the event loop: requests that come later are given the new one, those that are there already
are answered by the old one, which goes once the last of them is over. If the load fails, nothing has changed.

Sessions go on under the new version, from their tails, if its tokenizer is the same. Else they end where they are, on
the old one, which is kept for as long as sessions live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from models.bundle import BundleError
from service.engine import loading
from service.engine.deadline import until
from service.engine.engine import Engine
from service.engine.loading import Opened
from service.engine.repository import Found, Repository, look, tell
from service.engine.retirement import Retirement
from service.errors import LoadFailed, Unavailable, WaneError
from service.metrics import Metrics
from service.runners.runner import DeviceError
from service.settings import Settings
from service.stores.store import Store

logger = logging.getLogger("wane.engine")


class Changes:
    """Loads and unloads models, one at a time.

    `loading` is the bundle that is being loaded, if any; `failures` has, by model, why the last load of it failed;
    `tasks` are the loads that go on. `store` is that of the sessions, once there is one.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        digests: dict[str, str],
        get: Callable[[str], Engine],
        check_ready: Callable[[], None],
        repository: Repository,
        retirement: Retirement,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """`engines`, and the `digests` of their bundles, by name, are changed in place. `get` gives one of them, or
        raises UnknownModel; `check_ready` raises Unavailable while nothing is served."""
        self._engines = engines
        self._digests = digests
        self._get = get
        self._check_ready = check_ready
        self._repository = repository
        self._retirement = retirement
        self._settings = settings
        self._metrics = metrics
        self._one = asyncio.Lock()
        self.store: Store | None = None
        self.tasks: set[asyncio.Task[Engine]] = set()
        self.loading: Found | None = None
        self.failures: dict[str, LoadFailed] = {}

    async def load(self, name: str, deadline: float | None = None) -> Engine:
        """See `Catalog.load_model`."""
        self._check_ready()
        task = asyncio.create_task(self._load(name))
        self.tasks.add(task)
        task.add_done_callback(self._changed)
        with until(deadline, "the deadline passed, and the model is still being loaded: the index will tell"):
            return await asyncio.shield(task)

    async def unload(self, name: str) -> None:
        """See `Catalog.unload_model`."""
        self._check_ready()
        async with self._one:
            engine = self._get(name)
            del self._engines[name], self._digests[name]
            self._metrics.model_info.remove(name, engine.version, engine.device)
            for one in (engine, *(other for other in self._retirement.lingering if other.name == name)):
                self._retirement.retire(one)
            logger.info("unloaded %s", name)

    def replace(self, engine: Engine, digest: str) -> None:
        """The engine takes its place, between two turns of the event loop."""
        before, older = self._engines.get(engine.name), self._retirement.of(engine.name, engine.tokenizer)
        self._engines[engine.name] = engine
        self._digests[engine.name] = digest
        if older is not None:  # of this tokenizer: its sessions go on here
            self._retirement.retire(older)
        if before is not None:
            self._metrics.model_info.remove(before.name, before.version, before.device)
            if before.tokenizer == engine.tokenizer:
                self._retirement.retire(before)
            else:
                logger.info("version %s of %s is kept for the sessions that it has", before.version, before.name)
                self._retirement.linger(before)
        engine.publish()
        engine.keep()

    def _changed(self, task: asyncio.Task[Engine]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have left

    async def _load(self, name: str) -> Engine:
        async with self._one:
            self._check_ready()
            current = self._engines.get(name)
            try:
                found = await asyncio.to_thread(self._repository.find, name)
                if current is not None and found.digest == self._digests[name]:
                    self.failures.pop(name, None)
                    self._metrics.loads.labels("same").inc()
                    return current
                if current is not None and found.version == current.version:
                    raise LoadFailed(
                        name, f"its bundle has changed, but not its version, which is {found.version} as before"
                    )
                engine = await self._open(found)
            except LoadFailed as error:
                self.failures[name] = error
                self._metrics.loads.labels("failed").inc()
                logger.warning("%s", error.message)
                raise
            try:
                self._check_ready()
            except Unavailable:
                await engine.close()
                raise
            self.failures.pop(name, None)
            self._metrics.loads.labels("loaded").inc()
            self.replace(engine, found.digest)
            return engine

    async def _open(self, found: Found) -> Engine:
        """The engine of a bundle. Raises LoadFailed."""
        assert self.store is not None, "ready without a store: this is a bug"
        self.loading = found
        try:
            opened = await asyncio.to_thread(self._read, found)
            self.store.tail_tokens = max(self.store.tail_tokens, opened.bundle.manifest.max_window)
            return await loading.start(opened, self.store, self._settings, self._metrics)
        except (BundleError, DeviceError, ValueError) as error:
            raise LoadFailed(found.name, tell(error, found.path)) from error
        except Exception as error:
            if isinstance(error, WaneError):
                raise
            logger.exception("model %s was not loaded", found.name)
            raise LoadFailed(found.name, "nobody expected why; the log has it") from error
        finally:
            self.loading = None

    def _read(self, found: Found) -> Opened:
        opened = loading.open_graphs(loading.read(found.path), self._settings)
        if look(found.path).digest != found.digest:
            opened.close()
            raise LoadFailed(found.name, "its bundle was changed while it was read: ask again")
        return opened
