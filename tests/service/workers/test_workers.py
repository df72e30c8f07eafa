"""A server of several workers, over real sockets. Whatever worker accepts a connection, it answers like a server with
one process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

import httpx
import pytest
import websockets.sync.client as websockets
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from tests.service.live_server import BUNDLE, LiveServer, live_server, run
from tests.service.versions import put
from wane.arguments import FAILED
from wane.cli import main
from wane.service.auth.keys import digest
from wane.service.workers import supervisor
from wane.service.workers.placement import worker_of

WORKERS = 2
NAMES = [f"session-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--workers", str(WORKERS), "--bundles", BUNDLE) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[LiveServer]:
    """A server with one process."""
    with live_server("--bundles", BUNDLE) as running:
        yield running


@pytest.fixture(scope="module")
def started_again() -> Iterator[LiveServer]:
    """A server of which tests kill workers. It must end with the status 0 all the same."""
    with live_server("--workers", str(WORKERS), "--bundles", BUNDLE) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def fragile(started_again: LiveServer) -> LiveServer:
    """The server `started_again`, whose workers are all ready."""
    until_ready(started_again)
    return started_again


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with the keys `one`, which has no limits, and `few`, `slow` and `large`."""
    limits = {"one": "", "few": "sessions=5", "slow": "rate=0.01 burst=6", "large": "rate=0.01 burst=4"}
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{key}:sha256:{digest(key.encode()).hex()} {of}\n" for key, of in limits.items()))
    with live_server("--workers", str(WORKERS), "--bundles", BUNDLE, "--api-keys-file", str(keys)) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """A client that opens a connection for each request, so that both workers accept some."""
    with httpx.Client(base_url=server.url, headers={"connection": "close"}, timeout=60) as client:
        yield client


def of_worker(worker: int, prefix: str = "s") -> str:
    """Returns the id of a session of a worker."""
    return next(name for name in (f"{prefix}-{number}" for number in range(99)) if worker_of(name, WORKERS) == worker)


