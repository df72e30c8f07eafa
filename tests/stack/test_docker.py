"""Builds the server's image, and starts the services of the unchanged docker-compose.yml in containers, with its
networks, volumes and limits.

All services run except two: Grafana, for which Debian has no package, and the service that needs a GPU. The base images
are stand-ins: see docker_engine.py. The published ports 8000, 8404 and 9090 must be free.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.stack import secrets
from deploy.stack.local import ROOT, SERVER
from deploy.stack.stack import COMPOSE, ENTRANCE, STORE, replicas, run_here
from tests.stack.conftest import BUNDLE, MODEL, SESSION_HISTORY_TOKENS, Figures
from tests.stack.harness.docker_engine import docker, engine, python_stand_in, run, stand_in, tagged
from tests.stack.harness.load_generator import failures, histories, open_clients, stepped, stepping
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

LABEL = "wane.test"
PROJECT = "wane-test"
PYTHON = "python:3.11-slim-bookworm"
SERVICES = run_here()
NAMES = [service.name for service in SERVICES]
LIMITS = {name: body["mem_limit"] for name, body in yaml.safe_load(COMPOSE.read_text())["services"].items()}
URL = "http://127.0.0.1:8000"
OPERATIONS = 8404

MOST_ABOVE_BASE_BYTES = 450e6
WAIT_S = 300.0
ASK_EVERY_S = 0.1
SESSIONS = 60
RATE = 1.25
GIB = 2**30


def size_bytes(image: str) -> int:
    return int(docker("image", "inspect", "--format={{.Size}}", image))


def until_ready(url: str) -> dict[str, Any]:
    """Waits until /readyz answers 200. Returns its body."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            answer = httpx.get(f"{url}/readyz")
            if answer.status_code == 200:
                ready: dict[str, Any] = answer.json()
                return ready
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"{url} is not ready"
        time.sleep(ASK_EVERY_S)


class Deployment:
    """The services of the compose file, with newly generated secrets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets = folder / "secrets"
        secrets.make(self.secrets)
        for name in ("deploy", "models"):
            (folder / name).symlink_to(ROOT / name)

    def compose(self, *arguments: str) -> str:
        project = (f"--project-name={PROJECT}", f"--project-directory={self.folder}", f"--file={COMPOSE}")
        return run("docker-compose", *project, *arguments)

    def up(self) -> None:
        """Starts the services that are not running. Waits until every service is healthy and HAProxy has found a
        replica."""
        self.compose("up", "--detach", "--no-build", *NAMES)
        until_ready(URL)
        deadline = time.monotonic() + WAIT_S
        while unhealthy := {name: state for name in NAMES if (state := self.health(name)) != "healthy"}:
            assert time.monotonic() < deadline, unhealthy
            time.sleep(ASK_EVERY_S)

    def inspect(self, service: str) -> dict[str, Any]:
        """Returns Docker's description of a service's container."""
        filters = ("project=" + PROJECT, "service=" + service)
        found = [f"--filter=label=com.docker.compose.{one}" for one in filters]
        document: dict[str, Any] = json.loads(docker("inspect", docker("ps", "--all", "--quiet", *found)))[0]
        return document

    def health(self, service: str) -> str:
        """Returns the health that Docker reports. HAProxy has no health check, and counts as healthy."""
        state = self.inspect(service)["State"]
        found: str = state["Health"]["Status"] if service != ENTRANCE else "healthy"
        return found

    def execute(self, service: str, *command: str) -> str:
        """Runs a command in the service's container. Returns the command's output, including standard error."""
        joined = f"{' '.join(command)} 2>&1 || true"
        return docker("exec", self.inspect(service)["Id"], "sh", "-c", joined)

    @property
    def key(self) -> dict[str, str]:
        """The authorization header of a client, with its key."""
        return {"authorization": f"Bearer {(self.secrets / secrets.CLIENT_KEY).read_text().strip()}"}

    @property
    def store(self) -> str:
        """The URL of Redis. It has the address of Redis's container, because the container publishes no port."""
        (network,) = self.inspect(STORE)["NetworkSettings"]["Networks"].values()
        password = (self.secrets / secrets.REDIS_PASSWORD).read_text().strip()
        return f"redis://:{password}@{network['IPAddress']}:6379/0"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base image of the server's image."""
    with engine(tmp_path_factory.mktemp("engine")):
        base = python_stand_in()
        with tagged(base, PYTHON):
            yield base


@pytest.fixture(scope="module")
def image(base: str) -> Iterator[str]:
    """Builds the server's image. Removes those layers of the previous build that the new image does not use."""
    build = ("build", "--file=service/Dockerfile", f"--label={LABEL}=")
    # Docker keeps the layers of a named image, so the next build can use them.
    docker(*build, "--target=build", f"--tag={PROJECT}-build", ".")
    docker(*build, f"--tag={PROJECT}", ".")
    docker("image", "prune", "--force", f"--filter=label={LABEL}")
    with tagged(PROJECT, f"{SERVER}:latest"):
        yield SERVER


