"""Tests of replacing a model's version while sessions use the version. The registry serves the new version, or rejects
it. The registry keeps the old version for its sessions, and closes the old version when no session needs it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from tests.models.bundles import edit_manifest, rewrite
from tests.service.alone import alone, bytes_in_use, growth, live_objects, named_threads, release_free_memory, threads
from tests.service.engine_harness import TIMEOUT_S
from tests.service.versions import MODEL, put, retokenize
from wane.models.bundle import Bundle, BundleError
from wane.service.engine.engine import Engine
from wane.service.errors import (
    DeadlineExceeded,
    LoadFailed,
    TokenizerChanged,
    Unavailable,
    UnknownModel,
    UnknownSession,
)
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.registry.registry import IndexEntry, ModelRegistry
from wane.service.registry.repository import RegistryError
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import PredictRequest, StepRequest

TOKENS = (5, 6, 7, 8)
FLOAT32 = 1e-5
SWAPS = 14
# The most bytes that a swap may leak. A leaked graph has 4 MB, and a leaked engine has 13 MB.
KEPT_BYTES = 1e6
# The most bytes that may be free but not returned to the kernel after all swaps. Without garbage collection and
# malloc_trim this number is 144 MB.
WITHHELD_BYTES = 30e6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with version 1 of the model. Skips the verification of graphs against the oracle, because other tests
    cover it."""
    monkeypatch.setattr("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0)
    folder = tmp_path / "bundles"
    folder.mkdir()
    put(folder, "1")
    return folder


@pytest.fixture
def metrics() -> Metrics:
    """The registry's metrics."""
    return Metrics()


@pytest.fixture
async def registry(folder: Path, metrics: Metrics) -> AsyncIterator[ModelRegistry]:
    """A registry that serves version 1."""
    registry = ModelRegistry(Settings(bundles=folder, device="cpu", max_batch_size=4), metrics)
    await registry.load()
    yield registry
    await registry.close()


async def settled(registry: ModelRegistry) -> None:
    """Waits until all leaving engines are closed and their memory is freed."""
    while registry.retired_engines._ending:
        await asyncio.wait(registry.retired_engines._ending)


async def step(registry: ModelRegistry, session: str, *tokens: int, position: int | None = None) -> Answer:
    engine = await registry.engine_for(session)
    return await engine.submit(StepRequest(session, tokens, expected_position=position))


def first(answer: Answer) -> tuple[int, float]:
    return answer.predictions[0].token_id, answer.predictions[0].logprob


async def test_sessions_continue_on_the_new_version_from_their_stored_tokens(
    registry: ModelRegistry, folder: Path
) -> None:
    session = (await registry.get().create_session()).session
    before = await step(registry, session, *TOKENS, position=0)
    put(folder, "2", "lstm")
    new = await registry.load_model(MODEL)
    assert (new.version, registry.get()) == ("2", new)
    assert (await new.get_session(session)).model_version == "2"
    after = await step(registry, session, 9, position=4)
    assert (after.position, after.state, after.error_bound) == (5, StateSource.REBUILT, 0.0)
    whole = await new.submit(PredictRequest((*TOKENS, 9), mode=Mode.RECURRENT))
    assert first(after) == pytest.approx(first(whole), abs=FLOAT32)
    assert first(after)[1] != pytest.approx(first(before)[1], abs=FLOAT32)
    again = await step(registry, session, 10, position=5)
    assert again.state is StateSource.RESIDENT


async def test_the_new_version_uses_no_kept_state_of_the_old_version(registry: ModelRegistry, folder: Path) -> None:
    asked = PredictRequest(TOKENS * 20, mode=Mode.RECURRENT, owner="")
    await registry.get().submit(asked)
    assert (await registry.get().submit(asked)).cached_tokens == 80
    put(folder, "2", "lstm")
    new = await registry.load_model(MODEL)
    answer = await new.submit(asked)
    assert answer.cached_tokens == 0
    assert first(answer) == first(await new.submit(PredictRequest(TOKENS * 20, mode=Mode.RECURRENT)))
    assert (await new.submit(asked)).cached_tokens == 80


async def test_the_new_version_replays_a_step_of_the_old_version(registry: ModelRegistry, folder: Path) -> None:
    session = (await registry.get().create_session()).session
    await step(registry, session, *TOKENS, position=0)
    put(folder, "2", "lstm")
    await registry.load_model(MODEL)
    again = await step(registry, session, *TOKENS, position=0)
    assert (again.replayed, again.position) == (True, 4)


async def test_loading_a_served_version_changes_nothing(registry: ModelRegistry) -> None:
    engine = registry.get()
    assert await registry.load_model(MODEL) is engine
    assert not engine.retired


async def test_requests_in_flight_at_a_swap_are_answered_by_the_old_version(
    registry: ModelRegistry, folder: Path
) -> None:
    old = registry.get()
    epoch = registry.epochs.enter()
    put(folder, "2", "lstm")
    new = await registry.load_model(MODEL)
    assert registry.get() is new
    assert old.retired
    assert IndexEntry(MODEL, "1", "UNLOADING", "answers its last requests") in await registry.index()
    assert (await old.submit(PredictRequest(TOKENS))).predictions
    epoch.leave()
    await settled(registry)
    assert await registry.index() == [IndexEntry(MODEL, "2", "READY", "")]
    with pytest.raises(Unavailable):
        await old.submit(PredictRequest(TOKENS))


async def test_an_old_version_finishes_requests_of_disconnected_callers(registry: ModelRegistry, folder: Path) -> None:
    old = registry.get()
    session = (await old.create_session()).session
    running = asyncio.ensure_future(old.submit(StepRequest(session, TOKENS)))
    put(folder, "2", "lstm")
    await registry.load_model(MODEL)
    await settled(registry)
    assert (await running).position == 4
    assert (await registry.get().get_session(session)).position == 4


def be_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def refer_outside(path: Path, name: str) -> None:
    """Makes a graph read its weights from a file outside the bundle."""
    inside, outside = b"weights.safetensors", b"../../other.weights"
    assert len(inside) == len(outside), "the graph's encoding contains the length"
    rewrite(path, name, (path / name).read_bytes().replace(inside, outside))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: (path / "weights.safetensors").write_bytes(b"no weights"), "small/weights.safetensors"),
        (lambda path: (path / "weights.safetensors").unlink(), "small/weights.safetensors: the file is missing"),
        (lambda path: os.truncate(path / "weights.safetensors", 1000), "small/weights.safetensors: "),
        (lambda path: (path / "manifest.json").write_text("{"), "small/manifest.json: cannot be read as JSON"),
        (lambda path: be_a_fifo(path / "manifest.json"), "small/manifest.json: must be a regular file"),
        (lambda path: be_a_fifo(path / "scan.onnx"), "small/scan.onnx: must be a regular file"),
        (lambda path: rewrite(path, "step.onnx", b"no graph"), "small/step.onnx: onnxruntime cannot open the graph: "),
        (lambda path: refer_outside(path, "step.onnx"), "small/step.onnx: onnxruntime cannot open the graph: "),
        (lambda path: edit_manifest(path, "version", value="1"), "its bundle has changed, but its version is still 1"),
        (lambda path: edit_manifest(path, "window", value=0), "small/manifest.json: window"),
        (lambda path: edit_manifest(put(path.parent, "2", "gated-stable", name="other"), "name", value=MODEL),
         "two different bundles have version 2"),
    ],
    ids=["hash", "no weights", "truncated weights", "json", "FIFO", "graph FIFO", "no graph", "outside data", "version",
         "field", "twice"],
)  # fmt: skip
async def test_a_failed_load_keeps_the_old_version_and_reports_the_reason(
    registry: ModelRegistry, folder: Path, spoil: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = registry.get()
    session = (await engine.create_session()).session
    await step(registry, session, *TOKENS)
    path = put(folder, "2", "lstm")
    assert callable(spoil)
    spoil(path)
    with pytest.raises(LoadFailed, match=f"model 'small' was not loaded: .*{reason}") as caught:
        await registry.load_model(MODEL)
    assert str(folder) not in caught.value.message, "the message must not contain paths of the server"
    assert registry.get() is engine
    assert (await step(registry, session, 9)).state is StateSource.RESIDENT
    assert reason in caplog.text
    index = await registry.index()
    assert IndexEntry(MODEL, "1", "READY", "") in index
    assert all(reason in entry.reason for entry in index if entry.state == "UNAVAILABLE")


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk does not answer from the next read of a bundle to the end of the test. The event is set by the read."""
    reading, answers = threading.Event(), threading.Event()

    def wait(path: Path) -> Bundle:
        reading.set()
        assert answers.wait(TIMEOUT_S), "the test has not ended"
        raise BundleError("the disk does not answer")

    monkeypatch.setattr(loader, "read", wait)
    yield reading
    answers.set()


async def test_a_load_from_a_disk_that_does_not_answer_is_abandoned(folder: Path, blocked: threading.Event) -> None:
    settings = Settings(bundles=folder, device="cpu", max_batch_size=4, load_timeout_s=0.1)
    registry = ModelRegistry(settings, Metrics())
    with pytest.raises(RegistryError, match=r"its bundle was not read within load_timeout_s, 0\.1 s"):
        await registry.load()
    await registry.close()


async def test_the_registry_closes_while_a_disk_does_not_answer(
    registry: ModelRegistry, folder: Path, blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wane.service.registry.registry.LAST_LOAD_S", 0.1)
    put(folder, "2", "lstm")
    load = asyncio.create_task(registry.load_model(MODEL))
    assert await asyncio.to_thread(blocked.wait, TIMEOUT_S)
    await registry.close()
    with pytest.raises(Unavailable, match="the server is stopping"):
        await load


async def test_the_result_of_an_abandoned_load_is_closed() -> None:
    answers, closed = threading.Event(), threading.Event()

    class Opened:
        def close(self) -> None:
            closed.set()

    def load() -> Any:
        assert answers.wait(TIMEOUT_S)
        return Opened()

    task = asyncio.create_task(loader.read_and_open(load, MODEL))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    answers.set()
    assert await asyncio.to_thread(closed.wait, TIMEOUT_S)


async def test_a_graph_of_other_weights_is_not_loaded(
    registry: ModelRegistry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    path = put(folder, "2", "lstm")
    for name in ("step.onnx", "head.onnx"):
        (path / name).write_bytes((folder.parents[0] / ".small-before-2" / name).read_bytes())
    digests = __import__("json").loads((folder.parents[0] / ".small-before-2" / "manifest.json").read_text())["files"]
    for name in ("step.onnx", "head.onnx"):
        edit_manifest(path, "files", name, value=digests[name])
    before = named_threads()
    with pytest.raises(LoadFailed):
        await registry.load_model(MODEL)
    assert registry.get().version == "1"
    assert named_threads() == before


async def test_a_model_without_a_bundle_is_unknown(registry: ModelRegistry) -> None:
    with pytest.raises(UnknownModel, match="no bundle of model 'nobody'; models with a bundle: small"):
        await registry.load_model("nobody")
    with pytest.raises(UnknownModel, match="no model 'nobody'"):
        await registry.unload_model("nobody")


async def test_a_model_added_after_the_start_can_be_loaded(registry: ModelRegistry, folder: Path) -> None:
    put(folder, "3", "lstm", name="other")
    assert IndexEntry("other", "3", "UNAVAILABLE", "not loaded") in await registry.index()
    await registry.load_model("other")
    assert [engine.name for engine in registry.list()] == [MODEL, "other"]


async def test_the_highest_version_of_a_model_is_served(registry: ModelRegistry, folder: Path) -> None:
    for version in ("9", "10"):
        path = put(folder, version, "lstm", name=f"other-{version}")
        edit_manifest(path, "name", value=MODEL)
    assert (await registry.load_model(MODEL)).version == "10"
    served = ModelRegistry(Settings(bundles=folder, device="cpu", max_batch_size=4), Metrics())
    await served.load()
    assert served.get().version == "10"
    await served.close()


async def test_sessions_of_another_tokenizer_stay_on_their_version(folder: Path, registry: ModelRegistry) -> None:
    old = registry.get()
    session = (await old.create_session()).session
    await step(registry, session, *TOKENS)
    retokenize(put(folder, "2"))
    new = await registry.load_model(MODEL)
    assert new.tokenizer != old.tokenizer
    assert await registry.engine_for(session) is old
    assert (await step(registry, session, 9)).state is StateSource.RESIDENT
    assert (await old.get_session(session)).model_version == "1"
    fresh = (await registry.get().create_session()).session
    assert await registry.engine_for(fresh) is new
    with pytest.raises(TokenizerChanged, match="another tokenizer than that of version 2 of model small"):
        await new.submit(StepRequest(session, (9,)))
    other = (await old.create_session()).session
    await new.delete_session(other)
    with pytest.raises(UnknownSession):
        await old.get_session(other)
    index = await registry.index()
    assert index == [
        IndexEntry(MODEL, "1", "READY", "serves only the sessions of its tokenizer"),
        IndexEntry(MODEL, "2", "READY", ""),
    ]
    report = (await registry.report()).models
    assert [one.model_version for one in report] == ["2", "1"]


async def test_sessions_continue_when_their_tokenizer_is_served_again(folder: Path, registry: ModelRegistry) -> None:
    session = (await registry.get().create_session()).session
    await step(registry, session, *TOKENS)
    retokenize(put(folder, "2"))
    await registry.load_model(MODEL)
    put(folder, "3", "lstm")
    third = await registry.load_model(MODEL)
    assert await registry.engine_for(session) is third
    await settled(registry)
    assert [entry.version for entry in await registry.index()] == ["2", "3"]


async def test_a_version_kept_for_its_sessions_is_closed_when_all_have_expired(folder: Path) -> None:
    registry = ModelRegistry(Settings(bundles=folder, device="cpu", max_batch_size=4, session_ttl_s=0.05), Metrics())
    await registry.load()
    old = registry.get()
    retokenize(put(folder, "2"))
    await registry.load_model(MODEL)
    async with asyncio.timeout(TIMEOUT_S):
        while not old.retired:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await settled(registry)
    assert await registry.index() == [IndexEntry(MODEL, "2", "READY", "")]
    await registry.close()


async def test_the_error_for_a_session_names_a_tokenizer_that_is_not_served(
    folder: Path, registry: ModelRegistry
) -> None:
    session = (await registry.get().create_session()).session
    retokenize(put(folder, "2"))
    await registry.load_model(MODEL)
    registry.retired_engines.retire(*registry.retired_engines.lingering)
    with pytest.raises(TokenizerChanged, match="start a new session"):
        await registry.engine_for(session)


async def test_an_unloaded_model_is_unknown_and_its_sessions_continue_after_a_reload(
    registry: ModelRegistry,
) -> None:
    session = (await registry.get().create_session()).session
    await step(registry, session, *TOKENS)
    await registry.unload_model(MODEL)
    with pytest.raises(UnknownModel, match="loaded models: none"):
        registry.get()
    with pytest.raises(UnknownSession):
        await registry.engine_for(session)
    assert registry.ready and registry.list() == []
    await settled(registry)
    assert await registry.index() == [IndexEntry(MODEL, "1", "UNAVAILABLE", "not loaded")]
    await registry.load_model(MODEL)
    again = await step(registry, session, 9, position=4)
    assert (again.position, again.state) == (5, StateSource.REBUILT)


async def test_sessions_keep_as_many_tokens_as_the_longest_window_of_any_loaded_model(folder: Path) -> None:
    edit_manifest(folder / MODEL, "version", value="1")
    registry = ModelRegistry(
        Settings(bundles=folder, device="cpu", max_batch_size=4, session_history_tokens=1), Metrics()
    )
    await registry.load()
    store = registry.session_store
    assert store is not None and store.session_history_tokens == registry.get().manifest.max_window == 256
    put(folder, "2", "gated-stable")
    await registry.load_model(MODEL)
    assert store.session_history_tokens == registry.get().manifest.max_window == 512
    await registry.close()


async def test_a_load_continues_after_the_callers_deadline(registry: ModelRegistry, folder: Path) -> None:
    put(folder, "2", "lstm")
    with pytest.raises(DeadlineExceeded, match="the load continues: the index of models shows when the load has ended"):
        await registry.load_model(MODEL, asyncio.get_running_loop().time())
    async with asyncio.timeout(TIMEOUT_S):
        while registry.get().version != "2":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_failed_load_of_a_caller_that_has_left_is_not_reported_as_unhandled(
    registry: ModelRegistry, folder: Path
) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: unhandled.append(report["message"]))
    (put(folder, "2", "lstm") / "weights.safetensors").write_bytes(b"")
    with pytest.raises(DeadlineExceeded):
        await registry.load_model(MODEL, asyncio.get_running_loop().time())
    async with asyncio.timeout(TIMEOUT_S):
        while registry._unfinished:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    gc.collect()
    assert unhandled == [] and registry.get().version == "1"


async def test_a_failed_warm_up_leaves_nothing_that_is_counted_later(
    registry: ModelRegistry, folder: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no warm-up")

    before = [*metrics.late.counts]
    put(folder, "2", "lstm")
    monkeypatch.setattr(Engine, "warm_up", fail)
    with pytest.raises(LoadFailed, match="no warm-up"):
        await registry.load_model(MODEL)
    assert metrics.late.counts == before


async def test_a_second_load_waits_and_finds_the_model_loaded(registry: ModelRegistry, folder: Path) -> None:
    put(folder, "2", "lstm")
    first, second = await asyncio.gather(registry.load_model(MODEL), registry.load_model(MODEL))
    assert first is second is registry.get()


async def test_a_server_that_stops_while_loading_closes_the_new_engine(registry: ModelRegistry, folder: Path) -> None:
    put(folder, "2", "lstm")
    loading = asyncio.create_task(registry.load_model(MODEL))
    while registry._opening is None:  # noqa: ASYNC110  (nothing else tells that it has begun)
        await asyncio.sleep(0)
    await registry.close()
    with pytest.raises(Unavailable, match="stopping"):
        await loading


async def test_models_cannot_be_changed_before_the_start_or_after_the_stop(folder: Path) -> None:
    registry = ModelRegistry(Settings(bundles=folder, device="cpu"), Metrics())
    for _ in range(2):
        with pytest.raises(Unavailable):
            await registry.load_model(MODEL)
        with pytest.raises(Unavailable):
            await registry.unload_model(MODEL)
        with pytest.raises(Unavailable):
            await registry.index()
        await registry.close()


async def test_metrics_have_the_version_that_is_served(
    registry: ModelRegistry, metrics: Metrics, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = (await registry.get().create_session()).session
    await step(registry, session, *TOKENS)
    put(folder, "2", "lstm")
    await registry.load_model(MODEL)
    text = metrics.render()[0].decode()
    assert 'wane_model_info{device="cpu",model="small",version="2"} 1.0' in text
    assert 'version="1"' not in text
    assert 'wane_sessions_resident{model="small"} 0.0' in text
    assert 'wane_model_loads_total{outcome="loaded"} 2.0' in text, (
        "one load at the start and one later load must be counted"
    )
    assert "model small version 2 was loaded on cpu" in caplog.text


async def test_a_model_that_is_unloaded_is_not_listed_as_failed(registry: ModelRegistry, folder: Path) -> None:
    (put(folder, "2") / "step.onnx").unlink()
    with pytest.raises(LoadFailed):
        await registry.load_model(MODEL)
    assert [*registry.failures] == [MODEL] and registry.get().version == "1"
    await registry.unload_model(MODEL)
    assert not registry.failures
    with pytest.raises(UnknownModel, match="there is no model 'small'"):
        registry.get(MODEL)


async def swap_by_turns() -> None:
    """Loads SWAPS new versions of a model while one session stays open. The versions are copies of two shipped bundles
    in turn."""
    with TemporaryDirectory() as parent, patch("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0):
        folder = Path(parent) / "bundles"
        folder.mkdir()
        put(folder, "1")
        registry = ModelRegistry(Settings(bundles=folder, device="cpu", max_batch_size=4), Metrics())
        await registry.load()
        session = (await registry.get().create_session()).session
        used: list[int] = []
        running: list[int] = []
        for version in range(2, SWAPS + 2):
            await step(registry, session, *TOKENS)
            put(folder, str(version), "lstm" if version % 2 else "rnn-stable")
            await registry.load_model(MODEL)
            await settled(registry)
            assert live_objects(Engine) == [registry.get()]
            used.append(bytes_in_use())
            running.append(threads())
        withheld = release_free_memory()
        assert (await step(registry, session, 9)).position == SWAPS * len(TOKENS) + 1
        await registry.close()
    assert growth(running, kinds=2) <= 0, f"the number of threads after each swap is {running}"
    # Leaves out the first load from each of the two shipped bundles, which allocates memory that all later loads share.
    kept = growth(used[2:], kinds=2)
    assert kept < KEPT_BYTES, f"each swap leaks {kept:,.0f} bytes; the bytes in use after each swap are {used}"
    assert withheld < WITHHELD_BYTES, (
        f"{withheld:,} bytes are free, but the C library has not returned them to the kernel"
    )


def test_memory_and_threads_do_not_grow_over_many_swaps() -> None:
    """The server must free the memory of a closed engine. To do so, the server runs the garbage collector, and makes
    the C library release free memory."""
    alone(swap_by_turns)


async def load_and_unload() -> None:
    """Loads and unloads SWAPS models with different names."""
    with TemporaryDirectory() as parent, patch("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0):
        folder = Path(parent) / "bundles"
        folder.mkdir()
        put(folder, "1")
        metrics = Metrics()
        registry = ModelRegistry(Settings(bundles=folder, device="cpu", max_batch_size=4), metrics)
        await registry.load()
        used: list[int] = []
        for number in range(SWAPS):
            put(folder, "1", name=f"model-{number}")
            await registry.load_model(f"model-{number}")
            await registry.unload_model(f"model-{number}")
            await settled(registry)
            assert live_objects(Engine) == [registry.get()]
            used.append(bytes_in_use())
        text, _ = metrics.render()
        await registry.close()
    kept = growth(used[2:], kinds=2)
    assert kept < KEPT_BYTES, f"each model leaks {kept:,.0f} bytes; the bytes in use after each model are {used}"
    assert b'wane_state_bytes{model="small"}' in text
    for gauge in (b"model_info", b"state_bytes", b"sessions_resident", b"queue_items"):
        assert b'wane_%b{model="model-' % gauge not in text


def test_memory_does_not_grow_if_models_of_different_names_are_loaded_and_unloaded() -> None:
    """The gauges of an unloaded model must not keep its engine in memory."""
    alone(load_and_unload)