def until_answered(server: LiveServer) -> None:
    """Waits until the workers that are not stopped have begun the requests that were sent before: until they answer
    later ones. The kernel gives a stopped worker some of these, which have no answer."""
    for _ in range(2):
        while True:
            with suppress(httpx.TimeoutException):
                httpx.get(f"{server.url}/healthz", timeout=0.5)
                break


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what does not differ between two runs of a step."""
    return {name: value for name, value in answer.items() if name != "latency"}


def test_the_ids_of_these_tests_are_of_both_workers() -> None:
    assert {worker_of(name, WORKERS) for name in NAMES} == {0, 1}


def test_every_session_route_answers_like_a_server_with_one_process(http: httpx.Client, alone: LiveServer) -> None:
    with httpx.Client(base_url=alone.url) as single:
        for name in NAMES:
            path = f"/v1/sessions/{name}"
            calls: list[tuple[str, str, Any]] = [
                ("POST", "/v1/sessions", {"session": name, "mode": "recurrent"}),
                ("POST", f"{path}/tokens", {"tokens": [5, 6, 7], "top_k": 3}),
                ("POST", f"{path}/tokens", {"tokens": [8], "expected_position": 3}),
                ("POST", f"{path}/tokens", {"tokens": [8], "expected_position": 9}),
                *2 * (("POST", f"{path}/tokens", {"tokens": [9], "idempotency_key": "k", "cache": False}),),
                ("POST", f"{path}/tokens", {"tokens": [8], "idempotency_key": "k"}),
                ("POST", f"{path}/tokens", {"tokens": [8], "idempotency_key": ""}),
                ("POST", f"{path}/tokens", {"tokens": [8], "top_k": 0}),
                ("GET", path, None),
                ("GET", f"{path}/state", None),
                ("POST", f"{path}/rewind", {"position": 2}),
                ("POST", f"{path}/tokens", {"input": " the station"}),
                ("POST", "/v1/predict", {"session": name}),
                ("POST", "/v1/generate", {"session": name, "max_tokens": 4, "temperature": 0}),
                ("POST", "/v1/completions", {"prompt": " a", "session": name, "max_tokens": 3, "temperature": 0}),
                ("POST", "/v1/completions", {"prompt": " a", "session": "none" + name, "max_tokens": 3}),
                ("POST", f"{path}/tokens", {"tokens": [99999]}),
                ("POST", f"{path}/tokens", {"token": 1}),
                ("PUT", path, None),
                ("DELETE", path, None),
                ("GET", path, None),
            ]
            for method, at, body in calls:
                answers = [
                    client.request(method, at, json=body, headers={"x-request-id": "same"}) for client in (http, single)
                ]
                documents = [told(answer.json()) if answer.content else {} for answer in answers]
                for document in documents:
                    for key in ("id", "created", "usage", "expires_in_s", "idle_s"):
                        document.pop(key, None)
                assert answers[0].status_code == answers[1].status_code, (method, at, documents)
                assert documents[0] == documents[1], (method, at)


def test_a_session_without_an_id_is_found_by_every_worker(http: httpx.Client, alone: LiveServer) -> None:
    answers = http.post("/v1/sessions"), httpx.post(f"{alone.url}/v1/sessions")
    assert [answer.json()["code"] for answer in answers] == ["not_json"] * 2
    for body in (b"{}", b'{"session": null, "mode": "recurrent"}'):
        made = http.post("/v1/sessions", content=body, headers={"content-type": "application/json"})
        assert made.status_code == httpx.codes.CREATED, made.text
        name = made.json()["session"]
        for position in range(1, 5):
            assert http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5]}).json()["position"] == position


def test_a_session_is_forked_from_one_worker_to_another(http: httpx.Client) -> None:
    for worker in range(WORKERS):
        source = of_worker(worker, "source")
        taken = http.post(f"/v1/sessions/{source}/tokens", json={"tokens": [5, 6, 7, 8], "create": True}).json()
        for target in (of_worker(0, f"fork{worker}"), of_worker(1, f"fork{worker}"), None):
            for status in (httpx.codes.CREATED, httpx.codes.OK)[: 1 if target is None else 2]:
                forked = http.post(f"/v1/sessions/{source}/fork", json={} if target is None else {"session": target})
                assert forked.status_code == status, forked.text
                assert forked.json()["position"] == 4
            name = forked.json()["session"]
            assert forked.headers["location"] == f"/v1/sessions/{name}"
            steps = [http.post(f"/v1/sessions/{one}/tokens", json={"tokens": [9]}).json() for one in (source, name)]
            http.post(f"/v1/sessions/{source}/rewind", json={"position": 4})
            assert steps[0]["predictions"] == steps[1]["predictions"]
            again = http.post(f"/v1/sessions/{source}/fork", json={"session": name})
            assert again.status_code == httpx.codes.CONFLICT, again.text
        target = of_worker(1 - worker, "earlier")
        forked = http.post(f"/v1/sessions/{source}/fork", json={"session": target, "position": 2})
        assert forked.json()["position"] == 2
        for wrong in ({"session": target + "x", "position": 9}, {"session": "a/b"}, {"token": 1}):
            refused = http.post(f"/v1/sessions/{source}/fork", json=wrong)
            assert refused.status_code == httpx.codes.UNPROCESSABLE_ENTITY, refused.text
        assert http.post("/v1/sessions/none/fork", json={"session": target}).status_code == httpx.codes.NOT_FOUND
        assert taken["position"] == 4


def test_a_fork_takes_the_state_to_another_worker(http: httpx.Client) -> None:
    """The stored tokens do not reach back to the start, so that only the state is exact."""
    for worker in range(WORKERS):
        source, count = of_worker(worker, "long"), 10_000
        tokens = [number % 250 for number in range(count)]
        http.post(f"/v1/sessions/{source}/tokens", json={"tokens": tokens, "create": True}).raise_for_status()
        names = [source]
        for to in range(WORKERS):
            names.append(of_worker(to, f"of-long-{worker}"))
            http.post(f"/v1/sessions/{source}/fork", json={"session": names[-1]}).raise_for_status()
        steps = [http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [9]}).json() for name in names]
        assert [step["position"] for step in steps] == [count + 1] * 3
        assert [step["state"] for step in steps] == ["resident"] * 3
        assert steps[0]["predictions"] == steps[1]["predictions"] == steps[2]["predictions"]
        assert len({step["error_bound"] for step in steps}) == 1


@pytest.mark.parametrize("columns", [False, True])
def test_a_call_for_many_sessions_is_cut_and_joined(http: httpx.Client, alone: LiveServer, columns: bool) -> None:
    prefix = "c" if columns else "d"
    steps = [
        {"session": f"{prefix}{name}", "tokens": [number + 3], "create": True} for number, name in enumerate(NAMES)
    ]
    steps += [{"session": f"{prefix}{NAMES[0]}", "tokens": [4, 5]}, {"session": "unknown", "tokens": [5]}]
    steps += [{"session": "unknown", "tokens": [6]}, {"session": f"{prefix}{NAMES[3]}", "tokens": [6], "top_k": 1}]
    body: dict[str, Any] = {"steps": steps} | ({"format": "columns"} if columns else {})
    with httpx.Client(base_url=alone.url) as single:
        documents = []
        for client in (http, single):
            answer = client.post("/v1/sessions/tokens", json=body, headers={"x-request-id": "same"})
            assert answer.status_code == httpx.codes.OK, answer.text
            document = answer.json()
            document.pop("latency", None)
            documents.append([told(one) for one in document["results"]] if "results" in document else document)
    assert documents[0] == documents[1]


def test_an_invalid_call_for_many_sessions_changes_no_session(http: httpx.Client) -> None:
    names = [of_worker(0, "v"), of_worker(1, "v")]
    steps = [{"session": name, "tokens": [5], "create": True} for name in names]
    for wrong in ([*steps, {"session": names[0], "token": 5}], [*steps, *steps * 200], []):
        answer = http.post("/v1/sessions/tokens", json={"steps": wrong})
        assert answer.status_code in (httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.REQUEST_ENTITY_TOO_LARGE)
        assert [http.get(f"/v1/sessions/{name}").status_code for name in names] == [httpx.codes.NOT_FOUND] * 2


def test_nulls_and_repeated_members_put_no_step_on_another_worker(http: httpx.Client) -> None:
    names = [of_worker(0, "n"), of_worker(1, "n")]
    for position, member in enumerate(("format", "top_k", "prove", "exclude_seen"), 1):
        steps = [{"session": name, "tokens": [5], "create": True} for name in names]
        body: dict[str, Any] = {"steps": steps}
        (body if member == "format" else steps[0])[member] = None
        answer = http.post("/v1/sessions/tokens", json=body)
        assert [step["position"] for step in answer.json()["results"]] == [position] * 2, answer.text
    for name in names:
        repeated = f'{{"session": 5, "session": "{name}", "max_tokens": 1, "temperature": 0}}'
        answer = http.post("/v1/generate", content=repeated, headers={"content-type": "application/json"})
        assert answer.status_code == httpx.codes.OK, answer.text


def test_compressed_and_chunked_bodies_reach_the_session(http: httpx.Client) -> None:
    for worker in range(WORKERS):
        name = of_worker(worker, "z")
        body = json.dumps(
            {"steps": [{"session": name, "tokens": [5], "create": True}, {"session": "other", "tokens": [5]}]}
        )
        answer = http.post(
            "/v1/sessions/tokens", content=gzip.compress(body.encode()), headers={"content-encoding": "gzip"}
        )
        assert answer.json()["results"][0]["position"] == 1, answer.text

        def pieces(text: bytes = b'{"tokens": [5, 6]}') -> Iterator[bytes]:
            yield from (text[:7], text[7:])

        answer = http.post(
            f"/v1/sessions/{name}/tokens", content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.json()["position"] == 3, answer.text
        long = {"tokens": [5] * 20_000}
        answer = http.post(f"/v1/sessions/{name}/tokens", json=long)
        assert answer.json()["position"] == 20_003, answer.text


def test_a_byte_order_mark_does_not_change_the_worker(http: httpx.Client) -> None:
    mark = b"\xef\xbb\xbf"
    for name in NAMES[:4]:
        for path, body, at in (
            ("/v1/sessions", {"session": f"b{name}"}, 0),
            ("/v1/sessions/tokens", {"steps": [{"session": f"b{name}", "tokens": [5]}]}, 1),
            (f"/v1/sessions/b{name}/fork", {"session": f"f{name}"}, 1),
            ("/v1/generate", {"session": f"b{name}", "max_tokens": 1}, 1),
        ):
            answer = http.post(path, content=mark + json.dumps(body).encode())
            assert answer.is_success, answer.text
            assert http.get(f"/v1/sessions/b{name}").json()["position"] == at
        assert http.get(f"/v1/sessions/f{name}").json()["position"] == 1


def test_an_invalid_encoding_is_an_error_and_creates_no_session(http: httpx.Client) -> None:
    before = http.get("/v1/report").json()["models"][0]["sessions"]
    for path in ("/v1/sessions", "/v1/sessions/tokens", f"/v1/sessions/{NAMES[0]}/fork", "/v1/predict"):
        for encoding, status in (("gzip", 422), ("br", 415)):
            answer = http.post(path, content=b"not compressed", headers={"content-encoding": encoding})
            assert answer.status_code == status, (path, answer.text)
    assert http.get("/v1/report").json()["models"][0]["sessions"] == before


def test_a_body_that_stalls_ends_at_the_deadline(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for path in ("/v1/predict", "/v1/sessions/tokens", "/v1/sessions/s/fork"):
        with socket.create_connection((host, int(port)), timeout=15) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-request-timeout-ms: 300\r\ncontent-length: 9\r\n\r\n{{"
            client.sendall(head.encode())
            assert client.recv(100).startswith(b"HTTP/1.1 504"), path


def test_websockets_step_the_sessions_of_both_workers(server: LiveServer, http: httpx.Client) -> None:
    address = server.url.replace("http", "ws")
    for name in NAMES:
        with websockets.connect(f"{address}/v1/sessions/w{name}/stream") as socket_:
            for position in range(1, 8):
                socket_.send(json.dumps({"tokens": [position + 2], "create": True}))
                assert json.loads(socket_.recv())["position"] == position
            for _ in range(20):  # messages before the answers are read
                socket_.send('{"tokens": [5]}')
            assert [json.loads(socket_.recv())["position"] for _ in range(20)] == [*range(8, 28)]
            socket_.send('{"tokens": []}')
            assert json.loads(socket_.recv())["error"]["status"] == httpx.codes.UNPROCESSABLE_ENTITY
            socket_.send('{"rewind": 3}')
            assert json.loads(socket_.recv())["position"] == 3
        assert http.get(f"/v1/sessions/w{name}").json()["position"] == 3


def test_a_plain_step_of_another_worker_fails_counts_and_logs_like_an_own_one() -> None:
    """Each connection is new, so each worker accepts about half of the requests to each session."""
    with (
        live_server("--workers", str(WORKERS), "--bundles", BUNDLE) as running,
        httpx.Client(base_url=running.url, headers={"connection": "close"}, timeout=30) as http,
    ):
        wrong: Sequence[tuple[dict[str, Any], dict[str, str], int]] = (
            ({"tokens": [5], "expected_position": 9}, {}, 409),
            ({"tokens": [5]}, {"x-wane-position": "9"}, 409),
            ({"tokens": [99999]}, {}, 422),
            ({"tokens": [5], "expected_position": -1}, {}, 422),
            ({"tokens": [5]}, {"x-request-timeout-ms": "x"}, 422),
        )
        for name in NAMES[:4]:
            path = f"/v1/sessions/plain-{name}/tokens"
            answers = [http.post(path, json={"tokens": [5]}, headers={"x-request-id": "same"}) for _ in range(6)]
            assert {answer.status_code for answer in answers} == {httpx.codes.NOT_FOUND}
            assert len({answer.text for answer in answers}) == 1
            assert {answer.headers["content-type"] for answer in answers} == {"application/problem+json"}
            http.post("/v1/sessions", json={"session": f"plain-{name}"}).raise_for_status()
            for position in range(8):
                given = {"tokens": [5]} | ({"expected_position": position} if position % 2 else {})
                options = {0: {"x-wane-position": str(position)}, 2: {"idempotency-key": f"key-{position}"}}
                headers = {"x-request-id": f"{name}-{position}"} | options.get(position % 4, {})
                answer = http.post(path, json=given, headers=headers)
                assert answer.json()["position"] == position + 1, answer.text
                assert answer.headers["x-request-id"] == f"{name}-{position}"
            for body, headers, status in wrong:
                answers = [http.post(path, json=body, headers={"x-request-id": "same"} | headers) for _ in range(6)]
                assert {answer.status_code for answer in answers} == {status}, answers[0].text
                assert len({answer.text for answer in answers}) == 1
            assert http.get(f"/v1/sessions/plain-{name}").json()["position"] == 8
        counted = http.get("/metrics").text
        assert running.stop() == 0
    lines = [json.loads(line) for line in running.said if '"/v1/sessions/plain-' in line and '"POST"' in line]
    made = [line for line in lines if line["status"] == httpx.codes.OK]
    assert len(made) == 4 * 8
    assert {frozenset(line) for line in made} == {frozenset(made[0])}
    assert made[0].keys() >= {"model", "mode", "state", "queue_ms", "compute_ms", "batch_items", "bytes", "client"}
    assert 'route="/v1/sessions/{session}/tokens",status="200"} 32.0' in counted
    assert 'route="/v1/sessions/{session}/tokens",status="404"} 24.0' in counted
    assert 'route="/v1/sessions/{session}/tokens",status="409"} 48.0' in counted


def test_a_plain_step_whose_worker_ends_is_answered_and_may_have_been_made(fragile: LiveServer) -> None:
    name = of_worker(1, "ends")
    pid = workers_of(fragile)[1]
    with httpx.Client(base_url=fragile.url, timeout=30) as http:
        http.post("/v1/sessions", json={"session": name}).raise_for_status()
    os.kill(pid, signal.SIGSTOP)
    host, port = fragile.url.removeprefix("http://").split(":")
    head = f"POST /v1/sessions/{name}/tokens HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n"
    clients = [socket.create_connection((host, int(port)), timeout=30) for _ in range(12)]
    for client in clients:
        client.sendall(head.encode() + b'{"tokens": [5]}')
    until_answered(fragile)
    os.kill(pid, signal.SIGKILL)
    fragile.read_until("worker 1 has ended with status -9, and is started again")
    answers: list[bytes] = []
    while clients and not any(b"may have made the step" in answer for answer in answers):
        for client in select(clients, [], [], 60)[0]:  # some wait until the killed worker is back
            clients.remove(client)
            with client, suppress(ConnectionError):
                answers.append(client.recv(2000))
    told = [answer for answer in answers if b"may have made the step" in answer]
    assert told and all(answer.startswith(b"HTTP/1.1 503") for answer in told), answers
    for client in clients:
        client.close()


def test_sequences_of_the_open_inference_protocol_keep_their_worker(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    for sequence in range(1, 9):
        for position in range(1, 4):
            parameters = {"sequence_id": sequence, "sequence_start": position == 1}
            inputs = [{"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [5]}]
            answer = http.post(f"/v2/models/{model}/infer", json={"inputs": inputs, "parameters": parameters})
            assert answer.status_code == httpx.codes.OK, answer.text
        assert http.get(f"/v1/sessions/{model}:{sequence}").json()["position"] == position


def test_a_sequence_starts_from_a_sequence_of_another_worker(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]

    def infer(tokens: list[int], **parameters: Any) -> httpx.Response:
        inputs = [{"name": "tokens", "shape": [1, len(tokens)], "datatype": "INT64", "data": tokens}]
        return http.post(f"/v2/models/{model}/infer", json={"inputs": inputs, "parameters": parameters})

    def name(worker: int, prefix: str) -> str:
        return of_worker(worker, f"{model}:{prefix}").removeprefix(f"{model}:")

    for worker in range(WORKERS):
        source = name(worker, f"source{worker}")
        assert infer([5, 6, 7], sequence_id=source, sequence_start=True).is_success
        for target in (name(0, f"of{worker}"), name(1, f"of{worker}")):
            for position, left in ((3, {}), (2, {"expected_position": 2})):
                asked = {"sequence_id": target, "sequence_start": True, "fork_of": source, **left}
                forked = infer([9], **asked)
                assert forked.status_code == httpx.codes.OK, forked.text
                plain = infer([*[5, 6, 7][:position], 9])
                found, expected = (
                    {one["name"]: one["data"] for one in answer.json()["outputs"]} for answer in (forked, plain)
                )
                assert (found["position"], found["top_ids"]) == ([position + 1], expected["top_ids"])
            for wrong, message in (({"fork_of": "none"}, "'none'"), ({"expected_position": 4}, "position")):
                refused = infer([9], **(asked | wrong))
                assert (refused.status_code, message in refused.text) == (400, True), refused.text
            assert http.get(f"/v1/sessions/{model}:{target}").json()["position"] == 3


def test_a_stream_of_a_sessions_tokens_passes_through(http: httpx.Client) -> None:
    for worker in range(WORKERS):
        name = of_worker(worker, "g")
        http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5], "create": True})
        asked = {"session": name, "max_tokens": 40, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/generate", json=asked) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert len(lines) > 40


def test_a_client_that_leaves_does_not_disturb_the_others(server: LiveServer, http: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    name = of_worker(0, "left")
    body = json.dumps({"tokens": [5] * 60_000, "create": True}).encode()
    for number in range(6):
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/sessions/{name}{number}/tokens HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
    for known in NAMES:
        answer = http.post(f"/v1/sessions/after-{known}/tokens", json={"tokens": [5], "create": True})
        assert answer.json()["position"] == 1


def test_web_sockets_of_a_killed_worker_are_closed(fragile: LiveServer) -> None:
    """Those that another worker accepted get the code 1012, those of the killed worker itself end without a code."""
    count = 16

    async def code_of(url: str, opened: asyncio.Event, patience_s: float) -> int | None:
        """Returns the code with which a WebSocket ends, or None if it is open `patience_s` after its first answer."""
        async with connect(url, open_timeout=60) as client:
            try:
                await client.send('{"tokens": [5]}')
                await asyncio.wait_for(client.recv(), 60)
                opened.set()
                await asyncio.wait_for(client.wait_closed(), patience_s)
            except ConnectionClosed:
                pass
            except TimeoutError:
                return None
            return client.close_code

    async def killed(server: LiveServer, process: int) -> tuple[set[int | None], set[int | None]]:
        url = f"{server.url.replace('http:', 'ws:')}/v1/sessions/{of_worker(1)}/stream"
        opened = [asyncio.Event() for _ in range(count)]
        early = [asyncio.create_task(code_of(url, one, 60)) for one in opened]
        await asyncio.gather(*(one.wait() for one in opened))
        os.kill(process, signal.SIGSTOP)  # later handshakes wait for it
        late = [asyncio.create_task(code_of(url, asyncio.Event(), 0.1)) for _ in range(count)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(until_answered, server)
        os.kill(process, signal.SIGKILL)
        return set(await asyncio.gather(*early)), set(await asyncio.gather(*late))

    httpx.post(f"{fragile.url}/v1/sessions", json={"session": of_worker(1)}).raise_for_status()
    early, late = asyncio.run(killed(fragile, workers_of(fragile)[1]))
    assert early == {CloseCode.SERVICE_RESTART, CloseCode.ABNORMAL_CLOSURE}
    assert CloseCode.SERVICE_RESTART in late


def test_reports_and_metrics_are_of_all_workers(alone: LiveServer) -> None:
    del alone
    with (
        live_server("--workers", str(WORKERS), "--bundles", BUNDLE) as running,
        httpx.Client(base_url=running.url, headers={"connection": "close"}) as http,
    ):
        for name in NAMES:
            for _ in range(3):
                http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5], "create": True}).raise_for_status()
        steps = [{"session": name, "tokens": [5]} for name in NAMES]
        http.post("/v1/sessions/tokens", json={"steps": steps}).raise_for_status()
        made = 4 * len(NAMES)
        for _ in range(4):
            model = http.get("/v1/report").json()["models"][0]
            assert model["operations"]["step"] == made
            assert model["sessions"]["resident"] == len(NAMES)
            assert model["costs"]
            for accept in ("", "application/openmetrics-text; version=1.0.0"):
                text = http.get("/metrics", headers={"accept": accept}).text
                found = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in text.splitlines()}
                assert float(found["wane_ready"]) == 1
                assert sum(float(n) for key, n in found.items() if key.startswith("wane_answers_total")) == made
                steps_counted = (
                    'wane_http_requests_total{method="POST",route="/v1/sessions/{session}/tokens",status="200"}'
                )
                assert float(found[steps_counted]) == 3 * len(NAMES)
                assert sum(float(n) for key, n in found.items() if "/v1/sessions/tokens" in key and "total" in key) == 1


def test_a_model_is_loaded_and_unloaded_in_all_workers(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    http.post(f"/v2/repository/models/{model}/unload").raise_for_status()
    assert {http.post("/v1/predict", json={"tokens": [5]}).status_code for _ in range(8)} == {httpx.codes.NOT_FOUND}
    http.post(f"/v2/repository/models/{model}/load").raise_for_status()
    assert {http.post("/v1/predict", json={"tokens": [5]}).status_code for _ in range(8)} == {httpx.codes.OK}


def test_the_limits_of_a_key_hold_for_all_workers_together(keyed: LiveServer) -> None:
    with httpx.Client(base_url=keyed.url) as http:

        def asked(key: str, body: dict[str, Any]) -> int:
            headers = {"authorization": f"Bearer {key}", "connection": "close"}
            return http.post("/v1/sessions", json=body, headers=headers).status_code

        made = [asked("few", {}) for _ in range(9)]
        assert made == [httpx.codes.CREATED] * 5 + [httpx.codes.TOO_MANY_REQUESTS] * 4
        made = [asked("slow", {}) for _ in range(9)]
        assert made == [httpx.codes.CREATED] * 6 + [httpx.codes.TOO_MANY_REQUESTS] * 3
        steps = [{"session": name, "tokens": [5], "create": True} for name in NAMES]
        for key, status in (("large", 200), ("large", 429), ("wrong", 401)):
            headers = {"authorization": f"Bearer {key}"}
            answer = http.post("/v1/sessions/tokens", json={"steps": steps}, headers=headers)
            assert answer.status_code == status
            if status == httpx.codes.OK:  # the whole call is charged once, and leaves the bucket with a debt
                assert all("error" not in one for one in answer.json()["results"])
            else:
                assert answer.headers["content-type"] == "application/problem+json"
                assert {"retry-after", "www-authenticate"} & set(answer.headers)
        host, port = keyed.url.removeprefix("http://").split(":")
        for path in ("/v1/predict", "/v1/sessions/tokens", "/v1/sessions/s0/tokens", "/v1/sessions/s1/tokens"):
            with socket.create_connection((host, int(port)), timeout=15) as client:
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
                client.sendall(head.encode())
                assert client.recv(100).startswith(b"HTTP/1.1 401"), path


def test_sessions_in_a_file_are_found_with_any_number_of_workers(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    position = 0
    for workers in (2, 3, 1, 2):
        options = () if workers == 1 else ("--workers", str(workers))
        with live_server(*options, "--bundles", BUNDLE, "--session-file", str(file)) as running:
            position += 1
            with httpx.Client(base_url=running.url, headers={"connection": "close"}) as http:
                for name in NAMES:
                    body = {"tokens": [5], "create": position == 1}
                    answer = http.post(f"/v1/sessions/{name}/tokens", json=body)
                    assert answer.status_code == httpx.codes.OK, (workers, answer.text)
                    assert answer.json()["position"] == position
            assert running.stop() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) in (["sessions"], ["sessions", "sessions.read"])


def workers_of(server: LiveServer) -> list[int]:
    """Returns the process ids of a server's workers, by number."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    numbers = {
        int(Path(f"/proc/{pid}/cmdline").read_bytes().split(b'"number":')[1].split(b",")[0]): int(pid)
        for pid in children
    }
    return [numbers[number] for number in range(WORKERS)]


