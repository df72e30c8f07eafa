"""Tests that the container files agree with the settings and the source tree. They also cover what
tests/stack/test_docker.py does not: that the memory limits suffice, and the services that test_docker.py cannot run
(Grafana and the server on a GPU)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.stack import secrets
from tests.service.live_server import live_server
from wane.service.server import CLOSE_S
from wane.service.settings import Settings

ROOT = Path(__file__).parents[2]
DEFAULTS = Settings()
HADOLINT = Path(sys.executable).with_name("hadolint")


def services() -> Iterator[tuple[str, dict[str, Any]]]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    yield from document["services"].items()


def published(service: dict[str, Any]) -> list[str]:
    """Returns the published ports of a service. Each has the form host:port:container port."""
    ports: list[str] = service.get("ports", [])
    return ports


SERVERS = [pytest.param(body, id=name) for name, body in services() if "build" in body]
each_server = pytest.mark.parametrize("service", SERVERS)
each_service = pytest.mark.parametrize("service", [pytest.param(body, id=name) for name, body in services()])


def as_settings(environment: dict[str, str]) -> Settings:
    """Reads WANE_... variables as the server does. An unknown or invalid variable is an error."""
    return Settings.read({name: str(value) for name, value in environment.items()})


def test_the_cuda_variant_has_the_packages_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (line,) = [line for line in (ROOT / "service/Dockerfile").read_text().splitlines() if "onnxruntime-gpu" in line]
    assert re.findall('"([^"]+)"', line) == project["project"]["optional-dependencies"]["cuda"]


@each_server
def test_a_server_s_variables_are_settings(service: dict[str, Any]) -> None:
    settings = as_settings(service["environment"])
    assert settings.device in ("cpu", "cuda")


@each_server
def test_a_server_is_built_from_this_tree_for_its_device(service: dict[str, Any]) -> None:
    build = service["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).samefile(ROOT / "service" / "Dockerfile")
    cuda = build.get("args", {}).get("DEVICE") == "cuda"
    assert cuda == (service["environment"]["WANE_DEVICE"] == "cuda") == (service.get("profiles") == ["gpu"])
    assert service["image"] == ("wane:cuda" if cuda else "wane")
    if cuda:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


@each_server
def test_a_server_listens_at_the_published_port(service: dict[str, Any]) -> None:
    port = as_settings(service["environment"]).port
    assert {*service.get("expose", ()), *(entry.rsplit(":", 1)[1] for entry in published(service))} == {str(port)}


@each_server
def test_a_server_has_enough_time_to_drain_before_it_is_killed(service: dict[str, Any]) -> None:
    settings = as_settings(service["environment"])
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds * 1000 > settings.shutdown_delay_ms + settings.drain_timeout_ms + CLOSE_S * 1000


@each_service
def test_published_ports_are_local_to_this_machine(service: dict[str, Any]) -> None:
    assert all(entry.startswith("127.0.0.1:") for entry in published(service))


def test_no_two_services_publish_the_same_port() -> None:
    hosts = [entry.rsplit(":", 1)[0] for _, service in services() for entry in published(service)]
    assert len(hosts) == len(set(hosts)) > 0


@each_service
def test_a_service_writes_only_to_its_volumes_and_has_no_capabilities(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@each_service
def test_a_service_has_a_health_check_unless_its_image_has_one(service: dict[str, Any]) -> None:
    # In the compose file, the servers have no health check, because their image has one. HAProxy has none, because no
    # service waits for it.
    own = service["image"].startswith(("wane", "haproxy"))
    assert ("healthcheck" in service) != own


@each_service
def test_secrets_are_mounted_as_folders_and_not_as_files(service: dict[str, Any], tmp_path: Path) -> None:
    assert "secrets" not in service
    named = set(re.findall(r"/run/secrets/(\w+)", json.dumps(service)))
    mounts = [one for one in service.get("volumes", ()) if isinstance(one, dict)]
    for bundles in [mount for mount in mounts if mount["target"] == service.get("environment", {}).get("WANE_BUNDLES")]:
        assert (bundles["type"], bundles["read_only"]) == ("bind", True)
        mounts.remove(bundles)
    assert bool(named) <= bool(mounts)
    secrets.make(tmp_path / "secrets")
    for mount in mounts:
        assert (mount["type"], mount["target"], mount["read_only"]) == ("bind", "/run/secrets", True)
        folder = tmp_path / mount["source"]
        assert folder.is_dir() and named <= {file.name for file in folder.iterdir()}
        assert folder != tmp_path / "secrets", (
            "a service must not mount the folder that has the secrets of all services"
        )


GIB = 2**30
UNITS = {"m": 2**20, "g": GIB, "mb": 2**20, "gb": GIB}


def in_bytes(text: str) -> int:
    """Returns a size in bytes. `text` is the size in the notation of compose or Redis, such as `2g`."""
    number, unit = re.fullmatch(r"(\d+)([a-z]+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@each_service
def test_every_service_has_a_memory_limit(service: dict[str, Any]) -> None:
    assert 0 < in_bytes(service["mem_limit"]) <= 8 * GIB


@pytest.mark.slow
def test_a_full_replica_stays_within_its_memory_limit() -> None:
    (limit,) = {in_bytes(body["mem_limit"]) for name, body in services() if re.fullmatch(r"wane-\d", name)}
    with live_server() as server:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
    (taken,) = [int(found) * 1024 for found in re.findall(r"^VmRSS:\s*(\d+) kB", status, re.MULTILINE)]
    models = len([one for one in (ROOT / DEFAULTS.bundles).iterdir() if (one / "manifest.json").is_file()])
    full = taken + models * DEFAULTS.state_budget_bytes + DEFAULTS.session_budget_bytes + DEFAULTS.receive_budget_bytes
    assert full + GIB <= limit, "the limit must leave a GiB for requests in flight and the next version of a model"


def test_redis_has_twice_its_data_limit_as_memory_and_evicts_no_keys() -> None:
    text = (ROOT / "deploy/redis/redis.conf").read_text()
    settings = dict(re.findall(r"^([a-z-]+) (.*)$", text, re.MULTILINE))
    (limit,) = [in_bytes(body["mem_limit"]) for name, body in services() if name == "redis"]
    assert settings["maxmemory-policy"] == "noeviction"
    assert 2 * in_bytes(settings["maxmemory"]) <= limit


def test_haproxy_has_memory_for_its_maximum_of_connections() -> None:
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    (descriptors,) = re.findall(r"^ +fd-hard-limit (\d+)", text, re.MULTILINE)
    (limit,) = [in_bytes(body["mem_limit"]) for name, body in services() if name == "haproxy"]
    connections, buffers = int(descriptors) // 2, 2 * 16 * 1024
    assert connections * buffers < limit
    replicas = sum(name.startswith("wane-") and "gpu" not in name for name, _ in services())
    assert connections >= replicas * DEFAULTS.max_connections


def test_the_image_is_linted() -> None:
    linted = subprocess.run([HADOLINT, "service/Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_compose_file_matches_its_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    checked = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
