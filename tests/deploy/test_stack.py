"""Tests that scripts/stack runs the services of docker-compose.yml with the same programs, configuration and
variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.stack import secrets
from deploy.stack.compose import SECRETS, Service, read
from deploy.stack.local import BUNDLES, ELSEWHERE, PROMETHEUS, PROXIES, ROOT, SERVER
from deploy.stack.stack import COMPOSE, ENTRANCE, Stack
from wane.service.settings import Settings

DOCUMENT: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
CONFIGURATION = {
    "redis": "deploy/redis/redis.conf",
    "haproxy": "deploy/haproxy/haproxy.cfg",
    "prometheus": "deploy/prometheus/prometheus.yml",
}
SERVICES = {name: body for name, body in DOCUMENT["services"].items() if "profiles" not in body}
RUN = {name: body for name, body in SERVICES.items() if body["image"].partition(":")[0] not in ELSEWHERE}
each = pytest.mark.parametrize("name", RUN)


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    """A stack that is not started."""
    return Stack(tmp_path, whole=True)


def in_the_container(stack: Stack, name: str, text: str) -> str:
    """Returns the text with the local addresses and paths of secrets replaced with the container's."""
    for (service, port), here in stack.addresses.items():
        text = text.replace(f"127.0.0.1:{here}", f"{service}:{port}")
    return re.sub(rf"{re.escape(str(stack.secrets))}/\w+", SECRETS, text)


def test_every_service_without_a_profile_runs_if_its_program_is_packaged(stack: Stack) -> None:
    assert set(stack.processes) == set(RUN) == set(SERVICES) - {"grafana"}
    assert len(stack.replicas) == 3
    assert stack.url == f"http://127.0.0.1:{stack.addresses[ENTRANCE, 8000]}"


@each
def test_a_process_runs_what_its_container_runs(stack: Stack, tmp_path: Path, name: str) -> None:
    service, command = stack.processes[name].service, stack.processes[name].command
    if service.image == SERVER:
        entry_point = re.search(r"^ENTRYPOINT (.*)$", (ROOT / "service" / "Dockerfile").read_text(), re.MULTILINE)
        assert entry_point is not None
        assert ["-m", *yaml.safe_load(entry_point[1])] == list(command.arguments[1:])
        return
    words: list[str] = [*RUN[name].get("entrypoint", []), *RUN[name]["command"]]
    program, *arguments = words
    assert command.arguments[0] == Path(program).name
    for here, there in zip(command.arguments[1:], arguments, strict=False):
        file = here.rpartition("=")[2]
        if Path(file).is_absolute() and not there.endswith(in_the_container(stack, name, file)):
            assert Path(file).name == Path(there).name  # the tests below check the path of the configuration
        else:
            own = in_the_container(stack, name, here)
            assert own in (there, there.replace("0.0.0.0:", f"{name}:").replace("*:", f"{name}:"))
    assert command.arguments[1 + len(arguments) :] == (
        ("--bind", "127.0.0.1", "--port", str(stack.processes[name].port), "--set-proc-title", "no")
        if name == "redis"
        else ()
    )


@each
def test_a_process_reads_the_files_that_its_container_mounts(stack: Stack, name: str) -> None:
    process = stack.processes[name]
    mounts = [mount for mount in process.service.mounts if not mount.is_volume]
    if process.service.image == SERVER:
        assert [mount.source for mount in mounts] == ["./models/bundles"]
        assert process.command.environment[BUNDLES] == str(ROOT / "models" / "bundles")
        return
    (mount,) = mounts
    configuration = ROOT / CONFIGURATION[name]
    (at,) = [n for n, argument in enumerate(process.command.arguments) if argument.endswith(configuration.name)]
    read = Path(process.command.arguments[at].rpartition("=")[2])
    if read.samefile(configuration):
        return
    for file in (ROOT / mount.source).iterdir():
        here = (read.parent / file.name).read_text()
        assert in_the_container(stack, name, here) == file.read_text()


@each
def test_a_process_has_its_containers_secrets(stack: Stack, name: str) -> None:
    process = stack.processes[name]
    folder = stack.secrets / (process.service.secrets or "none")
    found = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    texts = [str(RUN[name]), *((ROOT / path).read_text() for of, path in CONFIGURATION.items() if of == name)]
    assert set(re.findall(rf"{SECRETS}/(\w+)", " ".join(texts))) == found


def test_secrets_are_made_once_in_the_folder_of_their_reader(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "secrets"
    made = secrets.make(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)) for path in files} == set(made)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_dir()} == {0o755}
    texts = {path: path.read_text() for path in files}
    assert (folder / secrets.STORE_PASSWORD).read_text() == (folder / secrets.REDIS_PASSWORD).read_text()
    assert secrets.make(folder) == [] and texts == {path: path.read_text() for path in files}


def test_no_secret_is_in_a_command_a_variable_or_the_compose_file(stack: Stack) -> None:
    known = [stack.secret(name) for name in secrets.DRAWN]
    for process in stack.processes.values():
        said = [*process.command.arguments, *process.command.environment.values()]
        assert not any(secret in text for secret in known for text in said)


def test_a_partial_stack_has_no_keys_and_no_prometheus(tmp_path: Path) -> None:
    part = Stack(tmp_path)
    assert set(part.processes) == set(RUN) - {PROMETHEUS}
    assert not any("WANE_API_KEYS_FILE" in process.command.environment for process in part.replicas)


