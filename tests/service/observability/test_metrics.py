"""Tests that Wane's histograms and prometheus_client's histograms export the same text."""

from __future__ import annotations

import threading

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from wane.service.observability.metrics import Histogram, Metrics

BOUNDS = (0.0, 0.00005, 0.1, 1.0)
VALUES = (0.0, 0.00004, 0.00005, 0.1, 0.10001, 1.0, 7.5)


def shown(registry: CollectorRegistry) -> list[str]:
    """Returns the exported text without the creation times, which Wane's histograms do not have."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_histogram_exports_the_same_text_as_the_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("wane_x_seconds", "Some text.", ("model", "mode"), BOUNDS, ours)
    library = prometheus_client.Histogram(
        "wane_x_seconds", "Some text.", ("model", "mode"), buckets=BOUNDS, registry=theirs
    )
    for value in VALUES:
        mine.labels("a", "window").observe(value)
        library.labels("a", "window").observe(value)
    mine.labels("b", "both").observe(0.5)
    library.labels("b", "both").observe(0.5)
    assert shown(ours) == shown(theirs)


def test_a_histogram_without_labels_is_exported_before_its_first_value() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("wane_y", "Some text.", (), BOUNDS, ours)
    library = prometheus_client.Histogram("wane_y", "Some text.", buckets=BOUNDS, registry=theirs)
    assert shown(ours) == shown(theirs)
    mine.observe(0.2)
    library.observe(0.2)
    assert shown(ours) == shown(theirs)


def test_the_latest_traced_value_of_a_bucket_is_its_exemplar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1700000000.25)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("wane_x_seconds", "Some text.", ("mode",), BOUNDS, ours)
    library = prometheus_client.Histogram("wane_x_seconds", "Some text.", ("mode",), buckets=BOUNDS, registry=theirs)
    for value, trace_id in ((0.2, "a"), (0.3, "b"), (0.4, None), (7.0, "c"), (0.00001, None)):
        mine.labels("both").observe(value, trace_id)
        library.labels("both").observe(value, None if trace_id is None else {"trace_id": trace_id})
    text = [line for line in generate_openmetrics(ours).decode().splitlines() if "_created" not in line]
    assert text == [line for line in generate_openmetrics(theirs).decode().splitlines() if "_created" not in line]
    assert sum('trace_id="b"' in line for line in text) == sum('trace_id="c"' in line for line in text) == 1
    assert sum("trace_id" in line for line in text) == 2
    assert "trace_id" not in generate_latest(ours).decode()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
async def test_a_scrape_is_encoded_on_another_thread(monkeypatch: pytest.MonkeyPatch, accept: str) -> None:
    metrics = Metrics()
    metrics.answer_seconds.labels("a", "window", "queue").observe(0.5)
    metrics.count_request("/v1/predict", "POST", 200, 0.1)
    whole, threads = metrics.render, list[int]()

    def encoded(accept: str = "") -> tuple[bytes, str]:
        threads.append(threading.get_ident())
        return whole(accept)

    monkeypatch.setattr(metrics, "render", encoded)
    text, content_type = await metrics.scrape(accept)
    assert threads and threading.get_ident() not in threads
    encode, expected = choose_encoder(accept)
    assert (text, content_type) == (encode(metrics.registry), expected)
    assert b"/v1/predict" in text


def test_values_are_counted_when_their_thread_reads_the_metrics() -> None:
    metrics = Metrics()
    metrics.count_request("/v1/predict", "POST", 200, 0.1)
    labels = {"route": "/v1/predict", "method": "POST", "status": "200"}
    found: list[float | None] = []

    def read() -> None:
        found.append(metrics.registry.get_sample_value("wane_http_requests_total", labels))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    read()
    assert found == [None, 1.0]


def test_unknown_labels_are_refused() -> None:
    mine = Histogram("wane_z", "Some text.", ("model",), BOUNDS, CollectorRegistry())
    with pytest.raises(ValueError, match=r"wane_z has the labels .*, but 2 values were passed"):
        mine.labels("a", "b")


def test_a_second_histogram_of_the_same_name_is_refused() -> None:
    registry = CollectorRegistry()
    Histogram("wane_z", "Some text.", (), BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("wane_z", "Some text.", (), BOUNDS, registry)
