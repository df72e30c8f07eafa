"""Runs the Kubernetes manifests without a cluster. The test adds and removes replicas like an HPA. No request fails,
although no client retries. HAProxy uses the file of its ConfigMap, and finds the replicas with DNS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.stack import secrets
from deploy.stack.local import ROOT
from tests.deploy.test_kubernetes import PODS, get
from tests.service.sessions.stores.redis_server import free_port, program
from tests.stack.conftest import BUNDLE, SESSION_HISTORY_TOKENS, Figures
from tests.stack.harness.load_generator import failures, histories, longest_gap_s, open_clients, stepped, stepping
from tests.stack.harness.names import Names, names
from tests.stack.harness.pods import Pod
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 100
RATE = 1.0
OWNER = "client"
CONFIGURATION = "/usr/local/etc/haproxy/haproxy.cfg"
VARIABLES = {one["name"]: one["value"] for one in PODS["haproxy"]["containers"][0]["env"]}
RESOLVER = "    parse-resolv-conf\n"


@pytest.fixture
def pods() -> Iterator[ExitStack]:
    """A stack of callbacks, to which the test adds one for each pod. The callbacks kill the pods at the end of the
    test."""
    program("redis-server")
    program("haproxy")
    with ExitStack() as stack:
        yield stack


def haproxy_file(folder: Path, dns: Names) -> Path:
    """Writes HAProxy's configuration from the ConfigMap into a file, and returns the file's path. The configuration
    gets the address of the test's DNS server. In a pod, HAProxy would read the address from /etc/resolv.conf."""
    text = get("ConfigMap", "haproxy")["data"]["haproxy.cfg"]
    assert text.count(RESOLVER) == 1
    file = folder / "haproxy.cfg"
    file.write_text(text.replace(RESOLVER, f"    nameserver dns 127.0.0.1:{dns.port}\n"), encoding="utf-8")
    return file


async def test_no_request_fails_or_is_retried_while_replicas_come_and_go(
    tmp_path: Path, pods: ExitStack, figures: Figures
) -> None:
    secrets.make(tmp_path / "secrets")
    key, password = (
        (tmp_path / "secrets" / name).read_text(encoding="utf-8").strip()
        for name in (secrets.CLIENT_KEY, secrets.REDIS_PASSWORD)
    )
    variables = {"WANE_BUNDLES": str(BUNDLE)}
    addresses = {("redis", 6379): free_port(), ("haproxy", 8404): free_port()}

    def run(name: str, port: int, own: Mapping[str, str], files: Mapping[str, Path]) -> Pod:
        pod = Pod(name, port, addresses, tmp_path, own, files)
        pods.callback(pod.process.kill)
        pod.start()
        return pod

    async with names(VARIABLES["REPLICAS"]) as dns:

        def replica() -> Pod:
            """Adds a replica. DNS lists it immediately, before it is ready."""
            pod = run("wane", free_port(), variables, {})
            dns.ports.add(pod.port)
            return pod

        run("redis", addresses["redis", 6379], {}, {"/etc/redis/redis.conf": ROOT / "deploy" / "redis" / "redis.conf"})
        first = [replica(), replica()]
        await asyncio.gather(*(pod.ready() for pod in first))
        entrance = run("haproxy", free_port(), {}, {CONFIGURATION: haproxy_file(tmp_path, dns)})
        await entrance.ready()
        await until(addresses["haproxy", 8404], wane_1="UP", wane_2="UP")

        bearer = {"authorization": f"Bearer {key}"}
        async with open_clients(entrance.port, [40] * SESSIONS, retries=False, headers=bearer) as clients:
            async with stepping(clients, RATE):
                third = replica()
                await third.ready()
                await until(addresses["haproxy", 8404], wane_3="UP")
                # The first two replicas stop. The DNS server removes one replica from its answers before the replica
                # begins to stop, and the other replica only after both have stopped.
                dns.ports.remove(first[0].port)
                codes = await asyncio.gather(*(pod.delete() for pod in first))
                dns.ports.remove(first[1].port)
                await stepped(clients, 2)
            figures(steps=sum(len(client.timed) for client in clients), longest_gap_s=longest_gap_s(clients))
            assert codes == [0, 0]
            assert failures(clients) == []
            store = f"redis://:{password}@127.0.0.1:{addresses['redis', 6379]}/0"
            assert await histories(clients, store, SESSION_HISTORY_TOKENS, OWNER) == []
        rebuilt = sum(answer["state"] == "rebuilt" for client in clients for answer in client.answers.values())
        figures(rebuilt=rebuilt)
        assert rebuilt >= SESSIONS
