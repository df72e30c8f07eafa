"""Tests of sessions while the replicas that serve them are killed with SIGKILL, one every second. The clients, the
replicas and Redis are real processes and threads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.alike import Both
from tests.client.test_session import first
from tests.service.live_server import BUNDLE, ROOT, TIMEOUT_S, LiveServer, environment
from tests.service.sessions.stores.redis_server import free_port, redis_server
from wane.client import Answer

pytestmark = [pytest.mark.slow, pytest.mark.stack]

VOCABULARY = 2048
KILLS = 6
SESSIONS = 4
PAUSE_S = 0.25
REMEMBERED = 24


class Replica:
    """A server at its own port, which can be killed and started again."""

    def __init__(self, **settings: str) -> None:
        self.port, self.settings = free_port(), settings
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: LiveServer | None = None

    def start(self) -> None:
        """Starts the server. Does not wait until it is ready."""
        command = [sys.executable, "-m", "wane", "serve", "--port", str(self.port), "--bundles", BUNDLE]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**self.settings), stderr=subprocess.PIPE, text=True
        )
        self.server = LiveServer(process)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the process has ended."""
        if self.server is not None:
            self.server.kill()


@contextmanager
def three(**settings: str) -> Iterator[list[Replica]]:
    """Runs three replicas. Yields when all are ready."""
    replicas = [Replica(**settings) for _ in range(3)]
    try:
        for replica in replicas:
            replica.start()
        while not all(replica.is_ready() for replica in replicas):
            time.sleep(0.1)
        yield replicas
    finally:
        for replica in replicas:
            replica.kill()


def storm(replicas: Sequence[Replica], over: Event, working: Sequence[Future[Any]], steps: Sequence[Steps]) -> None:
    """Kills a replica every second, and starts it again. One of the others is always ready. Sets `over` after KILLS
    kills, or later, when each session has twice REMEMBERED tokens, and one that has forgotten tokens has a bound."""
    random, killed = Random(0), 0
    while not (killed >= KILLS and is_enough(steps)) and not any(one.done() for one in working):
        time.sleep(1)
        ready = [replica for replica in replicas if replica.is_ready()]
        if len(ready) > 1:
            victim = random.choice(ready)
            victim.kill()
            victim.start()
            killed += 1
    over.set()


def is_enough(steps: Sequence[Steps]) -> bool:
    forgets = any("remember" in one.options for one in steps)
    bounds = [one.bound or 0 for each in steps for one in each.answers]
    has_bound = any(0 < bound < 1 for bound in bounds)
    return all(len(one.tokens) >= 2 * REMEMBERED for one in steps) and (has_bound or not forgets)


class Kept(NamedTuple):
    """What a test compares of an answer. Hundreds of answers that list all tokens would need much memory."""

    position: int | None
    bound: float | None
    first: tuple[int, float]
    probabilities: NDArray[np.float64]
    """By token id. NaN if the answer does not list the token."""

    @classmethod
    def of(cls, answer: Answer) -> Kept:
        probabilities = np.full(VOCABULARY, np.nan)
        probabilities[[one.token_id for one in answer.predictions]] = [one.probability for one in answer.predictions]
        return cls(answer.position, answer.error_bound, first(answer), probabilities)


class Steps:
    """The steps of one session, and their answers."""

    def __init__(self, asynchronous: bool, streamed: bool, number: int, **options: Any) -> None:
        self.asynchronous, self.streamed, self.number, self.options = asynchronous, streamed, number, options
        self.tokens: list[int] = []
        self.answers: list[Kept] = []
        self.rebuilds = 0

    def run(self, addresses: Sequence[str], over: Event, **ranked: Any) -> None:
        """Appends one random token after the other until `over`, and a few more."""
        random = Random(self.number)
        with Both(self.asynchronous) as make:
            client = make(addresses, deadline_s=TIMEOUT_S)
            session = client.session(f"storm-{self.number}", **self.options)
            with session.stream() if self.streamed else nullcontext():
                after = 0
                while after < 3:
                    after += over.is_set()
                    self.tokens.append(random.randrange(5, VOCABULARY))
                    self.answers.append(Kept.of(session.append(self.tokens[-1], **ranked)))
                    time.sleep(PAUSE_S)
            self.rebuilds = session.rebuilds


def run_all(replicas: Sequence[Replica], top_k: int, **options: Any) -> list[Steps]:
    """Steps four sessions during a storm: with both kinds of client, by requests and over WebSockets."""
    steps = [Steps(bool(number % 2), number > 1, number, **options) for number in range(SESSIONS)]
    ranked = {"top_k": top_k, "include_unknown": True}
    over, addresses = Event(), [replica.url for replica in replicas]
    with ThreadPoolExecutor(SESSIONS) as threads:
        working = [threads.submit(one.run, addresses, over, **ranked) for one in steps]
        storm(replicas, over, working, steps)
        for one in working:
            one.result()
    return steps


def whole_answers(url: str, tokens: Sequence[int], top_k: int) -> list[Kept]:
    """Returns the answers of the model after each token of a sequence that was never interrupted."""
    with Both(asynchronous=False) as make:
        client = make(url, deadline_s=TIMEOUT_S)
        options = {"mode": "recurrent", "top_k": top_k, "include_unknown": True}
        return [Kept.of(client.predict(tokens[:end], **options)) for end in range(1, len(tokens) + 1)]


def test_with_redis_no_step_is_lost_and_none_is_made_twice(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "redis") as redis,
        three(WANE_STORE=redis.url, WANE_STORE_TIMEOUT_MS="10000") as replicas,
    ):
        for one in run_all(replicas, top_k=5):
            assert len(one.tokens) > KILLS
            assert [answer.position for answer in one.answers] == list(range(1, len(one.tokens) + 1))
            assert one.rebuilds == 0
            (url, *_) = [replica.url for replica in replicas if replica.is_ready()]
            position = httpx.get(f"{url}/v1/sessions/storm-{one.number}", timeout=TIMEOUT_S).json()["position"]
            assert position == len(one.tokens)
            for answer, whole in zip(one.answers, whole_answers(url, one.tokens, top_k=5), strict=True):
                assert answer.first == whole.first


def test_with_stores_of_their_own_answers_are_within_the_bounds_that_they_name(tmp_path: Path) -> None:
    with three(WANE_TOP_K_LIMIT=str(VOCABULARY)) as replicas:
        bounds: list[float] = []
        for one in run_all(replicas, top_k=VOCABULARY, remember=REMEMBERED):
            assert [answer.position for answer in one.answers] == list(range(1, len(one.tokens) + 1))
            assert one.rebuilds > 0
            (url, *_) = [replica.url for replica in replicas if replica.is_ready()]
            for answer, whole in zip(one.answers, whole_answers(url, one.tokens, VOCABULARY), strict=True):
                assert answer.bound is not None
                assert np.array_equal(np.isnan(answer.probabilities), np.isnan(whole.probabilities))
                total_variation = np.nansum(np.abs(answer.probabilities - whole.probabilities)) / 2
                assert total_variation <= answer.bound + 1e-5
                bounds.append(answer.bound)
        assert 0 in bounds and any(0 < bound < 1 for bound in bounds)
