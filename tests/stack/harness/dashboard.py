"""Reads the panels of the dashboard in deploy/grafana and their queries to Prometheus, as Grafana does."""

from __future__ import annotations

import json
from typing import Any

import yaml

from deploy.stack.local import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
FILE = GRAFANA / "dashboards" / "wane.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
PANELS: dict[str, dict[str, Any]] = {one["title"]: one for one in DASHBOARD["panels"] if one["type"] != "row"}
SOURCE: dict[str, Any] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
    "datasources"
][0]
RATES_OVER = 4  # Grafana's $__rate_interval is at least this many scrape intervals long


def queries(panel: dict[str, Any]) -> list[str]:
    """Returns a panel's queries for all models and replicas. The interval of rates is the shortest one that Grafana
    uses."""
    seconds = RATES_OVER * int(SOURCE["jsonData"]["timeInterval"].removesuffix("s"))
    values = {"$__rate_interval": f"{seconds}s", "$model": ".*", "$replica": ".*"}
    found: list[str] = []
    for target in panel["targets"]:
        query = target["expr"]
        for variable, value in values.items():
            query = query.replace(variable, value)
        assert "$" not in query, f"{panel['title']} uses an unknown variable: {query}"
        found.append(query)
    return found
