"""Turns a bundle into an engine: reads and verifies the bundle, opens its graphs, and warms up the engine. All of this
runs outside the event loop's thread. A load delays requests to other models by only a few milliseconds at a time,
because arithmetic and graphs run without the interpreter's lock (GIL).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wane.models.bundle import Bundle, CertificateError, verify_graphs
from wane.models.bundle_checks import MANIFEST
from wane.models.manifest import Certificate, Role
from wane.models.parity import compare_bits
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import DirectionProof, MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.onnx_device import DeviceRunner, open_runner
from wane.service.runners.runner import Array
from wane.service.sessions.stores.store import Store
from wane.service.settings import Settings

logger = logging.getLogger("wane.engine")


NO_HEAD = {"head.weight": np.zeros((2, 1), np.float32), "head.bias": np.zeros(2, np.float32)}
"""In place of the output layer of an imported graph, which is not known. No answer of such a model has a bound of its
rounding, so that no margin is ever compared with one."""


@dataclass(frozen=True, slots=True)
class LoadedBundle:
    """A verified bundle with its proofs and runners. `direction`: see `DirectionProof.of`. `shadow`: the runner that
    repeats sampled live answers; None if `shadow_rate` is 0. `bits`: a digest of the graphs' results here."""

    bundle: Bundle
    margin: MarginProof
    direction: DirectionProof | None
    runner: OnnxRunner
    shadow: OnnxRunner | None
    bits: bytes

    def close(self) -> None:
        self.runner.close()
        if self.shadow is not None:
            self.shadow.close()


async def read_and_open(load: Callable[[], LoadedBundle], name: str) -> LoadedBundle:
    """Runs `load` on a thread of its own, and returns the result. If the caller is cancelled, the thread is abandoned:
    nothing waits for it, not even the end of the process, and a later result is closed. A disk may block a thread
    forever. `name`: the model's name, for the name of the thread."""
    loading: Future[LoadedBundle] = Future()
    loading.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only abandoned

    def run() -> None:
        try:
            loading.set_result(load())
        except BaseException as error:
            loading.set_exception(error)

    thread = threading.Thread(target=run, name=f"load-{name}", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(loading)
    except asyncio.CancelledError:
        loading.add_done_callback(_close_result)
        raise
    finally:
        if loading.done():
            thread.join()  # it has delivered its result, so it ends now


def _close_result(loading: Future[LoadedBundle]) -> None:
    if loading.exception() is None:
        loading.result().close()


def read(path: Path) -> Bundle:
    """Reads a bundle and verifies everything except its graphs. Replaces a certificate that does not hold by an empty
    one. Blocks. Raises BundleError."""
    bundle = Bundle.open(path)
    try:
        bundle.verify_certificate()
    except CertificateError as error:
        bundle = uncertified(bundle, error)
    return bundle


def open_graphs(bundle: Bundle, settings: Settings) -> LoadedBundle:
    """Opens a bundle's graphs and verifies their results against those of the numpy oracle. Blocks. Raises BundleError,
    DeviceError."""
    runner = open_runner(bundle, settings.device, settings.threads)

    def run(role: Role, feeds: dict[str, Array]) -> dict[str, Array]:
        return dict(runner.run(role, feeds))

    try:
        try:
            verify_graphs(bundle, run)
        except CertificateError as error:
            bundle = uncertified(bundle, error)
        manifest = bundle.manifest
        bits = compare_bits(manifest.architecture, run, settings.max_batch_size)
        if bits.differ is not None:
            logger.warning(
                "no answer of model %s has the error bound 0, "
                "because its runs on this machine are not bit-identical: %s",
                manifest.name,
                bits.differ,
            )
            certificate = manifest.certificate.model_copy(
                update={"bit_identical": False, "of_finite": bundle.finite_rounding()}
            )
            bundle = replace(bundle, manifest=manifest.model_copy(update={"certificate": certificate}))
        weights = bundle.weights()
        margin = MarginProof(weights or NO_HEAD)
        direction = DirectionProof.of(bundle.manifest, weights, bundle.request_bound, margin, runner)
        shadow = None
        if settings.shadow_rate:
            shadow = OnnxRunner(bundle, "cpu", threads=1) if isinstance(runner, DeviceRunner) else runner
    except BaseException:
        runner.close()
        raise
    return LoadedBundle(bundle, margin, direction, runner, shadow, bits.digest)


async def start(opened: LoadedBundle, store: Store, settings: Settings, metrics: Metrics) -> Engine:
    """Returns a warmed-up engine that owns `opened`. Closes `opened` on failure. Raises ValueError if the settings do
    not fit the model. Raises the errors of the model's graphs."""
    bundle, manifest = opened.bundle, opened.bundle.manifest
    try:
        engine = Engine(
            manifest,
            bundle.vocabulary,
            opened.margin,
            opened.runner,
            store,
            settings,
            metrics,
            transitions=bundle.transitions(),
            direction=opened.direction,
            shadow_runner=opened.shadow,
            bits=opened.bits,
        )
    except BaseException:
        await asyncio.to_thread(opened.close)
        raise
    try:
        propagation = await asyncio.to_thread(bundle.propagation)
        await asyncio.to_thread(engine.warm_up, propagation)
    except BaseException:
        await engine.close()
        engine.discard()
        raise
    await asyncio.to_thread(trim)
    logger.info("model %s version %s was loaded on %s", manifest.name, manifest.version, opened.runner.device)
    if not manifest.certificate.certified:
        logger.info("model %s is not certified: %s", manifest.name, manifest.certificate.reason)
    return engine


def trim() -> None:
    """Makes glibc return free memory to the operating system. The checks of a bundle leave much free memory."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def uncertified(bundle: Bundle, error: CertificateError) -> Bundle:
    """Returns the bundle with an empty certificate that states why the original certificate does not hold. The reason
    contains no path of this machine."""
    logger.warning("model %s is served as uncertified: %s", bundle.manifest.name, error)
    reason = str(error)
    for place in (bundle.path / MANIFEST, bundle.path):
        reason = reason.removeprefix(f"{place}: ")
    certificate = Certificate(contractive=False, reason=f"the certificate does not hold: {reason}", layers=())
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"certificate": certificate}))
