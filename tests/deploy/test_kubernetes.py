"""Tests that the manifests match the schemas of Kubernetes, and agree with the server, the image and the compose file.

This module implements the parts of `kubectl kustomize` that these kustomizations need: resources, the namespace, image
tags, ConfigMaps from files, and the patch of one overlay.
"""

from __future__ import annotations

import asyncio
import copy
import re
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.stack import secrets
from deploy.stack.compose import SECRETS
from deploy.stack.local import ROOT
from tests.service.engine_harness import Clock, EngineHarness
from wane.service.app import ROUTES
from wane.service.server import CLOSE_S
from wane.service.settings import Settings
from wane.service.types.request import GenerateRequest, PredictRequest, ScoreRequest, StepRequest

FOLDER = ROOT / "deploy" / "kubernetes"
COMPOSE: Any = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
DOCKERFILE = (ROOT / "service" / "Dockerfile").read_text(encoding="utf-8")
OLDEST, LATEST = "1.30", "1.37"
"""The versions of Kubernetes whose schemas are used. The first of them is the oldest version in which
`lifecycle.preStop.sleep` is enabled by default."""

QUEUED = "wane_queue_wait_seconds_total"
"""The metric of the HorizontalPodAutoscaler (HPA) is the rate of this counter."""

Resource = dict[str, Any]


def load(file: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one]


