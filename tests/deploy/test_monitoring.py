"""Tests that Prometheus's tools and Grafana's types accept their files, and that the files name existing metrics."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.stack.local import ROOT
from deploy.stack.stack import COMPOSE, replicas
from tests.service.sessions.stores.redis_server import program
from tests.stack.harness.dashboard import DASHBOARD, GRAFANA, PANELS, SOURCE, queries
from wane.service.observability.metrics import Metrics

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"][0]["rules"]
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
UNTYPED = {"titleFormat", "textFormat", "definition"}
"""The fields of annotations and variables that are specific to the data source Prometheus. Grafana's types of a
dashboard do not describe these fields."""


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.stack
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml"),
        ("check", "rules", "--lint-fatal", "deploy/prometheus/rules.yml"),
        ("test", "rules", "deploy/prometheus/tests.yml"),
    ],
    ids=["config", "rules", "alerts"],
)
def test_promtool_accepts_the_configuration(arguments: tuple[str, ...]) -> None:
    checked = promtool(*arguments)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert fired == {rule["alert"] for rule in RULES}


def test_every_replica_is_scraped_under_its_own_name() -> None:
    jobs = {
        job["job_name"]: job for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    }
    found = {entry["labels"]["replica"]: entry["targets"] for entry in jobs["wane"]["static_configs"]}
    assert found == {name: [f"{name}:8000"] for name in replicas()}
    assert jobs["haproxy"]["static_configs"] == [{"targets": ["haproxy:8404"]}]


def lost(given: Any, back: Any, path: str = "") -> list[str]:
    """Returns the paths of the fields of `given` that have another value, or none, in `back`."""
    if isinstance(given, dict) and isinstance(back, dict):
        return [where for key, value in given.items() for where in lost(value, back.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        return [where for number, one in enumerate(given) for where in lost(one, back[number], f"{path}.{number}")]
    return [] if given == back else [path]


def test_the_dashboard_matches_grafanas_types() -> None:
    register_default_plugins()
    back = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert {where.rpartition(".")[2] for where in lost(DASHBOARD, back)} <= UNTYPED


def test_panels_have_names_units_and_explanations_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    for title, panel in PANELS.items():
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert all(target["legendFormat"] or panel["type"] == "stat" for target in panel["targets"]), title


def test_every_metric_in_a_panel_or_an_alert_exists() -> None:
    known = {metric.name for metric in Metrics().registry.collect()}
    asked = [query for panel in PANELS.values() for query in queries(panel)] + [rule["expr"] for rule in RULES]
    named = {name for query in asked for name in re.findall(r"\bwane_\w+", query)}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} <= known


def test_grafana_finds_the_mounted_data_source_and_dashboards() -> None:
    mounts = dict(entry.split(":")[:2] for entry in SERVICES["grafana"]["volumes"] if isinstance(entry, str))
    assert (ROOT / "deploy/grafana/provisioning").samefile(ROOT / next(iter(mounts)))
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/wane.yml").read_text())["providers"]
    (source,) = [source for source, target in mounts.items() if target == providers[0]["options"]["path"]]
    assert [path.name for path in (ROOT / source).iterdir()] == ["wane.json"]
    assert SOURCE["url"] == "http://prometheus:9090"
    (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "datasource"]
    assert (variable["query"], variable["current"]["value"]) == (SOURCE["type"], SOURCE["uid"])
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert configuration["global"]["scrape_interval"] == SOURCE["jsonData"]["timeInterval"]