@each
def test_a_process_has_its_containers_variables_with_local_addresses(stack: Stack, name: str) -> None:
    own = {"WANE_HOST", "WANE_PORT"} if stack.processes[name].service.image == SERVER else set()
    given = {name: str(value) for name, value in RUN[name].get("environment", {}).items() if value is not None}
    found = dict(stack.processes[name].command.environment)
    assert set(found) == set(given) | own
    names = "|".join(map(re.escape, RUN))
    for variable, value in given.items():
        address = re.search(rf"({names}|\*):(\d+)", value)
        if variable == BUNDLES:
            assert (value, found[variable]) == ("/bundles", str(ROOT / "models" / "bundles"))
        elif variable == PROXIES:
            assert found[variable] == "127.0.0.1"
        elif SECRETS in value:
            assert in_the_container(stack, name, found[variable]) == value
        elif address is None:
            assert found[variable] == value
        else:
            port = stack.addresses[name if address[1] == "*" else address[1], int(address[2])]
            assert found[variable] == value.replace(address[0], f"127.0.0.1:{port}")


@each
def test_a_volume_is_the_working_directory_of_the_process(stack: Stack, tmp_path: Path, name: str) -> None:
    process = stack.processes[name]
    volumes = [mount for mount in process.service.mounts if mount.is_volume]
    assert {mount.source for mount in volumes} <= set(DOCUMENT["volumes"])
    assert process.command.folder == (tmp_path / "volumes" / volumes[0].source if volumes else ROOT)


def test_services_start_after_the_services_that_they_wait_for() -> None:
    services = read(COMPOSE)
    for number, service in enumerate(services):
        assert service.after <= {earlier.name for earlier in services[:number]}
    (entrance,) = [service for service in services if service.name == ENTRANCE]
    assert entrance.after == {service.name for service in services if service.image == SERVER}


def test_haproxy_knows_every_replica_of_the_compose_file() -> None:
    environment = RUN[ENTRANCE]["environment"]
    replicas = {name for name, body in RUN.items() if body["image"] == SERVER}
    assert {value.split(":")[0] for name, value in environment.items() if name.startswith("REPLICA_")} == replicas
    servers = re.findall(r'^ +server (\S+) "\$\{(\w+)\}"', (ROOT / CONFIGURATION[ENTRANCE]).read_text(), re.MULTILINE)
    assert {name: environment[variable].split(":")[0] for name, variable in servers} == {
        name: name for name in replicas
    }


def test_haproxys_timeouts_exceed_the_servers() -> None:
    text = (ROOT / CONFIGURATION[ENTRANCE]).read_text()
    limits = {name: int(value) * {"s": 1, "m": 60}[unit] for name, value, unit in _timeouts(text)}
    defaults = Settings()
    assert limits["server"] * 1000 > defaults.request_timeout_ms
    assert limits["tunnel"] > defaults.stream_idle_s


def _timeouts(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"^ +timeout (\S+) (\d+)([sm])\b", text, re.MULTILINE)


def test_published_ports_can_be_chosen_and_all_other_ports_are_free_ports(tmp_path: Path) -> None:
    stack = Stack(tmp_path, {8000: 1234}, whole=True)
    ports = list(stack.addresses.values())
    assert stack.addresses[ENTRANCE, 8000] == 1234
    assert len(set(ports)) == len(ports) == sum(len(service.ports) for service in read(COMPOSE) if service.name in RUN)


def test_variables_can_be_added_for_a_service(tmp_path: Path) -> None:
    stack = Stack(tmp_path, variables={"wane-2": {"WANE_LOG_LEVEL": "error"}})
    assert [process.command.environment["WANE_LOG_LEVEL"] for process in stack.replicas] == ["info", "error", "info"]


def test_a_compose_file_is_read_with_all_fields(tmp_path: Path) -> None:
    file = tmp_path / "compose.yml"
    file.write_text("""
services:
  b:
    image: b
    depends_on: {a: {condition: service_healthy}}
    ports: ["127.0.0.1:9000:80"]
    stop_grace_period: 3s
  a:
    image: a
    command: [run, "*:70"]
    expose: ["70"]
    environment: {X: 1, Y: }
    volumes: ["./a.conf:/etc/a.conf:ro", "data:/data", {type: bind, source: ./secrets/word, target: /run/secrets}]
    stop_grace_period: 2s
  c: {image: c, profiles: [other]}
""")
    a, b = read(file)
    assert (a.name, a.command, a.ports, a.environment, a.grace_s) == ("a", ("run", "*:70"), (70,), {"X": "1"}, 2)
    assert [(mount.source, mount.is_volume) for mount in a.mounts] == [("./a.conf", False), ("data", True)]
    assert (b.name, b.command, b.ports, b.published, b.after) == ("b", (), (80,), {80: 9000}, frozenset({"a"}))
    assert (a.secrets, b.secrets) == ("word", None)
    assert isinstance(b, Service)


@pytest.mark.parametrize("given", ["own", "./own", "/somewhere/own"])
def test_own_bundles_are_mounted_by_a_variable(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUNDLES, given)
    for process in Stack(tmp_path).replicas:
        assert process.command.environment[BUNDLES] == str(ROOT / given)


def test_every_replica_has_a_port_of_its_own_for_reports() -> None:
    ports = [body["ports"] for body in RUN.values() if body["image"] == SERVER]
    assert ports == [[f"127.0.0.1:{8011 + number}:8000"] for number in range(3)]
