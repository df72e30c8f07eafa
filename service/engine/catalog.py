"""The models that this process serves, by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.bundle import Bundle, CertificateError, verify_graphs
from models.manifest import Certificate
from service.engine.engine import Engine
from service.engine.margin import Margin
from service.engine.types import check_session_id
from service.errors import InvalidRequest, Unavailable, UnknownModel, UnknownSession, shown
from service.metrics import Metrics
from service.runners.aside import AsideRunner
from service.runners.onnx import OnnxRunner
from service.runners.runner import Runner
from service.settings import Settings
from service.stores.memory import MemoryStore
from service.stores.store import Store

logger = logging.getLogger("wane.engine")

MANIFEST = "manifest.json"


class CatalogError(Exception):
    """The bundles asked for cannot be served; the message is for the operator, and the process ends."""


class Catalog:
    """Loads, lists and closes engines, and finds the engine of a session."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Nothing is loaded yet: `load` does that, `ready` says when."""
        self._settings = settings
        self._metrics = metrics
        self._engines: dict[str, Engine] = {}
        self._default = settings.default_model
        self._status = "loading"
        self._leaving = False
        self._store: Store | None = None

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
    def default(self) -> str:
        """The name of the model that answers where none is named."""
        return self._default

    async def load(self) -> None:
        """Reads, verifies and warms up every bundle. Raises CatalogError, BundleError, DeviceError.

        A model whose certificate does not hold is served as uncertified; its certificate then says why.
        """
        bundles = await asyncio.to_thread(lambda: [read(path) for path in self._paths()])
        bundles.sort(key=lambda bundle: bundle.manifest.name)
        names = [bundle.manifest.name for bundle in bundles]
        if len(set(names)) < len(names):
            raise CatalogError(f"two bundles hold models of the same name: {', '.join(names)}")
        self._default = self._choose_default(names)
        opened = await asyncio.gather(*(asyncio.to_thread(self._open, bundle) for bundle in bundles))
        # Every session can then be asked for every window that its model takes.
        longest = max(bundle.manifest.max_window for bundle in bundles)
        store = MemoryStore(
            tail_tokens=max(self._settings.tail_tokens, longest),
            ttl_s=self._settings.session_ttl_s,
            budget_bytes=self._settings.session_budget_bytes,
            on_squeeze=lambda model: self._metrics.squeezed.labels(model).inc(),
        )
        engines: dict[str, Engine] = {}
        for bundle, margin, runner, shadow in opened:
            manifest = bundle.manifest
            try:
                engine = Engine(
                    manifest,
                    bundle.vocabulary,
                    margin,
                    runner,
                    store,
                    self._settings,
                    self._metrics,
                    shadow_runner=shadow,
                )
            except ValueError as error:
                raise CatalogError(f"model {manifest.name}: {error}") from error
            await asyncio.to_thread(engine.warm_up, await asyncio.to_thread(bundle.propagation, runner.run))
            engine.keep()
            engines[manifest.name] = engine
            logger.info("loaded %s version %s on %s", manifest.name, manifest.version, runner.device)
            if not manifest.certificate.certified:
                logger.info("model %s is not certified: %s", manifest.name, manifest.certificate.reason)
        self._store = store
        self._engines = engines
        if self._status == "loading":
            self._status = "ready"
            self._metrics.ready.set(1)

    def get(self, name: str | None = None) -> Engine:
        """The engine of a model, or the default one. Raises UnknownModel; Unavailable unless ready."""
        self._check_ready()
        engine = self._engines.get(self._default if name is None else name)
        if engine is None:
            raise UnknownModel(f"there is no model {shown(name)}; there are {', '.join(sorted(self._engines))}")
        return engine

    async def engine_for(self, session: str, model: str | None = None) -> Engine:
        """The engine that a session lives on.

        Raises UnknownSession; InvalidRequest for what is no session id, and if `model` is another.
        """
        self._check_ready()
        check_session_id(session)
        assert self._store is not None, "ready without a store: this is a bug"
        record = await self._store.get(session)
        if record is None or record.model not in self._engines:
            raise UnknownSession(f"there is no session {session!r}: it never was, was deleted, or has expired")
        if model is not None and model != record.model:
            raise InvalidRequest(f"session {session!r} is of model {record.model!r}, not of {shown(model)}", "model")
        return self._engines[record.model]

    def list(self) -> list[Engine]:
        """Every engine: the default first, the others by name. Raises Unavailable unless ready."""
        self._check_ready()
        return sorted(self._engines.values(), key=lambda engine: (engine.name != self._default, engine.name))

    async def report(self) -> dict[str, object]:
        """The body of /v1/report: `{"device", "models": [engine reports]}`. Raises Unavailable unless ready."""
        return {"device": self.device, "models": [await engine.report() for engine in self.list()]}

    def leave(self) -> None:
        """Not ready from now on, though requests are still taken: others will stop sending them."""
        self._leaving = True
        self._metrics.ready.set(0)

    async def close(self) -> None:
        """Not ready from now on; refuses new requests, waits for what was admitted, then ends every engine."""
        self._status = "draining"
        self._metrics.ready.set(0)
        engines = self._engines.values()
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1e3):
                await asyncio.gather(*(engine.drain() for engine in engines))
        except TimeoutError:
            logger.warning("requests were still running after %d ms", self._settings.drain_timeout_ms)
        await asyncio.gather(*(engine.close() for engine in engines))

    def _check_ready(self) -> None:
        if self._status != "ready":
            raise Unavailable(
                "the server is loading its models" if self._status == "loading" else "the server is stopping"
            )

    def _choose_default(self, names: Sequence[str]) -> str:
        wanted = self._settings.default_model
        if wanted in names:
            return wanted
        if self._settings.default_model_is_chosen:
            raise CatalogError(f"default_model is {wanted!r}, but the bundles hold {', '.join(names)}")
        return names[0]

    def _paths(self) -> Sequence[Path]:
        """The bundle, or every bundle of the folder, that the settings name."""
        root = self._settings.bundles
        if (root / MANIFEST).is_file():
            return [root]
        if not root.is_dir():
            raise CatalogError(f"bundles is {root}, which is no folder")
        paths = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
        if not paths:
            raise CatalogError(f"bundles is {root}, which holds no bundle (a folder with a {MANIFEST})")
        return paths

    def _open(self, bundle: Bundle) -> tuple[Bundle, Margin, Runner, AsideRunner | None]:
        """The bundle, with a certificate that holds or with none; a runner whose every graph computes what the
        bundle's weights say; and another for shadows, if there are to be any."""
        runner = OnnxRunner(bundle, self._settings.device, self._settings.threads)
        try:
            verify_graphs(bundle, runner.run)
        except CertificateError as error:
            bundle = uncertified(bundle, error)
        shadow = AsideRunner(bundle.path) if self._settings.shadow_rate else None
        return bundle, Margin(bundle.weights()), runner, shadow


def read(path: Path) -> Bundle:
    """A bundle that is verified but for its graphs, with a certificate that holds for its weights or with none."""
    bundle = Bundle.open(path)
    try:
        bundle.verify_certificate()
    except CertificateError as error:
        bundle = uncertified(bundle, error)
    return bundle


def uncertified(bundle: Bundle, error: CertificateError) -> Bundle:
    """The bundle without its certificate, and with the reason for that, which names no place on this machine."""
    logger.warning("model %s is served as uncertified: %s", bundle.manifest.name, error)
    reason = str(error)
    for place in (bundle.path / MANIFEST, bundle.path):
        reason = reason.removeprefix(f"{place}: ")
    certificate = Certificate(contractive=False, reason=f"the certificate does not hold: {reason}", layers=())
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"certificate": certificate}))
