"""Tests of a full Redis with the shipped configuration. The server refuses new work, and loses no stored session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.service.live_server import BUNDLE, ROOT, TIMEOUT_S, live_server
from tests.service.sessions.stores.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.slow, pytest.mark.stack]

CONFIGURATION = (ROOT / "deploy" / "redis" / "redis.conf").read_text(encoding="utf-8")
OURS = ("appendonly", "appendfsync", "maxmemory-policy")
OPTIONS = [
    word for name in OURS for word in (f"--{name}", re.findall(rf"^{name} (.*)$", CONFIGURATION, re.MULTILINE)[0])
]
ROOM_BYTES = 2**18
TOKENS = list(range(1, 601))


class Sessions:
    """The sessions that a test creates on one server. `at` maps the name of each session to its last acknowledged
    position."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.at: dict[str, int] = {}

    def step(self, session: str, tokens: list[int]) -> httpx.Response:
        """Appends tokens. Records the new position in `at` if the server accepts the step. The step has no expected
        position, so it cannot fail with a conflict."""
        answer = self.http.post(f"/v1/sessions/{session}/tokens", json={"tokens": tokens})
        if answer.status_code == 200:
            self.at[session] = answer.json()["position"]
        return answer

    def fill(self) -> httpx.Response:
        """Creates sessions, and sends one step to each, until the server refuses a request. Returns the refusal."""
        for number in range(1000):
            answer = self.http.post("/v1/sessions", json={"session": f"s{number}"})
            if answer.status_code == 201:
                self.at[f"s{number}"] = 0
                answer = self.step(f"s{number}", TOKENS)
            if answer.status_code not in (200, 201):
                return answer
        raise AssertionError("Redis is not full after 1000 sessions")

    def found(self) -> dict[str, int]:
        """Returns the positions of the sessions, as the server reports them."""
        answers = {session: self.http.get(f"/v1/sessions/{session}") for session in self.at}
        return {session: answer.json()["position"] for session, answer in answers.items() if answer.status_code == 200}


def limit(redis: RedisServer, room_bytes: int | None) -> None:
    """Sets the memory limit of Redis to its used memory plus `room_bytes`. None removes the limit."""
    with Redis.from_url(redis.url) as client:
        used: Any = client.info("memory")
        client.config_set("maxmemory", 0 if room_bytes is None else used["used_memory"] + room_bytes)


def evicted(redis: RedisServer) -> int:
    with Redis.from_url(redis.url) as client:
        stats: Any = client.info("stats")
        return int(stats["evicted_keys"])


def is_refusal(answer: httpx.Response) -> bool:
    document = answer.json()
    return (answer.status_code, document["code"], document["retryable"]) == (429, "overloaded", True) and int(
        answer.headers["retry-after"]
    ) >= 1


def test_a_full_redis_refuses_new_work_and_loses_nothing(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, OPTIONS) as redis,
        live_server(WANE_BUNDLES=BUNDLE, WANE_STORE=redis.url) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
    ):
        sessions = Sessions(http)
        limit(redis, ROOM_BYTES)
        assert is_refusal(sessions.fill())
        assert len(sessions.at) > 20
        # Lowers the limit below the used memory, because the refusal above may have been caused by the buffers of a
        # connection to Redis, which may become smaller again.
        limit(redis, -ROOM_BYTES // 2)
        assert is_refusal(sessions.step("s0", [7]))
        assert is_refusal(http.post("/v1/sessions", json={}))
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["store"]["reachable"]) == (200, True)
        assert http.post("/v1/predict", json={"tokens": [5]}).status_code == 200
        assert sessions.found() == sessions.at

        for deleted in list(sessions.at)[10:]:  # the server must delete sessions although the store is full
            assert http.delete(f"/v1/sessions/{deleted}").status_code == 204
            del sessions.at[deleted]
        limit(redis, ROOM_BYTES)
        assert sessions.step("s0", [7]).json()["durable"] is True

        redis.kill()
        away = sessions.step("s0", [8])
        assert (away.status_code, away.json()["code"]) == (503, "unavailable")
        redis.options = (*OPTIONS, "--maxmemory", "1")
        redis.start()
        server.read_until("the session store is reachable")
        for session in ("s0", "s4"):
            assert is_refusal(sessions.step(session, [9]))
        assert sessions.found() == sessions.at

        limit(redis, None)
        for session in ("s0", "s4"):
            assert sessions.step(session, [10]).json()["durable"] is True
        assert sessions.at["s4"] == len(TOKENS) + 1
        assert sessions.at["s0"] == len(TOKENS) + 2
        assert evicted(redis) == 0
        assert server.stop() == 0
    with (
        redis_server(tmp_path, OPTIONS, redis.port),
        live_server(WANE_BUNDLES=BUNDLE, WANE_STORE=redis.url) as another,
        httpx.Client(base_url=another.url, timeout=TIMEOUT_S) as http,
    ):
        acknowledged, sessions.http = dict(sessions.at), http
        assert sessions.found() == acknowledged