def built(folder: Path) -> list[Resource]:
    """Returns the resources of a kustomization, including the resources of the folders that the kustomization names."""
    (kustomization,) = load(folder / "kustomization.yaml")
    found: list[Resource] = []
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        found += built(path) if path.is_dir() else load(path)
    for one in kustomization.get("configMapGenerator", ()):
        data = {file: (folder / file).read_text(encoding="utf-8") for file in one["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": one["name"]}, "data": data})
    for resource in found:
        if "namespace" in kustomization and resource["kind"] != "Namespace":
            resource["metadata"]["namespace"] = kustomization["namespace"]
    tags = {image["name"]: str(image["newTag"]) for image in kustomization.get("images", ())}
    for pod in map(pod_of, found):
        for container in pod["containers"] if pod else ():
            name = container["image"].split(":")[0]
            container["image"] = f"{name}:{tags[name]}" if name in tags else container["image"]
    for patch in kustomization.get("patches", ()):
        target = patch["target"]
        (resource,) = [
            one for one in found if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        merge(resource, yaml.safe_load(patch["patch"]))
    return found


def merge(into: Resource, patch: Resource) -> None:
    """Applies the parts of a strategic merge patch that the overlay uses. Merges lists of named items by name, and
    replaces other lists."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif isinstance(value, list) and key in ("containers", "env"):
            there = {one["name"]: one for one in into[key]}
            for one in value:
                if one["name"] in there:
                    merge(there[one["name"]], one)
                else:
                    into[key].append(one)
        else:
            into[key] = copy.deepcopy(value)


def pod_of(resource: Resource) -> Resource | None:
    """Returns the pod template of a resource, if it has one."""
    if resource["kind"] not in ("Deployment", "StatefulSet"):
        return None
    pod: Resource = resource["spec"]["template"]["spec"]
    return pod


BASE = built(FOLDER / "base")
GPU = built(FOLDER / "gpu")
MONITORING = built(FOLDER / "monitoring")
PODS = {one["metadata"]["name"]: pod for one in BASE if (pod := pod_of(one)) is not None}


def get(kind: str, name: str, among: list[Resource] = BASE) -> Resource:
    (found,) = [one for one in among if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def container(name: str, among: list[Resource] = BASE) -> Resource:
    kind = "StatefulSet" if name == "redis" else "Deployment"
    (found,) = get(kind, name, among)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(among: list[Resource] = BASE) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container("wane", among)["env"]}


def ports(name: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(name)["ports"]}


def probes(name: str) -> Iterator[tuple[str, Resource]]:
    for kind, probe in container(name).items():
        if kind.endswith("Probe"):
            yield kind, probe


SETTINGS = Settings.read(environment())
COMPOSED = {"wane": "wane-1", "redis": "redis"}
HEAD = (FOLDER / "base" / "kustomization.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", [OLDEST, LATEST])
@pytest.mark.parametrize(
    "resource", [pytest.param(one, id=f"{one['kind']}-{one['metadata']['name']}") for one in [*BASE, *GPU]]
)
def test_every_resource_matches_the_schemas_of_kubernetes(resource: Resource, version: str) -> None:
    assert kubernetes_validate.validate(resource, version, strict=True) == version


def test_a_misspelt_field_is_not_valid() -> None:
    wrong = copy.deepcopy(get("Deployment", "wane"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, LATEST, strict=True)


def test_every_file_is_in_a_kustomization() -> None:
    for folder in FOLDER.iterdir():
        (kustomization,) = load(folder / "kustomization.yaml")
        files = {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml", "adapter.yaml"}
        assert files == {name for name in kustomization["resources"] if name.endswith(".yaml")}


def test_the_replicas_variables_are_settings_and_include_those_of_the_compose_file() -> None:
    assert SETTINGS.store == COMPOSE["wane-1"]["environment"]["WANE_STORE"]
    assert SETTINGS.shutdown_delay_ms == COMPOSE["wane-1"]["environment"]["WANE_SHUTDOWN_DELAY_MS"]
    assert Settings.read(environment(GPU)).device == "cuda"


def test_kubernetes_adds_no_variables_with_the_prefix_of_settings() -> None:
    for pod in PODS.values():
        assert pod["enableServiceLinks"] is False


def test_images_and_users_are_those_of_the_dockerfile_and_of_the_compose_file() -> None:
    user = re.search(r"useradd .*--uid (\d+) .*wane", DOCKERFILE)
    assert user is not None and PODS["wane"]["securityContext"]["runAsUser"] == int(user[1])
    assert container("wane")["image"].split(":")[0] == COMPOSE["wane-1"]["image"]
    assert container("wane", GPU)["image"] == COMPOSE["wane-gpu"]["image"]
    assert container("redis")["image"] == COMPOSE["redis"]["image"]
    assert container("haproxy")["image"].split(":")[0] == COMPOSE["haproxy"]["image"].split(":")[0]
    assert "command" not in container("wane") and "args" not in container("wane"), (
        "the manifest must not replace the image's command"
    )


@pytest.mark.parametrize("name", ["haproxy", "redis", "wane"])
def test_a_pod_has_the_memory_limit_of_its_container(name: str) -> None:
    limit = container(name)["resources"]["limits"]["memory"]
    assert limit.removesuffix("i").lower() == COMPOSE[COMPOSED.get(name, name)]["mem_limit"]
    on_gpus = container(name, GPU)["resources"]["limits"]["memory"]
    assert on_gpus == ("8Gi" if name == "wane" else limit)


GIB = 2**30
UNITS = {"Mi": 2**20, "Gi": GIB}


def asked_bytes(name: str, among: list[Resource] = BASE) -> int:
    """Returns the memory request, in bytes, of the container of the pod with this name."""
    asked = container(name, among)["resources"]["requests"]["memory"]
    return int(asked[:-2]) * UNITS[asked[-2:]]


def test_a_pod_requests_its_measured_memory() -> None:
    page = (ROOT / "docs" / "stack.md").read_text(encoding="utf-8")
    (models,) = re.findall(r"eight models take ([\d.]+) GiB", page)
    assert len(list((ROOT / SETTINGS.bundles).glob("*/manifest.json"))) <= 8
    assert min(asked_bytes("wane"), asked_bytes("wane", GPU)) > float(models) * GIB
    (store,) = re.findall(r"^maxmemory (\d+)gb$", get("ConfigMap", "redis")["data"]["redis.conf"], re.MULTILINE)
    assert asked_bytes("redis") >= int(store) * GIB


@pytest.mark.parametrize("name", ["haproxy", "redis"])
def test_haproxy_and_redis_run_the_compose_files_command_and_configuration(name: str) -> None:
    assert container(name)["command"] == COMPOSE[name]["command"]
    source, target, _ = next(one for one in COMPOSE[name]["volumes"] if one.startswith("./")).split(":")
    mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
    assert str(Path(target).parent) == mounts["configuration"]
    assert get("ConfigMap", name)["data"] == {Path(target).name: (ROOT / source).read_text(encoding="utf-8")}
    volumes = {volume["name"]: volume for volume in PODS[name]["volumes"]}
    assert volumes["configuration"]["configMap"] == {"name": name}


def test_haproxy_gets_the_variables_that_its_configuration_uses() -> None:
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text(encoding="utf-8")
    variables = {one["name"]: one["value"] for one in container("haproxy")["env"]}
    for name in variables:
        assert f"#   {name} " in text
    assert (variables["LISTEN"], variables["OPERATIONS"]) == ("*:8000", "*:8404")
    assert ports("haproxy") == {"http": 8000, "operations": 8404}
    port, protocol, service, namespace, *_ = variables["REPLICAS"].split(".")
    headless = get("Service", service)
    assert (headless["metadata"]["namespace"], headless["spec"]["clusterIP"]) == (namespace, "None")
    assert protocol == "_tcp" and headless["spec"]["ports"][0]["name"] == port.removeprefix("_")
    assert headless["spec"]["publishNotReadyAddresses"] is True


def test_haproxy_has_slots_for_all_replicas_during_an_update() -> None:
    places = re.findall(
        r'server-template wane- (\d+) "\$\{REPLICAS\}"', get("ConfigMap", "haproxy")["data"]["haproxy.cfg"]
    )
    most = get("HorizontalPodAutoscaler", "wane")["spec"]["maxReplicas"]
    surge = get("Deployment", "wane")["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    assert len(places) == 2 and all(int(number) >= most + 2 * surge for number in places)


@pytest.mark.parametrize(
    "service", [one for one in BASE if one["kind"] == "Service"], ids=lambda one: one["metadata"]["name"]
)
def test_every_service_matches_pods_and_a_port(service: Resource) -> None:
    (name,) = service["spec"]["selector"].values()
    for port in service["spec"]["ports"]:
        assert ports(name)[port["targetPort"]] == port["port"]


def test_the_replicas_listen_on_the_probed_port() -> None:
    assert ports("wane") == {"http": SETTINGS.port}
    assert ports("redis") == {"redis": 6379}
    assert SETTINGS.store.startswith("redis://redis:6379/")


def test_probes_use_existing_paths_without_a_key() -> None:
    paths = {getattr(route, "path", None) for route in ROUTES}
    asked = {kind: probe["httpGet"] for kind, probe in probes("wane")}
    assert {kind: get["path"] for kind, get in asked.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {get["path"] for get in asked.values()} <= paths
    for name in PODS:
        for _, probe in probes(name):
            assert "exec" in probe or probe["httpGet"]["port"] in ports(name)


def test_a_stopping_replica_has_time_for_its_shutdown() -> None:
    sleep_s = container("wane")["lifecycle"]["preStop"]["sleep"]["seconds"]
    takes_s = sleep_s + SETTINGS.shutdown_delay_ms / 1000 + SETTINGS.drain_timeout_ms / 1000 + CLOSE_S
    assert takes_s < PODS["wane"]["terminationGracePeriodSeconds"]


def test_a_stopping_haproxy_finishes_its_requests_in_flight() -> None:
    sleep_s = container("haproxy")["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = PODS["haproxy"]["terminationGracePeriodSeconds"]
    assert sleep_s + SETTINGS.request_timeout_ms / 1000 < grace_s


def test_the_hpa_uses_a_metric_that_the_adapter_derives_from_the_servers() -> None:
    scaler = get("HorizontalPodAutoscaler", "wane")["spec"]
    target = get(scaler["scaleTargetRef"]["kind"], scaler["scaleTargetRef"]["name"])
    assert scaler["scaleTargetRef"]["apiVersion"] == target["apiVersion"]
    assert "replicas" not in target["spec"], (
        "`replicas` must not be set, because every apply would overwrite the HPA's number of replicas"
    )
    (metric,) = [one["pods"]["metric"]["name"] for one in scaler["metrics"] if one["type"] == "Pods"]
    (adapter,) = load(FOLDER / "monitoring" / "adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == metric
    assert rule["seriesQuery"] == f'{{__name__="{QUEUED}",namespace!="",pod!=""}}'
    assert rule["metricsQuery"] == "sum by (<<.GroupBy>>) (rate(<<.Series>>{<<.LabelMatchers>>}[1m]))"


def queued_s(harness: EngineHarness) -> float:
    """Returns the value of the counter QUEUED of one replica, summed over its labels. The HPA's metric is the rate of
    this value."""
    found = [one for metric in harness.metrics.registry.collect() for one in metric.samples if one.name == QUEUED]
    assert {one.labels["model"] for one in found} == {harness.engine.name}, (
        "the metric must exist before any request has waited"
    )
    return sum(one.value for one in found)


@pytest.mark.parametrize("asked", ["predict", "step", "score", "generate"])
async def test_the_hpa_s_metric_includes_the_whole_time_of_every_wait_in_the_queue(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    harness = EngineHarness()
    engine = harness.engine
    assert queued_s(harness) == 0
    harness.runner.gate.clear()
    busy = asyncio.ensure_future(engine.submit(PredictRequest((1,))))
    await harness.runner.until_busy()

    async def ask(number: int) -> None:
        if asked == "score":
            await engine.score(ScoreRequest((2, 3)))
        elif asked == "generate":
            async with aclosing(await engine.generate(GenerateRequest((2, 3), max_tokens=2))) as tokens:
                assert [one async for one in tokens]
        elif asked == "step":
            await engine.create_session(f"s{number}")
            await engine.submit(StepRequest(f"s{number}", (2,)))
        else:
            await engine.submit(PredictRequest((2, 3)))

    asking = [asyncio.create_task(ask(number)) for number in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert harness.sample("wane_queue_items") == 3
    clock.now_s += 10
    harness.runner.gate.set()
    await asyncio.gather(busy, *asking)
    await engine.drain()
    await engine.close()
    assert queued_s(harness) == 3 * 10


def test_scaling_down_and_draining_nodes_remove_one_replica_at_a_time() -> None:
    assert get("HorizontalPodAutoscaler", "wane")["spec"]["minReplicas"] > 1
    for name in ("wane", "haproxy"):
        budget = get("PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"] == get("Deployment", name)["spec"]["selector"]
    (policy,) = get("HorizontalPodAutoscaler", "wane")["spec"]["behavior"]["scaleDown"]["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)


@pytest.mark.parametrize("name", PODS)
def test_every_pod_meets_the_restricted_standard_with_a_read_only_root(name: str) -> None:
    pod, own = PODS[name], container(name)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(own["resources"]["requests"]) == {"cpu", "memory"} and "memory" in own["resources"]["limits"]
    assert get("Namespace", "wane")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_mount_has_its_volume() -> None:
    for resource in BASE:
        pod = pod_of(resource)
        if pod is not None:
            volumes = {volume["name"] for volume in pod.get("volumes", ())}
            volumes |= {claim["metadata"]["name"] for claim in resource["spec"].get("volumeClaimTemplates", ())}
            assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


def test_keys_come_from_a_secret_mounted_as_a_folder(tmp_path: Path) -> None:
    made = tmp_path / "secrets"
    secrets.make(made)
    for name in ("wane", "redis"):
        (volume,) = [one["secret"] for one in PODS[name]["volumes"] if "secret" in one]
        (mount,) = [one for one in container(name)["volumeMounts"] if one["name"] == "secrets"]
        assert mount == {"name": "secrets", "mountPath": SECRETS, "readOnly": True}
        assert [item["key"] for item in volume["items"]] == [item["path"] for item in volume["items"]]
        assert {item["key"] for item in volume["items"]} == {file.name for file in (made / name).iterdir()}
        (command,) = [line for line in HEAD.splitlines() if f"create secret generic {volume['secretName']} " in line]
        sources = [made.parent / source for source in re.findall(r"--from-file=(\S+)", command)]
        files = [file for source in sources for file in (source.iterdir() if source.is_dir() else [source])]
        names = [file.name for file in files]
        assert len(set(names)) == len(names) and all(file.is_file() for file in files)
        assert {item["key"] for item in volume["items"]} <= set(names)
    for variable in ("WANE_API_KEYS_FILE", "WANE_STORE_PASSWORD_FILE"):
        assert environment()[variable] == COMPOSE["wane-1"]["environment"][variable]
    assert not [one for one in [*BASE, *GPU, *MONITORING] if one["kind"] == "Secret"]


def test_each_pod_is_reached_only_by_the_pods_that_need_it() -> None:
    policies = [one["spec"] for one in BASE if one["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    reached: set[tuple[str, int, str]] = set()
    reaching: set[tuple[str, int, str]] = set()
    for policy in policies:
        own = policy["podSelector"].get("matchLabels", {}).get("app", "all")
        for rules, found in ((policy.get("ingress", ()), reached), (policy.get("egress", ()), reaching)):
            for rule in rules:
                peers = rule.get("from", rule.get("to", [{}]))
                for peer in peers:
                    labels = peer.get("podSelector", peer.get("namespaceSelector", {})).get("matchLabels", {})
                    found |= {(own, port["port"], "/".join(labels.values())) for port in rule["ports"]}
    assert reached == {
        ("haproxy", 8000, ""),
        ("haproxy", 8404, "true"),
        ("wane", 8000, "haproxy"),
        ("wane", 8000, "true"),
        ("redis", 6379, "wane"),
    }
    assert reaching == {("haproxy", 8000, "wane"), ("wane", 6379, "redis"), ("all", 53, "kube-system")}


def test_prometheus_scrapes_each_pods_metrics_and_the_replicas_with_a_key() -> None:
    for name, path in (("wane", "/metrics"), ("haproxy", "/metrics")):
        monitor = get("PodMonitor", name, MONITORING)
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports(name) and endpoint["path"] == path
        labels = get("Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert "/metrics" in {getattr(route, "path", None) for route in ROUTES}
    (endpoint,) = get("PodMonitor", "wane", MONITORING)["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["type"] == "Bearer"


def test_redis_writes_to_its_own_volume() -> None:
    claim = get("StatefulSet", "redis")["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container("redis")["volumeMounts"]}
    assert mounts[claim] == container("redis")["workingDir"] == "/data"
    assert "dir ./" in get("ConfigMap", "redis")["data"]["redis.conf"]
