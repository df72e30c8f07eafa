"""Tests of `wane rollback` and of folders with several versions of a model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.service.engine_harness import TIMEOUT_S
from tests.service.versions import MODEL, put
from wane.cli import main
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.registry.repository import Repository
from wane.service.settings import Settings
from wane.service.types.request import StepRequest


def put_version(folder: Path, version: str, model: str = MODEL) -> Path:
    """Builds a bundle, and moves it to the folder `folder`/`model`/`version`."""
    bundle = put(folder.parent / "building" / version, version, name=model)
    target = folder / model / version
    target.parent.mkdir(exist_ok=True)
    bundle.rename(target)
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the versions 2, 9 and 10 of a model, each in its own folder, and with a bundle of another model."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    (tmp_path / "building").mkdir()
    for version in ("2", "9", "10"):
        (tmp_path / "building" / version).mkdir()
        put_version(folder, version)
    put(folder, "1", name="other")
    return folder


def folders(folder: Path) -> list[tuple[str, str]]:
    """Returns the folder and the version of every bundle that a server would use."""
    return [(one.folder, one.version) for one in Repository(folder).list()]


def test_versions_stand_side_by_side_and_a_folder_with_a_manifest_is_a_bundle(folder: Path) -> None:
    versions = [(f"{MODEL}/{version}", version) for version in ("2", "9", "10")]
    assert folders(folder) == [("other", "1"), *versions]
    assert Repository(folder).find(MODEL).version == "10"
    # A bundle inside the folder of another bundle is ignored.
    shutil.copytree(folder / MODEL / "2", folder / "other" / "nested")
    assert folders(folder) == [("other", "1"), *versions]
    assert [one.version for one in Repository(folder / MODEL).list()] == ["2", "9", "10"]


def test_an_unreadable_version_is_named_by_its_model_and_its_folder(folder: Path) -> None:
    (folder / MODEL / "10" / "manifest.json").write_text("{")
    unreadable = next(one for one in Repository(folder).list() if one.reason is not None)
    assert (unreadable.name, unreadable.folder) == (MODEL, f"{MODEL}/10")
    assert str(unreadable.reason).startswith(f"{MODEL}/10/manifest.json: cannot be read as JSON")
    assert Repository(folder).find(MODEL).version == "9"


def test_a_rollback_withdraws_the_newest_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", MODEL, "--bundles", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"withdrew version 10 of {MODEL}: {MODEL}/10 is now {MODEL}/10.withdrawn" in out
    assert "the newest version is 9" in out
    assert folders(folder) == [("other", "1"), (f"{MODEL}/2", "2"), (f"{MODEL}/9", "9")]
    assert (folder / MODEL / "10.withdrawn" / "weights.safetensors").is_file()
    assert main(["rollback", MODEL, "--bundles", str(folder)]) == 0
    assert Repository(folder).find(MODEL).version == "2"


def test_a_rollback_without_an_earlier_version_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folders(folder)
    monkeypatch.setenv("WANE_BUNDLES", str(folder))
    assert main(["rollback", "other"]) == 2
    assert f"model 'other' has no version before 1 in {folder}" in capsys.readouterr().err
    assert main(["rollback", "nobody"]) == 2
    assert f"there is no bundle of model 'nobody' in {folder}" in capsys.readouterr().err
    assert folders(folder) == before


def test_a_version_that_was_withdrawn_before_is_withdrawn_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("10.withdrawn", "10.2.withdrawn", "10.3.withdrawn"):
        kept = shutil.copytree(folder / MODEL / "10", folder.parent / "kept")
        assert main(["rollback", MODEL, "--bundles", str(folder)]) == 0
        assert f"{MODEL}/10 is now {MODEL}/{name}\n" in capsys.readouterr().out
        kept.rename(folder / MODEL / "10")


async def test_a_server_rolls_back_and_forward_under_a_live_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0)
    shutil.rmtree(folder / "other")
    settings = Settings(bundles=folder, device="cpu", max_batch_size=4, model_poll_interval_s=0.01)
    registry = ModelRegistry(settings, Metrics())
    await registry.load()
    await registry.get().create_session("s")

    async def step(position: int) -> tuple[str, int | None]:
        engine = await registry.engine_for("s")
        answer = await engine.submit(StepRequest("s", (5,), expected_position=position))
        return engine.version, answer.position

    async def until_version(version: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while registry.get().version != version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    assert await step(0) == ("10", 1)
    Repository(folder).withdraw(MODEL)
    await until_version("9")
    assert await step(1) == ("9", 2)
    (folder.parent / "building" / "11").mkdir()
    put_version(folder, "11")
    await until_version("11")
    assert await step(2) == ("11", 3)
    shutil.rmtree(folder / MODEL / "2")  # deleting an old version must not change the served version
    (folder / MODEL / "10.withdrawn").rename(folder / MODEL / "10")
    async with asyncio.timeout(TIMEOUT_S):
        while "10" not in {one.version for one in await registry.index() if one.name == MODEL}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await step(3) == ("11", 4)
    await registry.close()
