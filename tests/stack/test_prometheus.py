"""Tests that a real Prometheus with a key scrapes three replicas behind HAProxy, and that every query of the dashboard
finds data."""

from __future__ import annotations

import math
import socket
import time
from typing import Any

import httpx
import pytest

from deploy.stack.local import PROMETHEUS
from deploy.stack.secrets import METRICS_KEY
from deploy.stack.stack import Stack, replicas
from tests.service.sessions.stores.redis_server import program
from tests.stack.conftest import MakeStack
from tests.stack.harness.dashboard import PANELS, queries
from tests.stack.harness.receiver import receiver

pytestmark = [pytest.mark.stack, pytest.mark.slow]

LIMIT_S = 300
SMALL_QUEUE = "wane-1"
FAILURES = {"By status", "By code and key", "Rejected, dropped, failed", "Failed", "Rejected connections"}
"""The dashboard's panels whose values are all 0 as long as nothing has failed."""


class Traffic:
    """A client. Its requests produce data for every panel of the dashboard, including failures."""

    def __init__(self, stack: Stack, http: httpx.Client) -> None:
        self.http = http
        self.key = {"authorization": f"Bearer {stack.secret('client_key')}"}
        (small,) = (replica for replica in stack.replicas if replica.name == SMALL_QUEUE)
        self.small = small.url
        self.sessions = [self.post("/v1/sessions", {}).json()["session"] for _ in range(12)]

    def post(self, path: str, body: object, status: int | None = None, **headers: str) -> httpx.Response:
        response = self.http.post(path, json=body, headers={**self.key, **headers})
        assert status is None or response.status_code == status, response.text
        return response

    def round(self) -> None:
        """Sends a few requests of each kind."""
        for session in self.sessions:
            self.post(f"/v1/sessions/{session}/tokens", {"tokens": [5]}, 200)
        for mode in ("recurrent", "window", "both"):
            self.post("/v1/predict", {"tokens": [3] * 40, "mode": mode}, 200)
        self.post("/v1/sessions/none/tokens", {"tokens": [5]}, 404)
        self.post("/v1/predict", {"tokens": []}, 422)
        self.post(f"/v1/sessions/{self.sessions[0]}/tokens", {"tokens": [5]}, 409, **{"x-wane-position": "99999"})
        assert self.http.post("/v1/predict", json={"tokens": [1]}).status_code == 401
        late = {"tokens": [7] * 4000, "method": "sequential"}
        self.post("/v1/score", late, 504, **{"x-request-timeout-ms": "1"})
        with socket.create_connection(("127.0.0.1", httpx.URL(self.small).port or 0), timeout=LIMIT_S) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            assert connection.recv(2**10).startswith(b"HTTP/1.1 400 ")
        many = {"inputs": [[2] * 60] * 64, "mode": "window"}
        refused = self.http.post(f"{self.small}/v1/predict", json=many, headers=self.key).json()["results"]
        assert any(result.get("error", {}).get("code") == "overloaded" for result in refused)


class Asked:
    """A client of Prometheus's API."""

    def __init__(self, stack: Stack, http: httpx.Client) -> None:
        self.url = stack.processes[PROMETHEUS].url
        self.http = http

    def get(self, path: str, **parameters: str) -> Any:
        answer = self.http.get(f"{self.url}/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        """Returns the current values of a query, without NaN."""
        found = (float(one["value"][1]) for one in self.get("query", query=query)["result"])
        return [value for value in found if not math.isnan(value)]


def test_every_panel_of_the_dashboard_has_data_from_three_replicas_behind_haproxy(make_stack: MakeStack) -> None:
    program("prometheus")
    with receiver() as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        own = {SMALL_QUEUE: {"WANE_MAX_QUEUE": "2"}}
        with make_stack(variables, own, whole=True) as stack, httpx.Client(base_url=stack.url, timeout=LIMIT_S) as http:
            traffic, prometheus = Traffic(stack, http), Asked(stack, http)
            wanted = {(title, query) for title, panel in PANELS.items() for query in queries(panel)}
            seen: dict[str, float] = {}
            end = time.monotonic() + LIMIT_S
            while wanted:
                assert time.monotonic() < end, f"no data for {sorted(wanted)}"
                traffic.round()
                for title, query in list(wanted):
                    values = prometheus.values(query)
                    seen[title] = max([seen.get(title, 0.0), *values])
                    if values and (title not in FAILURES or seen[title] > 0):
                        wanted.discard((title, query))
            assert {title for title, most in seen.items() if most > 0} >= FAILURES
            assert seen["Bound violations"] == 0

            scraped = {one["labels"].get("replica"): one for one in prometheus.get("targets")["activeTargets"]}
            assert set(scraped) == {*replicas(), None}, (
                "Prometheus does not scrape exactly the replicas and HAProxy (None)"
            )
            assert {one["health"] for one in scraped.values()} == {"up"}
            for code in (
                "unauthorized",
                "unknown_session",
                "invalid_request",
                "position_conflict",
                "deadline_exceeded",
            ):
                key = "" if code == "unauthorized" else "client"
                assert prometheus.values(f'sum(wane_request_errors_total{{code="{code}",key="{key}"}})')[0] > 0
            scrapes = 'sum(wane_http_requests_total{route="/metrics",status="200"})'
            while sum(prometheus.values(scrapes)) <= len(replicas()):
                assert time.monotonic() < end, "the servers have not counted Prometheus's scrapes as requests"
            assert {rule["name"] for group in prometheus.get("rules")["groups"] for rule in group["rules"]} >= {
                "WaneBoundViolated",
                "WaneReplicaDown",
            }
            exemplars = prometheus.get(
                "query_exemplars", query="wane_http_request_seconds_bucket", start="0", end=now()
            )
            traces = {one["labels"]["trace_id"] for series in exemplars for one in series["exemplars"]}
        exported = {span.trace for span in collector.spans()}
        assert traces & exported, "no exemplar has the id of an exported trace"


def now() -> str:
    return str(time.time() + 1)


def test_prometheus_without_its_key_is_rejected_and_reports_the_error(make_stack: MakeStack) -> None:
    program("prometheus")
    stack = make_stack(whole=True)
    (stack.secrets / METRICS_KEY).write_text("another")
    with stack, httpx.Client(timeout=LIMIT_S) as http:
        prometheus = Asked(stack, http)
        end = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < end
            targets = [one for one in prometheus.get("targets")["activeTargets"] if "replica" in one["labels"]]
            if len(targets) == len(replicas()) and all(one["health"] == "down" for one in targets):
                break
        assert all("401" in one["lastError"] for one in targets)