def kill(server: LiveServer, worker: int) -> None:
    """Kills a worker, and waits until it has started again."""
    before = workers_of(server)[worker]
    os.kill(before, signal.SIGKILL)
    until_ready(server, lambda workers: workers[worker] != before)


def until_ready(server: LiveServer, wanted: Callable[[list[int]], bool] = lambda _: True) -> None:
    """Waits until all workers are ready, and their process ids are as wanted."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError, IndexError, KeyError):
            if wanted(workers_of(server)) and httpx.get(f"{server.url}/readyz", timeout=30).is_success:
                return
        time.sleep(0.1)
    pytest.fail("a worker was not started again")


def counts(http: httpx.Client) -> dict[str, float]:
    """Returns the server's counters and the counts of its histograms."""
    lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line.startswith("wane_")]
    return {name: float(value) for name, _, value in lines if re.search("_(?:total|bucket|count|sum)(?:{|$)", name)}


def test_counters_do_not_fall_when_a_worker_is_killed(fragile: LiveServer) -> None:
    def answers(found: dict[str, float]) -> float:
        return sum(value for name, value in found.items() if name.startswith("wane_answers_total"))

    with httpx.Client(base_url=fragile.url, headers={"connection": "close"}, timeout=30) as http:
        body = {"steps": [{"session": name, "tokens": [5], "create": True} for name in NAMES]}
        first = counts(http)
        for killed in (0, 1, 1):
            http.post("/v1/sessions/tokens", json=body).raise_for_status()
            before = counts(http)
            kill(fragile, killed)
            after = counts(http)
            fallen = {name: (value, after.get(name)) for name, value in before.items() if after.get(name, 0) < value}
            assert not fallen
        assert answers(after) - answers(first) == 3 * len(NAMES)


