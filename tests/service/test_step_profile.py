"""Tests through how many files and calls of the service a warm step of one token passes, from the bytes of the request
to those of the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.service.engine_harness import MakeHarness, name_vocabulary
from tests.service.entrances import entered
from tests.service.sessions.stores.redis_server import RedisServer, redis_server
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.factory import make_store
from wane.service.settings import Settings

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filter": {"exclude_seen": True},
    "position": {},
}
MOST = {
    ("memory", "plain"): (27, 110),
    ("memory", "filter"): (31, 159),
    ("memory", "position"): (29, 131),
    ("redis", "plain"): (34, 196),
    ("redis", "filter"): (38, 240),
    ("redis", "position"): (36, 217),
}
"""The largest numbers of files and calls of a step, by its session's store and what it asks. Lower them when a step
gets shorter. The aim is 20 files and 120 calls for all of them."""
SERVICE = Path(__file__).parents[2] / "service"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), ("--appendonly", "no")) as server:
        yield server


class Profile:
    """Counts the calls of the service's functions in this thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __enter__(self) -> Profile:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (SERVICE in path.parents or "wane/service/" in path.as_posix()):
            self.calls.append((path.as_posix().rpartition("service/")[2], frame.f_code.co_name))


@pytest.mark.parametrize(("kind", "option"), MOST)
async def test_a_warm_step_passes_few_files_and_calls(
    kind: str, option: str, make_harness: MakeHarness, request: pytest.FixtureRequest
) -> None:
    address = "memory" if kind == "memory" else request.getfixturevalue("redis").url
    store = make_store(Settings(store=address, store_namespace=f"t{id(request.node)}"), 16, Metrics())
    await store.open()
    vocabulary = name_vocabulary(names=[f"e{index}" for index in range(24)])
    harness = make_harness(store=store, vocabulary=vocabulary, inline_batch_max_us=1_000_000)
    async with entered("http", harness) as entrance:
        for position, token in enumerate((6, 7, 8), 1):
            asks = {"expected_position": position} if option == "position" else OPTIONS[option]
            await entrance.step("a", tokens=[token], **asks)
        found: list[list[tuple[str, str]]] = []
        for position in range(4, 8):
            asks = {"expected_position": position} if option == "position" else OPTIONS[option]
            with Profile() as profile:
                answer = await entrance.step("a", tokens=[9], **asks)
            assert answer["position"] == position + 1
            found.append(profile.calls)
    await store.close()
    calls = min(found, key=len)  # a timer, or an answer that arrives in two packets, adds calls to some steps
    files = {file for file, _ in calls}
    most_files, most_calls = MOST[kind, option]
    assert len(files) <= most_files, sorted(files)
    assert len(calls) <= most_calls, calls