@pytest.fixture(scope="module")
def made(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The services of the compose file, which are not started. The fixture removes their containers after the tests."""
    with ExitStack() as names:
        for service in SERVICES:
            if service.image != SERVER:
                names.enter_context(tagged(stand_in(service.name), service.image))
        deployment = Deployment(tmp_path_factory.mktemp("deployment"))
        names.callback(deployment.compose, "down", "--volumes")
        yield deployment


@pytest.fixture
def deployment(made: Deployment) -> Deployment:
    """The running services."""
    made.up()
    return made


def test_the_image_is_small(base: str, image: str, figures: Figures) -> None:
    above = size_bytes(image) - size_bytes(base)
    figures(megabytes_above_base=above / 1e6)
    assert 0 < above <= MOST_ABOVE_BASE_BYTES


def test_the_image_serves_custom_bundles_and_stops_on_sigterm(image: str) -> None:
    confined = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
    own = (f"--volume={BUNDLE}:/bundles:ro", "--env=WANE_BUNDLES=/bundles")
    container = docker("run", "--detach", "--publish=127.0.0.1::8000", *confined, *own, image)
    try:
        url = f"http://{docker('port', container, '8000')}"
        until_ready(url)
        predicted = httpx.post(f"{url}/v1/predict", json={"input": "The history of the"}).json()
        assert predicted["model"] == MODEL and predicted["predictions"]
        docker("stop", "--time=20", container)
        assert docker("inspect", "--format={{.State.ExitCode}}", container) == "0"
        log = [json.loads(line) for line in run("sh", "-c", f"docker logs {container} 2>&1").splitlines()]
        assert log[-1]["message"] == "stopped"
    finally:
        docker("rm", "--force", container)


def test_a_client_with_the_key_gets_all_shipped_models(deployment: Deployment) -> None:
    bundles = {manifest.parent.name for manifest in (ROOT / "models" / "bundles").glob("*/manifest.json")}
    with httpx.Client(base_url=URL, timeout=WAIT_S) as client:
        assert client.post("/v1/predict", json={"tokens": [1, 2, 3]}).status_code == 401
        client.headers.update(deployment.key)
        for model in bundles:
            answer = client.post("/v1/predict", json={"tokens": [1, 2, 3], "model": model})
            assert answer.status_code == 200 and answer.json()["model"] == model
        assert client.get("/readyz").json()["store"]["kind"] == "redis"


def test_prometheus_scrapes_every_replica(deployment: Deployment) -> None:
    with httpx.Client(base_url="http://127.0.0.1:9090", timeout=WAIT_S) as prometheus:
        deadline = time.monotonic() + WAIT_S
        wanted = {f"{name}:8000" for name in replicas()}
        while True:
            found = prometheus.get("/api/v1/query", params={"query": 'up{job="wane"} == 1'}).json()["data"]["result"]
            if {one["metric"]["instance"] for one in found} == wanted:
                return
            assert time.monotonic() < deadline, found
            time.sleep(ASK_EVERY_S)


@pytest.mark.parametrize("name", NAMES)
def test_a_container_is_confined(deployment: Deployment, name: str) -> None:
    user = deployment.execute(name, "grep Uid /proc/1/status").split()[1]
    assert user == "10001" if name in replicas() else int(user) > 0
    assert "Read-only file system" in deployment.execute(name, "touch /written")
    assert deployment.execute(name, "grep CapEff /proc/1/status").split() == ["CapEff:", "0" * 16]
    assert deployment.execute(name, "grep NoNewPrivs /proc/1/status").split() == ["NoNewPrivs:", "1"]
    limit = deployment.execute(
        name, "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    assert int(limit) == int(LIMITS[name].removesuffix("g")) * GIB


async def test_a_killed_replica_restarts_and_no_step_is_lost(deployment: Deployment, figures: Figures) -> None:
    victim, *_ = replicas()
    server = victim.replace("-", "_")
    await until(OPERATIONS, **{server: "UP"})
    before = deployment.inspect(victim)
    async with open_clients(8000, [40] * SESSIONS, headers=deployment.key) as clients:
        async with stepping(clients, RATE):
            await stepped(clients, 2)
            os.kill(before["State"]["Pid"], signal.SIGKILL)
            await until(OPERATIONS, **{server: "DOWN"})
            await stepped(clients, 2)
            await until(OPERATIONS, **{server: "UP"})
            await stepped(clients, 2)
        wrong = [
            *failures(clients),
            *await histories(clients, deployment.store, SESSION_HISTORY_TOKENS, owner="client"),
        ]
    figures(steps=sum(len(client.timed) for client in clients), repeated=sum(client.repeated for client in clients))
    after = await asyncio.to_thread(deployment.inspect, victim)
    assert wrong == []
    assert after["RestartCount"] == before["RestartCount"] + 1
    assert after["State"]["Pid"] != before["State"]["Pid"]


def test_all_containers_stop_within_their_grace_period(deployment: Deployment) -> None:
    deployment.compose("stop")
    states = {name: deployment.inspect(name)["State"] for name in NAMES}
    ended = {name: (state["Status"], state["ExitCode"], state["OOMKilled"]) for name, state in states.items()}
    assert ended == dict.fromkeys(NAMES, ("exited", 0, False)), (
        "a container did not exit with 0 (137: it was killed after the grace period)"
    )