def test_a_killed_worker_is_started_again_and_the_other_keeps_its_sessions(fragile: LiveServer) -> None:
    with httpx.Client(base_url=fragile.url, headers={"connection": "close"}, timeout=30) as http:
        names = [of_worker(worker, "k") for worker in range(WORKERS)]
        for name in names:
            http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5], "create": True}).raise_for_status()
        os.kill(workers_of(fragile)[1], signal.SIGKILL)
        deadline, seen = time.monotonic() + 60, set[int]()
        while httpx.codes.NOT_FOUND not in seen and time.monotonic() < deadline:
            try:
                seen.add(http.post(f"/v1/sessions/{names[1]}/tokens", json={"tokens": [5]}).status_code)
            except httpx.TransportError:  # the killed worker had accepted the connection
                continue
        assert seen <= {httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE}
        assert httpx.codes.NOT_FOUND in seen
        answer = http.post(f"/v1/sessions/{names[0]}/tokens", json={"tokens": [5]})
        assert answer.json()["position"] == 2
        assert (
            http.post(f"/v1/sessions/{names[1]}/tokens", json={"tokens": [5], "create": True}).json()["position"] == 1
        )


def test_a_worker_that_starts_again_serves_the_models_that_the_others_serve(tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    folder.mkdir()
    for name in ("one", "other"):
        put(folder, "1", name=name)
    with live_server("--workers", str(WORKERS), "--bundles", str(folder)) as running:
        with httpx.Client(base_url=running.url, headers={"connection": "close"}, timeout=30) as http:

            def served() -> set[tuple[str, ...]]:
                answers = [http.get("/v1/models") for _ in range(24)]  # of both workers, by chance
                return {tuple(sorted(model["id"] for model in answer.json()["data"])) for answer in answers}

            http.post("/v2/repository/models/other/unload").raise_for_status()
            kill(running, 1)
            assert served() == {("one",)}
            http.post("/v2/repository/models/one/unload").raise_for_status()
            kill(running, 1)
            assert served() == {()}
            for name in ("one", "other"):
                http.post(f"/v2/repository/models/{name}/load").raise_for_status()
            kill(running, 1)
            assert served() == {("one", "other")}
        assert running.stop() == 0


def test_a_worker_that_cannot_start_again_is_tried_again_and_the_other_serves(tmp_path: Path) -> None:
    bundle, aside = tmp_path / "rnn-stable", tmp_path / "aside"
    shutil.copytree(BUNDLE, bundle)
    with live_server("--workers", str(WORKERS), "--bundles", str(bundle)) as running:
        name = of_worker(0, "stays")
        with httpx.Client(base_url=running.url, headers={"connection": "close"}, timeout=30) as http:
            http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5], "create": True}).raise_for_status()
            bundle.rename(aside)
            os.kill(workers_of(running)[1], signal.SIGKILL)
            failed = f"worker 1 has ended with status {FAILED}, and is started again"
            for _ in range(2):
                running.read_until(failed)
                for _ in range(12):  # no connection waits for the worker that cannot start
                    answer = http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5]})
                    assert answer.status_code == httpx.codes.OK, answer.text
            aside.rename(bundle)
            until_ready(running)
            assert http.post(f"/v1/sessions/{name}/tokens", json={"tokens": [5]}).json()["position"] == 26
        assert running.stop() == 0


