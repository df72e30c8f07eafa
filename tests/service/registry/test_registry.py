from __future__ import annotations

import asyncio
import logging
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.models.bundles import edit_manifest
from tests.models.rounding import rounding
from tests.service.engine_harness import TIMEOUT_S
from tests.service.sessions.stores.redis_server import redis_server
from tests.service.shipped import FOLDER, each_bundle
from tests.service.versions import put
from wane.models.bundle import Bundle, BundleError, CertificateError
from wane.models.certificate import certify
from wane.models.manifest import Role
from wane.service.engine.engine import Engine
from wane.service.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LoadFailed,
    Unavailable,
    UnknownModel,
    UnknownSession,
)
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.registry.registry import ModelRegistry
from wane.service.registry.repository import FoundBundle, RegistryError
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.runner import Array
from wane.service.settings import Settings
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest, StepRequest

STABLE, SHOP = FOLDER / "rnn-stable", FOLDER / "shop"
"""The shipped bundles that load fastest."""


def make(path: Path, **settings: Any) -> ModelRegistry:
    return ModelRegistry(Settings(bundles=path, device="cpu", **settings), Metrics())


@pytest.fixture
def without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the verification of graphs against the oracle, which these tests do not need."""
    monkeypatch.setattr("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0)


@pytest.fixture
async def registry(tmp_path: Path, without_verification: None) -> AsyncIterator[ModelRegistry]:
    """A registry with two loaded bundles."""
    for path in (STABLE, SHOP):
        shutil.copytree(path, tmp_path / path.name)
    registry = make(tmp_path)
    await registry.load()
    yield registry
    await registry.close()


@each_bundle
async def test_one_bundle_can_be_served_by_its_own_path(path: Path) -> None:
    registry = make(path)
    assert (registry.ready, registry.status) == (False, "loading")
    with pytest.raises(Unavailable, match="loading"):
        registry.get()
    await registry.load()
    assert (registry.ready, registry.status, registry.device) == (True, "ready", "cpu")
    answer = await registry.get().submit(PredictRequest((1, 2, 3)))
    assert sum(one.probability for one in answer.predictions) <= 1
    await registry.close()
    assert (registry.ready, registry.status) == (False, "draining")
    with pytest.raises(Unavailable, match="stopping"):
        registry.get()


async def test_a_registry_that_shuts_down_is_unready_but_answers_until_it_is_closed(registry: ModelRegistry) -> None:
    registry.leave()
    assert (registry.ready, registry.status) == (False, "draining")
    assert (await registry.get().submit(PredictRequest((1, 2, 3)))).predictions
    await registry.close()
    with pytest.raises(Unavailable, match="stopping"):
        registry.get()


async def test_a_worker_that_starts_again_has_the_models_and_the_default_model_of_the_other_workers(
    tmp_path: Path, without_verification: None
) -> None:
    """The folder may have other bundles by then."""
    settings, names = Settings(bundles=tmp_path / "bundles", device="cpu"), tmp_path / "names"

    async def start() -> tuple[ModelRegistry, list[str]]:
        registry = ModelRegistry(settings, Metrics(), names_file=names)
        await registry.load()
        return registry, [engine.name for engine in registry.list()]

    shutil.copytree(SHOP, settings.bundles / "shop")
    first, served = await start()
    assert served == ["shop"]
    shutil.copytree(STABLE, settings.bundles / "rnn-stable")  # would be the default model of a new server
    second, served = await start()
    assert (served, second.default) == (["shop"], "shop")
    await first.load_model("rnn-stable")
    third, served = await start()
    assert (served, third.default) == (["shop", "rnn-stable"], "shop")
    shutil.rmtree(settings.bundles / "shop")
    with pytest.raises(RegistryError, match="no bundle of the default model 'shop'"):
        await start()
    await first.unload_model("shop")
    fourth, served = await start()
    assert (served, fourth.default) == (["rnn-stable"], "shop")
    for registry in (first, second, third, fourth):
        await registry.close()


async def test_a_worker_that_starts_again_tries_the_models_that_failed_to_load(
    tmp_path: Path, without_verification: None
) -> None:
    """Otherwise it would answer requests to their sessions with 404, and clients would give the sessions up."""
    settings, names = Settings(bundles=tmp_path / "bundles", device="cpu"), tmp_path / "names"
    for path in (STABLE, SHOP):
        shutil.copytree(path, settings.bundles / path.name)
    edit_manifest(settings.bundles / "shop", "certificate", value=None)
    for served in (["rnn-stable"], []):
        registry = ModelRegistry(settings, Metrics(), names_file=names)
        await registry.load()
        assert ([engine.name for engine in registry.list()], [*registry.failures]) == (served, ["shop"])
        if served:
            await registry.unload_model("rnn-stable")
        await registry.close()


class Gate:
    """Makes every load of a bundle's graphs wait until the test sets `opened`. `names` lists the models whose load has
    begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.opened = threading.Event()
        self._begun = threading.Semaphore(0)
        self._open_graphs = loader.open_graphs
        monkeypatch.setattr(loader, "open_graphs", self._held)

    def _held(self, bundle: Bundle, settings: Settings) -> loader.LoadedBundle:
        self.names.append(bundle.manifest.name)
        self._begun.release()
        assert self.opened.wait(TIMEOUT_S), "the test has not let the load continue"
        return self._open_graphs(bundle, settings)

    async def reached(self) -> None:
        """Waits until another load has begun. Each call waits for one load."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=TIMEOUT_S)


async def test_the_default_model_answers_while_the_others_are_loaded(
    tmp_path: Path, without_verification: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    for name in ("gated-stable", "lstm", "rnn-stable"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    registry, answering = make(tmp_path, default_model="lstm"), asyncio.Event()
    loading = asyncio.create_task(registry.load(answering.set))
    await gate.reached()
    assert (registry.loading, registry.served, registry.is_coming()) == (
        ["lstm", "gated-stable", "rnn-stable"],
        [],
        True,
    )
    with pytest.raises(Unavailable, match="loading model 'lstm'"):
        registry.get()
    asking = asyncio.create_task(registry.wait_for())
    other = asyncio.create_task(registry.wait_for("gated-stable"))
    gate.opened.set()
    await answering.wait()
    gate.opened.clear()
    await asking
    assert (await registry.get().submit(PredictRequest((1, 2, 3)))).predictions
    assert [engine.name for engine in registry.served] == ["lstm"]
    assert (registry.ready, registry.status, other.done()) == (False, "loading", False)
    states = {entry.name: entry.state for entry in await registry.index()}
    assert states == {"lstm": "READY", "gated-stable": "LOADING", "rnn-stable": "LOADING"}
    with pytest.raises(DeadlineExceeded, match="while the server was loading the model"):
        await registry.wait_for("gated-stable", asyncio.get_running_loop().time() - 1)
    with pytest.raises(UnknownModel):
        registry.get("nobody")
    gate.opened.set()
    await other
    assert registry.get("gated-stable").name == "gated-stable"
    await loading
    assert (registry.ready, registry.loading, gate.names) == (True, [], ["lstm", "gated-stable", "rnn-stable"])
    await registry.close()


async def test_a_session_waits_for_its_model(
    tmp_path: Path, without_verification: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lstm", "rnn-stable"):
        shutil.copytree(FOLDER / name, tmp_path / "bundles" / name)
    file = tmp_path / "sessions"
    before = make(STABLE, session_file=file)
    await before.load()
    session = (await before.get().create_session()).session
    await before.close()
    registry, gate = make(tmp_path / "bundles", session_file=file, default_model="lstm"), Gate(monkeypatch)
    gate.opened.set()
    loading = asyncio.create_task(registry.load(gate.opened.clear))
    await registry.wait_for()
    asking = asyncio.create_task(registry.engine_for(session))
    await asyncio.sleep(0)
    assert not asking.done()
    gate.opened.set()
    assert (await asking).name == "rnn-stable"
    await loading
    await registry.close()


async def test_a_model_that_is_still_loading_is_unloaded_once_loaded(
    registry: ModelRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.close()
    gate, registry = Gate(monkeypatch), make(tmp_path)
    loading = asyncio.create_task(registry.load())
    await gate.reached()
    last = registry.loading[-1]
    unloading = asyncio.create_task(registry.unload_model(last))
    again = asyncio.create_task(registry.load_model(registry.default))
    gate.opened.set()
    await unloading
    await loading
    assert [engine.name for engine in registry.list()] == [registry.default]
    assert await again is registry.get(), "the model was loaded twice"
    await registry.close()


async def test_a_model_is_measured_after_all_models_are_loaded(
    registry: ModelRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.close()
    registry, served, all_measured = make(tmp_path), [], asyncio.Event()

    async def measure(engine: Engine) -> None:
        served.append([one.name for one in registry.served])
        if len(served) == 2:
            all_measured.set()
        raise RuntimeError("a run that failed")

    monkeypatch.setattr(Engine, "measure", measure)
    await registry.load()
    await all_measured.wait()
    assert [len(names) for names in served] == [2, 2]
    assert (await registry.get().submit(PredictRequest((1, 2, 3)))).predictions
    await registry.close()


async def test_a_registry_lists_no_models_before_loading_or_after_closing(tmp_path: Path) -> None:
    registry = make(tmp_path)
    for reason in ("loading", "stopping"):
        with pytest.raises(Unavailable, match=reason):
            registry.list()
        with pytest.raises(Unavailable, match=reason):
            await registry.report()
        await registry.close()


async def test_models_are_found_by_name_and_the_alphabetically_first_is_the_default(registry: ModelRegistry) -> None:
    names = sorted(engine.name for engine in registry.list())
    assert registry.default == ("gated-stable-64" if "gated-stable-64" in names else names[0])
    assert registry.list()[0] is registry.get() is registry.get(registry.default)
    with pytest.raises(UnknownModel, match=f"no model 'nobody'; loaded models: {names[0]}"):
        registry.get("nobody")


async def test_a_session_is_found_only_on_its_model(registry: ModelRegistry) -> None:
    engines = registry.list()
    session = (await engines[-1].create_session()).session
    assert await registry.engine_for(session) is engines[-1]
    assert await registry.engine_for(session, engines[-1].name) is engines[-1]
    if len(engines) > 1:
        with pytest.raises(InvalidRequest, match=f"belongs to model '{engines[-1].name}'"):
            await registry.engine_for(session, engines[0].name)
        with pytest.raises(UnknownSession):
            await engines[0].submit(StepRequest(session, (1,)))
    with pytest.raises(UnknownSession, match="'nobody'"):
        await registry.engine_for("nobody")


@pytest.mark.stack
async def test_a_session_created_again_by_another_replica_is_found_on_its_new_model(
    tmp_path: Path, without_verification: None
) -> None:
    for path in (STABLE, SHOP):
        shutil.copytree(path, tmp_path / "bundles" / path.name)
    with redis_server(tmp_path / "redis") as redis:
        store = f"redis://127.0.0.1:{redis.port}/0"
        here, elsewhere = (make(tmp_path / "bundles", store=store) for _ in range(2))
        await here.load()
        await elsewhere.load()
        old, new = (engine.name for engine in here.list())
        await here.get(old).create_session("s")
        await here.unload_model(old)
        await elsewhere.get(old).delete_session("s")
        await elsewhere.get(new).create_session("s")
        assert await here.engine_for("s") is here.get(new)
        await here.close()
        await elsewhere.close()


async def test_the_report_lists_every_model(registry: ModelRegistry) -> None:
    report = await registry.report()
    assert report.device == "cpu"
    assert [model.model for model in report.models] == [engine.name for engine in registry.list()]


async def test_a_registry_closed_while_loading_cancels_the_load_and_keeps_the_sessions(
    tmp_path: Path, without_verification: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sessions"
    before = make(STABLE, session_file=file)
    await before.load()
    session = (await before.get().create_session()).session
    await before.close()
    gate = Gate(monkeypatch)
    registry, after = make(FOLDER, session_file=file), make(STABLE, session_file=file)
    loading = asyncio.create_task(registry.load())
    await gate.reached()
    assert not file.exists(), "the store must be opened before the first model is loaded"
    asking = asyncio.create_task(registry.wait_for())
    closing = asyncio.create_task(registry.close())
    with pytest.raises(Unavailable, match="stopping"):  # fails before the load has ended
        await asking
    assert not closing.done()
    gate.opened.set()
    await closing
    await loading
    assert (registry.ready, registry.status, registry.served, registry.loading) == (False, "draining", [], [])
    assert gate.names == ["gated-stable-64"], "no other load may start after the first one"
    await after.load()
    assert await after.engine_for(session) is after.get()
    await after.close()


async def test_sessions_are_saved_before_close_waits_for_an_unfinished_load(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, opening, go_on, closed = registry.session_store, threading.Event(), threading.Event(), asyncio.Event()
    assert store is not None

    def slow(found: FoundBundle) -> loader.LoadedBundle:
        opening.set()
        go_on.wait()
        raise LoadFailed(found.name, "too late")

    async def close() -> None:
        closed.set()

    monkeypatch.setattr(store, "close", close)
    monkeypatch.setattr(registry, "_read", slow)
    registry._digests[registry.default] = "another"
    monkeypatch.setattr(registry.get(), "version", "0")
    load = asyncio.create_task(registry.load_model(registry.default))
    await asyncio.to_thread(opening.wait)
    closing = asyncio.create_task(registry.close())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await closed.wait()
        assert not closing.done()
    finally:
        go_on.set()
        await closing
    with pytest.raises(LoadFailed, match="too late"):
        await load


async def test_a_default_model_that_is_set_must_exist() -> None:
    with pytest.raises(RegistryError, match="default_model is 'nobody', but there are only bundles of"):
        await make(STABLE, default_model="nobody").load()


@pytest.mark.parametrize(
    ("names", "settings", "chosen"),
    [
        (["shop"], {}, "shop: the only model"),
        (["shop"], {"default_model": "shop"}, "shop: set by default_model"),
        (["shop", "log"], {}, "log: the first by name; set default_model to choose another"),
        (["shop", "log"], {"default_model": "shop"}, "shop: set by default_model"),
        (["shop", "gated-stable-64", "a"], {}, "gated-stable-64: set default_model to choose another"),
    ],
)
async def test_the_server_logs_the_default_model_and_lists_it_first(
    tmp_path: Path,
    without_verification: None,
    caplog: pytest.LogCaptureFixture,
    names: list[str],
    settings: dict[str, str],
    chosen: str,
) -> None:
    caplog.set_level("INFO")
    for name in names:
        put(tmp_path, "1", name=name)
    registry = make(tmp_path, **settings)
    await registry.load()
    name = chosen.partition(":")[0]
    assert f"the default model is {chosen}" in [record.message for record in caplog.records]
    assert registry.get().name == registry.list()[0].name == name
    await registry.close()


async def test_two_different_bundles_of_one_version_are_rejected(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(STABLE, tmp_path / name)
    edit_manifest(tmp_path / "b", "description", value="another")
    with pytest.raises(RegistryError, match="two different bundles have version"):
        await make(tmp_path).load()


async def test_a_folder_without_a_bundle_and_a_path_that_is_not_a_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="contains no bundle"):
        await make(tmp_path).load()
    with pytest.raises(RegistryError, match="is not a folder"):
        await make(tmp_path / "nowhere").load()


async def test_a_budget_too_small_for_a_state_is_rejected_with_the_model(without_verification: None) -> None:
    with pytest.raises(RegistryError, match=r"model .*: state_budget_bytes is 1,"):
        await make(STABLE, state_budget_bytes=1).load()


def flip_a_byte(path: Path) -> str:
    weights = path / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return "other/weights.safetensors: SHA-256 differs"


def cut_the_manifest(path: Path) -> str:
    (path / "manifest.json").write_text("{")
    return "other/manifest.json: cannot be read as JSON"


def delete_the_weights(path: Path) -> str:
    (path / "weights.safetensors").unlink()
    return "other/weights.safetensors: the file is missing"


@pytest.mark.parametrize("spoil", [flip_a_byte, cut_the_manifest, delete_the_weights])
async def test_a_bundle_that_cannot_be_loaded_is_skipped_and_named(
    tmp_path: Path, without_verification: None, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    shutil.copytree(FOLDER / "lstm", tmp_path / "lstm")
    shutil.copytree(FOLDER / "gated-stable", tmp_path / "other")
    edit_manifest(tmp_path / "other", "name", value="other")
    reason = spoil(tmp_path / "other")
    registry = make(tmp_path, default_model="lstm")
    await registry.load()
    assert (registry.ready, [engine.name for engine in registry.list()]) == (True, ["lstm"])
    assert reason in registry.failures["other"].reason
    assert f"model 'other' was not loaded: {reason}" in caplog.text
    (entry,) = [entry for entry in await registry.index() if entry.name == "other"]
    assert entry.state == "UNAVAILABLE" and reason in entry.reason
    with pytest.raises(UnknownModel, match=f"'other' was not loaded: {reason}"):
        registry.get("other")
    await registry.close()
    for settings in ({"default_model": "other"}, {"default_model": "lstm", "require_all": True}):
        registry = make(tmp_path, **settings)
        with pytest.raises((BundleError, RegistryError), match=reason):
            await registry.load()
        await registry.close()


async def test_a_request_that_waits_for_a_model_gets_the_reason_of_its_failure(
    tmp_path: Path, without_verification: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gated-stable", "lstm"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    reason = flip_a_byte(tmp_path / "gated-stable").removeprefix("other/")
    registry, gate = make(tmp_path, default_model="lstm"), Gate(monkeypatch)

    async def ask() -> Engine:
        await registry.wait_for("gated-stable")
        return registry.get("gated-stable")

    loading = asyncio.create_task(registry.load())
    await gate.reached()
    asking = asyncio.create_task(ask())
    gate.opened.set()
    with pytest.raises(UnknownModel, match=f"'gated-stable' was not loaded: gated-stable/{reason}"):
        await asking
    await loading
    await registry.close()


async def test_the_error_names_an_unreadable_bundle_whose_folder_has_another_model_s_name(
    tmp_path: Path, without_verification: None, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("lstm", "another"):
        shutil.copytree(FOLDER / "lstm", tmp_path / name)
    cut_the_manifest(tmp_path / "lstm")
    registry = make(tmp_path)
    await registry.load()
    reason = "lstm/manifest.json: cannot be read as JSON"
    assert f"a bundle was not loaded: {reason}" in caplog.text
    ready, unreadable = sorted(await registry.index(), key=lambda entry: entry.state)
    assert (ready.name, ready.state, unreadable.state) == ("lstm", "READY", "UNAVAILABLE")
    assert unreadable.reason.startswith(reason)
    await registry.close()
    with pytest.raises(RegistryError, match=reason):
        await make(tmp_path, require_all=True).load()


async def test_a_session_whose_model_failed_to_load_still_exists(tmp_path: Path, without_verification: None) -> None:
    file = tmp_path / "sessions"
    for name in ("lstm", "gated-stable"):
        shutil.copytree(FOLDER / name, tmp_path / "bundles" / name)
    before = make(tmp_path / "bundles", session_file=file, default_model="lstm")
    await before.load()
    session = (await before.get("gated-stable").create_session()).session
    await before.close()
    (tmp_path / "bundles" / "gated-stable" / "step.onnx").unlink()
    registry = make(tmp_path / "bundles", session_file=file, default_model="lstm")
    await registry.load()
    with pytest.raises(Unavailable, match=r"'gated-stable' was not loaded: .*step\.onnx"):
        await registry.engine_for(session)
    await registry.close()


async def test_a_graph_with_wrong_results_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnnxRunner.run

    def wrong(self: OnnxRunner, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        outputs = dict(run(self, role, feeds))
        return outputs if role != "advance" else outputs | {"hidden": outputs["hidden"] + 1}

    monkeypatch.setattr(OnnxRunner, "run", wrong)
    with pytest.raises(BundleError, match="advance"):
        await make(STABLE).load()


def edited(source: Path, folder: Path, *keys: str | int, value: object) -> Path:
    """Copies the bundle `source` into the folder, and sets the field `keys` of the copy's certificate to `value`.
    Returns the copy's path."""
    path = shutil.copytree(source, folder / source.name)
    edit_manifest(path, "certificate", *keys, value=value)
    return path


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("layers", 0, "factor"), 0.5, r"layers\.0\.factor"),
        (("layers", 0, "rule"), "a better one", r"layers\.0\.rule"),
        (("contractive",), False, "contractive"),
    ],
    ids=["factor", "rule", "contractive"],
)
async def test_a_model_with_an_edited_certificate_is_served_as_uncertified_with_the_reason(
    tmp_path: Path,
    without_verification: None,
    caplog: pytest.LogCaptureFixture,
    keys: tuple[str | int, ...],
    value: object,
    message: str,
) -> None:
    path = edited(STABLE, tmp_path, *keys, value=value)
    with pytest.raises(CertificateError, match=message):
        Bundle.read(path)
    registry = make(path)
    await registry.load()
    engine = registry.get()
    certificate = engine.manifest.certificate
    assert (certificate.contractive, certificate.certified, certificate.layers) == (False, False, ())
    assert (certificate.error_bound, certificate.state_error, certificate.rounding) == ((), (), None)
    assert certificate.reason is not None
    assert re.search(
        f"^the certificate does not hold: certificate.*{message}.* claimed, the weights", certificate.reason
    )
    assert str(tmp_path) not in certificate.reason, "the message must not contain paths of the server"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("model rnn-stable is served as uncertified: ")
    assert certificate.reason.removeprefix("the certificate does not hold: ") in warning

    tokens = tuple(range(2 * engine.manifest.max_window))
    window = await engine.submit(PredictRequest(tokens, mode=Mode.WINDOW))
    assert (window.error_bound, window.state_error_bound, window.top1_proved) == (None, None, False)
    for request in (PredictRequest(tokens), PredictRequest(tokens, tolerance=0.9)):
        auto = await engine.submit(request)
        assert (auto.mode, auto.state, auto.error_bound) == (Mode.RECURRENT, StateSource.FULL, 0.0)
    await registry.close()


