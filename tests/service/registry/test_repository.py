from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.service.engine_harness import TIMEOUT_S
from tests.service.versions import MODEL, put
from wane.service.errors import LoadFailed
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings


class Loads:
    """A registry that records the requested loads."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failure: Exception | None = None

    async def __call__(self, name: str) -> None:
        self.names.append(name)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bundles"
    folder.mkdir()
    put(folder, "1")
    return folder


def poll_with(folder: Path, loads: Loads) -> ModelRegistry:
    """Returns a registry that has seen the current bundles, and whose loads are only recorded."""
    registry = ModelRegistry(Settings(bundles=folder, device="cpu"), Metrics())
    registry._repository.changed()
    registry.load_model = loads  # type: ignore[method-assign,assignment]
    return registry


async def poll(registry: ModelRegistry, times: int) -> None:
    for _ in range(times):
        await registry.load_changed()


async def test_a_changed_bundle_is_loaded_once_after_it_has_settled(folder: Path) -> None:
    loads = Loads()
    registry = poll_with(folder, loads)
    await poll(registry, 2)
    assert loads.names == []
    put(folder, "2")
    await registry.load_changed()
    assert loads.names == [], (
        "a changed bundle must not be loaded at the first look, because it may still be being copied"
    )
    await poll(registry, 3)
    assert loads.names == [MODEL]


async def test_a_bundle_that_is_still_being_copied_is_not_loaded(folder: Path) -> None:
    loads = Loads()
    registry = poll_with(folder, loads)
    path = put(folder, "1", name="other")
    weights = (path / "weights.safetensors").read_bytes()
    for end in (1, 2, 3):
        (path / "weights.safetensors").write_bytes(weights[:end])
        await registry.load_changed()
    assert loads.names == []
    (path / "weights.safetensors").write_bytes(weights)
    await poll(registry, 2)
    assert loads.names == ["other"]


async def test_a_failed_bundle_is_retried_when_it_changes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads()
    loads.failure = LoadFailed(MODEL, "its weights are missing")
    registry = poll_with(folder, loads)
    for version in ("2", "3"):
        put(folder, version)
        await poll(registry, 4)
    assert loads.names == [MODEL, MODEL]
    assert (
        "the bundles of model small have changed, but: model 'small' was not loaded: its weights are missing"
        in caplog.text
    )


async def test_a_deleted_bundle_changes_nothing_and_is_loaded_again_if_it_is_restored(folder: Path) -> None:
    loads = Loads()
    registry = poll_with(folder, loads)
    shutil.move(folder / MODEL, folder.parent / "away")
    await poll(registry, 2)
    assert loads.names == []
    shutil.move(folder.parent / "away", folder / MODEL)
    await poll(registry, 2)
    assert loads.names == [MODEL]


async def test_only_the_models_whose_bundles_have_changed_are_loaded(folder: Path) -> None:
    put(folder, "1", name="other")
    loads = Loads()
    registry = poll_with(folder, loads)
    put(folder, "2", name="other")
    await poll(registry, 3)
    assert loads.names == ["other"]  # the model `small`, which may have been unloaded, is not loaded again


async def test_a_model_is_loaded_when_one_of_its_bundles_is_deleted(folder: Path) -> None:
    shutil.copytree(folder / MODEL, folder / "another")
    loads = Loads()
    registry = poll_with(folder, loads)
    shutil.rmtree(folder / "another")
    await poll(registry, 3)
    assert loads.names == [MODEL]


async def test_a_server_that_polls_its_folder_serves_new_bundles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0)
    registry = ModelRegistry(
        Settings(bundles=folder, device="cpu", max_batch_size=4, model_poll_interval_s=0.01), Metrics()
    )
    await registry.load()
    put(folder, "2")
    async with asyncio.timeout(TIMEOUT_S):
        while registry.get().version != "2":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await registry.close()