def test_a_hang_up_reloads_the_keys_also_while_a_worker_starts(keyed: LiveServer) -> None:
    before = workers_of(keyed)
    os.kill(before[1], signal.SIGKILL)
    for _ in range(20):
        keyed.process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    until_ready(keyed)
    assert workers_of(keyed)[0] == before[0]
    assert keyed.stop() == 0


async def waiting(http: httpx.AsyncClient) -> bool:
    """Returns whether a step waits in the queue of a worker."""
    lines = (await http.get("/metrics")).text.splitlines()
    return any(line.startswith("wane_queue_items{") and not line.endswith(" 0.0") for line in lines)


async def test_a_drain_finishes_the_steps_in_flight() -> None:
    with live_server("--workers", str(WORKERS), "--bundles", BUNDLE) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:

            async def step(name: str) -> int:
                body = {"tokens": [5] * 30_000, "create": True}
                return (await http.post(f"/v1/sessions/drain-{name}/tokens", json=body)).status_code

            steps = [asyncio.create_task(step(name)) for name in NAMES[:6]]
            while not any(one.done() for one in steps) and not await waiting(http):
                pass
            running.process.send_signal(signal.SIGTERM)
            statuses = await asyncio.gather(*steps)
        assert set(statuses) <= {httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE}
        assert httpx.codes.OK in statuses
        assert await asyncio.to_thread(running.process.wait, 30) == 0


def test_a_busy_port_and_a_wrong_number_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "run", lambda *_: pytest.fail("the workers were started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused: Sequence[tuple[Sequence[str], str]] = (
            (("--workers", "2", "--port", str(taken.getsockname()[1])), "cannot listen on"),
            (("--workers", "0"), "--workers"),
            (("--workers", "many"), "--workers"),
        )
        for options, said in refused:
            assert main(["serve", *options]) == FAILED
            assert said in capsys.readouterr().err


def test_workers_that_cannot_start_end_the_server(tmp_path: Path) -> None:
    ended = run("serve", "--workers", "2", "--port", "0", "--bundles", str(tmp_path))
    assert ended.returncode == FAILED
    assert ended.stderr.count("error: ") == 1
    assert str(tmp_path) in ended.stderr