async def test_a_model_whose_graphs_round_more_than_measured_loses_its_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = Bundle.read(STABLE)
    boast = rounding(0.0, states=["layers.0.h"], state=1e-12)
    claimed = certify(bundle.manifest.architecture, bundle.weights(), bundle.manifest.max_window, boast)
    path = shutil.copytree(STABLE, tmp_path / STABLE.name)
    edit_manifest(path, "certificate", value=claimed.model_dump(mode="json"))
    assert Bundle.read(path).manifest.certificate == claimed, "the bundle's certificate must be the claimed one"
    registry = make(path)
    await registry.load()
    certificate = registry.get().manifest.certificate
    assert not certificate.certified
    assert certificate.reason is not None
    said = r"^the certificate does not hold: .*hidden is .* from the oracle.* at least 2 times this distance.*e-1[0-9]$"
    assert re.search(said, certificate.reason)
    assert certificate.reason.removeprefix("the certificate does not hold: ") in caplog.text
    await registry.close()


async def test_the_log_has_the_reason_why_a_model_is_uncertified(
    without_verification: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registry = make(FOLDER / "lstm")
    await registry.load()
    certificate = registry.get().manifest.certificate
    assert not certificate.certified
    assert certificate.reason is not None
    assert f"model lstm is not certified: {certificate.reason}" in caplog.text
    await registry.close()


async def test_a_graph_of_other_weights_is_fatal_even_with_an_invalid_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(STABLE, tmp_path, "layers", 0, "factor", value=0.5)
    run = OnnxRunner.run

    def wrong(self: OnnxRunner, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        outputs = dict(run(self, role, feeds))
        return outputs if role != "head" else {"logits": outputs["logits"] + outputs["logits"] ** 2}

    monkeypatch.setattr(OnnxRunner, "run", wrong)
    with pytest.raises(BundleError, match="head"):
        await make(path).load()
