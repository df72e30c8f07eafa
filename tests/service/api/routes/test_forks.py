"""Tests of forks over a real socket."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.engine_harness import EngineHarness
from tests.service.problems import assert_problem
from tests.service.server_harness import served

KEYS = {name: f"{name}-0123456789abcdefgh" for name in ("alice", "bob")}
FORK = "/v1/sessions/a/fork"


def predicted(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return list(response.json()["predictions"])


async def test_a_fork_is_created_once_and_then_steps_on_its_own(harness: EngineHarness) -> None:
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as client:
        harness.runner.calls.clear()
        created = await client.post(FORK, json={"session": "d e"})
        assert (created.status_code, created.headers["location"]) == (201, "/v1/sessions/d%20e")
        assert harness.runner.calls == []
        document = created.json()
        assert (document["session"], document["position"], document["state"]) == ("d e", 1, "resident")
        again = await client.post(FORK, json={"session": "d e"})
        assert (again.status_code, again.json() | {"idle_s": 0.0}) == (200, document | {"idle_s": 0.0})
        first = predicted(await client.post("/v1/sessions/d%20e/tokens", json={"tokens": [7]}))
        assert first == predicted(await client.post("/v1/sessions/a/tokens", json={"tokens": [7]}))
        taken = assert_problem(await client.post(FORK, json={"session": "d e"}), 409, "session_exists")
        assert "'d e'" in taken["detail"]
        assert (await client.get("/v1/sessions/d%20e")).json()["position"] == 2


async def test_a_fork_without_an_id_gets_a_new_one_each_time(harness: EngineHarness) -> None:
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as client:
        created = [await client.post(FORK, json={"position": 0}) for _ in range(2)]
        assert [one.status_code for one in created] == [201, 201]
        one, other = (response.json()["session"] for response in created)
        assert one != other
        assert (await client.get(f"/v1/sessions/{one}")).json()["position"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "field"),
    [
        (FORK, {"position": 2}, 422, "invalid_request", "position"),
        (FORK, {"position": -1}, 422, "invalid_request", "position"),
        (FORK, {"position": "1"}, 422, "invalid_request", "position"),
        (FORK, {"session": "x/y"}, 422, "invalid_request", "session"),
        (FORK, {"name": "x"}, 422, "invalid_request", "name"),
        ("/v1/sessions/none/fork", {"session": "d"}, 404, "unknown_session", None),
    ],
)
async def test_faults_name_their_field(
    harness: EngineHarness, path: str, body: dict[str, Any], status: int, code: str, field: str | None
) -> None:
    async with served(harness) as server, httpx.AsyncClient(base_url=server.url) as client:
        document = assert_problem(await client.post(path, json=body), status, code)
        assert document.get("field") == field
        assert (await client.get("/v1/sessions/d")).status_code == 404


async def test_a_fork_counts_in_the_quota_of_its_owner_and_owners_never_meet(
    harness: EngineHarness, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    lines = [f"{name}:sha256:{sha256(key.encode()).hexdigest()} sessions=2" for name, key in KEYS.items()]
    file.write_text("\n".join([*lines, ""]))
    file.chmod(0o600)
    async with served(harness, api_keys_file=file) as server:
        alice, bob = (
            httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEYS[name]}"}) for name in KEYS
        )
        async with alice, bob:
            await alice.post("/v1/sessions", json={"session": "s"})
            mine = await alice.post("/v1/sessions/s/tokens", json={"tokens": [7]})
            for session in ("s", "alice/s", "alice%2Fs", "a"):  # "a" belongs to no key
                refused = await bob.post(f"/v1/sessions/{session}/fork", json={"session": "t"})
                assert refused.status_code in (404, 422), session
            assert (await alice.post("/v1/sessions/s/fork", json={"session": "t"})).status_code == 201
            assert_problem(await alice.post("/v1/sessions/s/fork", json={"session": "u"}), 429, "quota_exceeded")
            assert (await alice.post("/v1/sessions/s/fork", json={"session": "t"})).status_code == 200
            # Bob's fork of his own session has the id of Alice's fork, but neither its tokens nor its state.
            await bob.post("/v1/sessions", json={"session": "s"})
            assert (await bob.post("/v1/sessions/s/fork", json={"session": "t"})).status_code == 201
            his = await bob.post("/v1/sessions/t/tokens", json={"tokens": [7]})
            assert (his.json()["position"], predicted(his)) == (1, predicted(mine))
            assert (await alice.get("/v1/sessions/t")).json()["position"] == 1
