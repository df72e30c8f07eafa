"""Tests of the traces of the real server. The server exports them to a real OTLP receiver, and the tests read the
receiver's log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import httpx
import pytest

from deploy.stack.local import ROOT
from tests.service.live_server import LiveServer, live_server
from tests.stack.conftest import BUNDLE
from tests.stack.harness.receiver import TIMEOUT_S, Received, Receiver, receiver

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TRACE = "4bf92f3577b34da6a3ce929d0e0e473{}"
SPAN = "00f067aa0ba902b7"
STEP = "POST /v1/sessions/{session}/tokens"


def parent(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE.format(number)}-{SPAN}-{flags}", "tracestate": "vendor=1"}


def ended(server: LiveServer, collector: Receiver) -> list[Received]:
    """Stops the server, which then exports its last spans. Returns all spans."""
    assert server.stop() == 0
    return collector.spans()


def variables(collector: Receiver) -> dict[str, str]:
    return {
        "WANE_BUNDLES": str(BUNDLE),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_SERVICE_NAME": "wane-of-this-test",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=tests",
    }


def test_a_request_is_traced_from_its_client_to_the_run() -> None:
    with receiver() as collector, live_server(**variables(collector)) as server:
        with httpx.Client(base_url=server.url, headers=parent(1, "00"), timeout=TIMEOUT_S) as client:
            session = client.post("/v1/sessions", json={}).json()["session"]
            path = f"/v1/sessions/{session}/tokens"
            assert client.post(path, json={"tokens": [5]}).status_code == 200  # this request is not sampled
            answer = client.post(path, json={"tokens": [7]}, headers=parent(2)).json()
        spans = ended(server, collector)
    by_name = {span.name: span for span in spans}
    assert len(spans) == len(by_name) == 4
    request, queue, batch, run = (by_name[name] for name in (STEP, "queue", "batch", "run"))
    assert {span.trace for span in spans} == {TRACE.format(2)}
    assert (request.parent, queue.parent, batch.parent, run.parent) == (SPAN, request.id, request.id, batch.id)
    assert batch.links == [request.id]
    assert request.resource["service.name"] == "wane-of-this-test"
    assert request.resource["deployment.environment.name"] == "tests"
    assert "SERVER" in request.fields["Kind"]
    assert request.attributes["http.response.status_code"] == "200"
    assert (request.attributes["wane.state"], request.attributes["wane.mode"]) == ("resident", "recurrent")
    assert (run.attributes["wane.device"], run.attributes["wane.graph"]) == (answer["device"], "step")
    assert (run.attributes["wane.model"], run.attributes["wane.batch.items"]) == (answer["model"], "1")
    assert request.times[0] <= queue.times[0] <= queue.times[1] <= run.times[0] <= run.times[1] <= request.times[1]
    assert abs((run.times[1] - run.times[0]) / 1e6 - answer["latency"]["compute_ms"]) < 0.001
    assert abs((queue.times[1] - queue.times[0]) / 1e6 - answer["latency"]["queue_ms"]) < 0.001


async def items_that_joined_a_batch(client: httpx.AsyncClient) -> float:
    """Returns the number of items minus the number of batches, according to the server's metrics. It is above 0 if a
    batch had several items."""
    lines = (await client.get("/metrics")).text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"wane_batch_items_{name}{{"))

    return total("sum") - total("count")


def test_a_batch_links_to_the_requests_of_all_its_clients() -> None:
    async def ask(url: str) -> None:
        """Sends eight concurrent requests, again and again, until several of them are computed in one batch."""
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(base_url=url, headers=parent(0, "00"), timeout=TIMEOUT_S) as client,
        ):
            before = await items_that_joined_a_batch(client)
            while await items_that_joined_a_batch(client) == before:
                bodies = [{"tokens": [1] * 60, "mode": "window"}] * 8
                asked = [client.post("/v1/predict", json=body, headers=parent(n)) for n, body in enumerate(bodies)]
                assert {response.status_code for response in await asyncio.gather(*asked)} == {200}

    with receiver() as collector, live_server(**variables(collector)) as server:
        asyncio.run(ask(server.url))
        spans = ended(server, collector)
    requests = {span.id: span for span in spans if span.name == "POST /v1/predict"}
    batches = {span.id: span for span in spans if span.name == "batch"}
    assert {span.trace for span in requests.values()} == {TRACE.format(number) for number in range(8)}
    linked = [link for batch in batches.values() for link in batch.links]
    assert sorted(linked) == sorted(requests)
    shared = [batch for batch in batches.values() if len(batch.links) > 1]
    assert shared
    for batch in batches.values():
        assert len(batch.links) == int(batch.attributes["wane.batch.items"])
        assert requests[batch.parent].trace == batch.trace
    of_others = [span for span in spans if span.name == "queue" and span.links]
    assert len(of_others) == len(requests) - len(batches)
    assert {link for span in of_others for link in span.links} == {batch.id for batch in shared}


def test_a_step_is_one_trace_also_if_another_worker_makes_it() -> None:
    """Each connection is new, so both workers accept some, and pass on half of the steps."""
    steps = 16
    with receiver() as collector, live_server("--workers", "2", **variables(collector)) as server:
        with httpx.Client(base_url=server.url, headers={"connection": "close"}, timeout=TIMEOUT_S) as client:
            for number in range(steps):
                trace = {"traceparent": f"00-{number + 1:032x}-{SPAN}-01"}
                path = f"/v1/sessions/trace-{number}/tokens"
                made = client.post("/v1/sessions", json={"session": f"trace-{number}"}, headers=parent(1, "00"))
                assert made.status_code == httpx.codes.CREATED, made.text
                assert client.post(path, json={"tokens": [5]}, headers=trace).status_code == httpx.codes.OK
        spans = ended(server, collector)
    for number in range(steps):
        found = {span.name: span for span in spans if span.trace == f"{number + 1:032x}"}
        request, queue, batch, run = (found.pop(name) for name in (STEP, "queue", "batch", "run"))
        assert (request.parent, queue.parent, batch.parent, run.parent) == (SPAN, request.id, request.id, batch.id)
        assert not found
    assert len(spans) == 4 * steps


def test_requests_of_the_command_continue_the_trace_of_its_caller() -> None:
    with receiver() as collector, live_server(**variables(collector)) as server:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        given = {
            **inherited,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "TRACEPARENT": parent(3)["traceparent"],
        }
        command = [sys.executable, "-m", "wane", "report", server.url]
        subprocess.run(command, cwd=ROOT, env=given, check=True, capture_output=True, timeout=TIMEOUT_S)
        spans = ended(server, collector)
    call, request = sorted((span for span in spans if span.name == "GET /v1/report"), key=lambda span: span.times)
    assert (call.trace, call.parent, request.trace, request.parent) == (TRACE.format(3), SPAN, call.trace, call.id)
    assert ("CLIENT" in call.fields["Kind"], "SERVER" in request.fields["Kind"]) == (True, True)
    assert call.resource["service.name"] == "wane"


def test_a_missing_receiver_fails_no_request_and_does_not_delay_the_shutdown() -> None:
    with receiver() as collector, live_server(**variables(collector)) as server:
        collector.process.kill()
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            assert client.post("/v1/predict", json={"tokens": [1]}).status_code == 200
        assert server.stop() == 0
