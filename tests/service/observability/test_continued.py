"""Tests of counters that go on where an ended process stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from wane.service.observability.metrics import Metrics

OPEN = "application/openmetrics-text"


def counts(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


@pytest.mark.parametrize("accept", ["", OPEN])
def test_counters_and_histograms_go_on_and_gauges_do_not(tmp_path: Path, accept: str) -> None:
    file = tmp_path / "counts.1"
    for made in (1, 2, 3):  # processes
        metrics = Metrics(file)
        metrics.websockets.set(7 * made)
        metrics.count_request("/v1/predict", "POST", 200, 0.001)
        metrics.count_request(f"/only/{made}", "GET", 200, 0.004)
        for _ in range(2):  # what is read twice is counted once
            text, _ = metrics.render(accept)
        if accept:
            found = counts(text.decode())  # the parser refuses samples of one metric that do not stand together
            of_predict = (("method", "POST"), ("route", "/v1/predict"), ("status", "200"))
            assert found["wane_http_requests_total", of_predict] == made
            assert found["wane_http_request_seconds_sum", (("route", "/v1/predict"),)] == pytest.approx(0.001 * made)
            assert found["wane_http_request_seconds_bucket", (("le", "0.002"), ("route", "/v1/predict"))] == made
            assert found["wane_websockets", ()] == 7 * made
            for earlier in range(1, made + 1):
                assert found["wane_http_request_seconds_count", (("route", f"/only/{earlier}"),)] == 1
        else:
            lines = text.decode().splitlines()
            assert f'wane_http_requests_total{{method="POST",route="/v1/predict",status="200"}} {made}.0' in lines
            assert f"wane_websockets {7 * made}.0" in lines


def test_the_time_of_the_first_count_stays(tmp_path: Path) -> None:
    file = tmp_path / "counts.1"
    name = "wane_connections_rejected_created", (("reason", "slow_head"),)
    created = set()
    for _ in range(2):
        metrics = Metrics(file)
        metrics.connections_rejected.labels("slow_head").inc()
        created.add(counts(metrics.render(OPEN)[0].decode())[name])
    assert len(created) == 1


def test_the_counts_of_another_worker_are_its_own(tmp_path: Path) -> None:
    first, second = (Metrics(tmp_path / f"counts.{number}") for number in range(2))
    first.connections_rejected.labels("slow_head").inc()
    first.render()
    second.render()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts.0", "counts.1"]
    text, _ = Metrics(tmp_path / "counts.1").render()
    assert b'wane_connections_rejected_total{reason="slow_head"}' not in text


def test_counts_that_cannot_be_written_are_exported(tmp_path: Path) -> None:
    """The disk may be full."""
    metrics = Metrics(tmp_path / "no such folder" / "counts.0")
    metrics.connections_rejected.labels("slow_head").inc()
    text, _ = metrics.render()
    assert b'wane_connections_rejected_total{reason="slow_head"} 1.0' in text
