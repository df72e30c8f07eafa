"""Tests of a server whose Redis stops and starts again. The server and Redis are real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.service.live_server import BUNDLE, TIMEOUT_S, LiveServer, live_server
from tests.service.problems import assert_members, assert_problem
from tests.service.sessions.stores.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.slow, pytest.mark.stack]

MODEL = Path(BUNDLE).name
CLIENTS = 4
STEPS_BETWEEN = 150
RETRYABLE = {429, 502, 503, 504}

Document = dict[str, Any]


@dataclass
class Shared:
    """A server, its Redis, and a client of the server."""

    redis: RedisServer
    server: LiveServer
    http: httpx.Client

    def begin(self, *sessions: str) -> None:
        """Creates sessions and appends one token to each, so that the server has them in memory."""
        for session in sessions:
            assert self.http.post("/v1/sessions", json={"session": session}).status_code == 201
            answer = self.http.post(f"/v1/sessions/{session}/tokens", json={"tokens": [5]})
            assert (answer.status_code, answer.json()["durable"]) == (200, True)

    def stop_redis(self) -> None:
        """Stops Redis, and waits until the server has noticed it."""
        self.redis.stop()
        assert_away(self.http.get("/v1/sessions/nobody"))

    def start_redis(self) -> None:
        """Starts Redis, and waits until the server uses it again."""
        self.redis.start()
        self.server.read_until("the session store is reachable")

    def position(self, session: str) -> int:
        answer = self.http.get(f"/v1/sessions/{session}")
        assert answer.status_code == 200, answer.text
        return int(answer.json()["position"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with (
        redis_server(tmp_path_factory.mktemp("redis")) as redis,
        live_server(WANE_BUNDLES=BUNDLE, WANE_STORE=redis.url) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
    ):
        yield Shared(redis, server, http)


def assert_away(response: httpx.Response) -> None:
    document = assert_problem(response, 503, "unavailable")
    assert int(response.headers["retry-after"]) == document["retry_after_s"] >= 1


def assert_away_item(document: Document) -> None:
    """Checks an error in a message or an item of a batch, which has no headers."""
    assert_members(document, 503, "unavailable")
    assert document["retry_after_s"] >= 1


def of_native(shared: Shared) -> None:
    path = "/v1/sessions/native"
    for answer in (
        shared.http.post(f"{path}/tokens", json={"tokens": [6]}),
        shared.http.post(f"{path}/tokens", json={"tokens": [6, 7, 8]}),
        shared.http.post(f"{path}/tokens", json={"tokens": [6], "top_k": 3, "prove": True}),
        shared.http.post("/v1/sessions/new/tokens", json={"tokens": [6], "create": True}),
        shared.http.post("/v1/sessions", json={"session": "new"}),
        shared.http.post(f"{path}/rewind", json={"position": 0}),
        shared.http.get(path),
        shared.http.delete(path),
        shared.http.post("/v1/predict", json={"session": "native"}),
    ):
        assert_away(answer)


def of_many_steps(shared: Shared) -> None:
    steps = [{"session": name, "tokens": [6]} for name in ("rows", "columns")]
    rows = shared.http.post("/v1/sessions/tokens", json={"steps": steps})
    assert rows.status_code == 200
    for result in rows.json()["results"]:
        assert_away_item(result["error"])


def of_columns(shared: Shared) -> None:
    steps = [{"session": name, "tokens": [6]} for name in ("rows", "columns")]
    columns = shared.http.post("/v1/sessions/tokens", json={"steps": steps, "format": "columns"})
    assert columns.status_code == 200
    for document in columns.json()["error"]:
        assert_away_item(document)


def of_openai(shared: Shared) -> None:
    body = {"model": MODEL, "prompt": [6], "max_tokens": 1, "session": "openai", "expected_position": 1}
    for stream in (False, True):
        answer = shared.http.post("/v1/completions", json={**body, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert answer.json()["error"]["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) >= 1


def of_open_inference_protocol(shared: Shared) -> None:
    tensor = {"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [6]}
    for parameters in ({"sequence_id": "inference"}, {"sequence_id": "another", "sequence_start": True}):
        answer = shared.http.post(f"/v2/models/{MODEL}/infer", json={"inputs": [tensor], "parameters": parameters})
        document = answer.json()
        assert (answer.status_code, document["code"], document["retryable"]) == (503, "unavailable", True)
        assert int(answer.headers["retry-after"]) == document["retry_after_s"] >= 1
    ready = shared.http.get("/v2/health/ready")
    assert (ready.status_code, ready.json()["code"]) == (503, "unavailable")


PROTOCOLS: tuple[Callable[[Shared], None], ...] = (
    of_native,
    of_many_steps,
    of_columns,
    of_openai,
    of_open_inference_protocol,
)


def test_each_protocol_refuses_sessions_while_redis_is_away_and_recovers_by_itself(shared: Shared) -> None:
    sessions = ("native", "rows", "columns", "openai", "socket", f"{MODEL}:inference")
    shared.begin(*sessions)
    address = f"{shared.server.url.replace('http', 'ws')}/v1/sessions/socket/stream"
    with connect(address) as before:
        before.send('{"tokens": [6]}')
        assert json.loads(before.recv())["position"] == 2
        shared.stop_redis()
        before.send('{"tokens": [7]}')
        assert_away_item(json.loads(before.recv())["error"])
        with pytest.raises(ConnectionClosed) as closed:
            before.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    for of_protocol in PROTOCOLS:
        of_protocol(shared)

    ready = shared.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "store_unavailable")
    assert ready.json()["store"] == {"kind": "redis", "reachable": False}
    assert shared.http.get("/healthz").status_code == 200

    shared.start_redis()
    assert shared.http.get("/readyz").status_code == 200
    # No refused step was applied.
    assert {session: shared.position(session) for session in sessions} == {**dict.fromkeys(sessions, 1), "socket": 2}
    for session in sessions:
        answer = shared.http.post(f"/v1/sessions/{session}/tokens", json={"tokens": [7]}).json()
        assert (answer["durable"], answer["state"]) == (True, "resident")
    assert shared.http.get("/v1/sessions/new").status_code == 404
    with connect(address) as after:
        after.send('{"tokens": [8]}')
        assert json.loads(after.recv())["position"] == 4


def test_requests_without_a_session_are_answered_while_redis_is_away(shared: Shared) -> None:
    requests: list[tuple[str, Document]] = [
        ("/v1/predict", {"tokens": [5, 6]}),
        ("/v1/score", {"tokens": [5, 6]}),
        ("/v1/generate", {"tokens": [5, 6], "max_tokens": 2, "seed": 1}),
        ("/v1/completions", {"model": MODEL, "prompt": [5, 6], "max_tokens": 1, "seed": 1}),
        (
            f"/v2/models/{MODEL}/infer",
            {"inputs": [{"name": "tokens", "shape": [1, 2], "datatype": "INT64", "data": [5, 6]}]},
        ),
    ]
    shared.stop_redis()
    for path, body in requests:
        answer = shared.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    assert shared.http.get("/v1/report").status_code == 200
    assert "wane_store_up 0.0" in shared.http.get("/metrics").text
    shared.start_redis()
    assert "wane_store_up 1.0" in shared.http.get("/metrics").text


@dataclass
class Client:
    """The only client of a session. It names the position of each step, and sends a step again until it is applied."""

    http: httpx.Client
    session: str
    tokens: list[int] = field(default_factory=list)
    refused: int = 0
    replayed: int = 0

    def run_to(self, end: int) -> None:
        """Steps until the session has `end` tokens."""
        for position in range(len(self.tokens), end):
            token = 2 + (37 * position) % 150
            body = {"tokens": [token], "expected_position": position}
            while True:
                answer = self.http.post(f"/v1/sessions/{self.session}/tokens", json=body)
                if answer.status_code not in RETRYABLE:
                    break
                self.refused += 1
                assert_away(answer)
            assert answer.status_code == 200, answer.text
            assert answer.json()["position"] == position + 1
            self.replayed += answer.json()["replayed"]
            self.tokens.append(token)


def until(running: Sequence[Future[None]], clients: Sequence[Client], condition: Callable[[Client], bool]) -> None:
    """Waits until the condition holds for each client whose task has not ended."""
    while not all(task.done() or condition(client) for task, client in zip(running, clients, strict=True)):
        time.sleep(0.005)


def test_clients_that_retry_lose_and_repeat_no_step(shared: Shared) -> None:
    clients = [Client(shared.http, f"client-{number}") for number in range(CLIENTS)]
    for client in clients:
        assert shared.http.post("/v1/sessions", json={"session": client.session}).status_code == 201
    with ThreadPoolExecutor(CLIENTS) as pool:
        for end in (STEPS_BETWEEN, 2 * STEPS_BETWEEN):
            running = [pool.submit(client.run_to, end) for client in clients]
            until(running, clients, lambda client: len(client.tokens) % STEPS_BETWEEN > 5)
            shared.redis.stop()
            for client in clients:
                client.refused = 0
            until(running, clients, lambda client: client.refused > 0)
            shared.start_redis()
            for task in running:
                task.result(TIMEOUT_S)
            assert any(client.refused for client in clients)
    for client in clients:
        assert shared.position(client.session) == len(client.tokens) == 2 * STEPS_BETWEEN
        # A session with other tokens would give other probabilities.
        continued = shared.http.post("/v1/predict", json={"session": client.session}).json()
        whole = shared.http.post("/v1/predict", json={"tokens": client.tokens, "mode": "recurrent"}).json()
        assert continued["predictions"] == whole["predictions"]
