"""Random requests to every route of a started server, generated from its OpenAPI description: with a key, without a
key, and along the description's links.

A finding is a status of 500 or more, except 503 and 504; an answer that does not match the description; an accepted
request without a key; or a request without an answer. After all requests, these are also findings: a session that
cannot be deleted, a state or a queued item that belongs to no request, and memory that has grown.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from schemathesis.core.result import Ok
from schemathesis.generation.stateful.state_machine import APIStateMachine
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.fuzz.parsers import Message, altered, messages
from tests.service.live_server import LiveServer, live_server
from tests.service.versions import make_eventful, put
from wane.service.api.schemas.inference import InferBody
from wane.service.auth.guard import OPEN
from wane.service.types.request import is_session_id

Case = schemathesis.Case[Any]

KEY = "fuzz-key"
MODELS = ("words", "clicks")
SESSIONS = ("a", "b", "words:1", "clicks:1")
TIMEOUT_S = 20.0
"""The seconds that the client waits for an answer. They are several times the server's deadline of a request."""
DEADLINE_MS = 3000
ALLOWED = (503, 504)
LINKED_STEPS = 5
MOST_RUNS = 20
"""The largest number of runs of hypothesis for each half of the requests along links."""
SEEDS = MOST_RUNS  # number of seeds for each half of the requests
GROWN_MIB = 64.0
"""The largest accepted growth of the server's resident memory in the second half of the requests."""
SETTLED_S = 10.0
BODY_WEIGHT = 3
"""An operation with a request body is chosen this many times as often as an operation without one."""

INFERENCES = InferBody.examples
CHECKS = [response_schema_conformance, content_type_conformance]
OPTIONS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@contextmanager
def served() -> Iterator[LiveServer]:
    """Starts a server with an API key, a model of text, and a model of events."""
    with tempfile.TemporaryDirectory() as folder:
        bundles = Path(folder) / "bundles"
        bundles.mkdir()
        put(bundles, "1", name=MODELS[0])
        make_eventful(put(bundles, "1", name=MODELS[1]))
        options = {
            "WANE_BUNDLES": str(bundles),
            "WANE_DEFAULT_MODEL": MODELS[0],
            "WANE_API_KEYS": f"fuzz:{KEY}:admin",
            "WANE_REQUEST_TIMEOUT_MS": str(DEADLINE_MS),
            "WANE_CHECK_INVARIANTS": "true",
        }
        with live_server(**options) as server:
            yield server


class HttpFuzz:
    """Sends requests to one server. `statuses` counts the answers by status, and `routes` by route and status."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._client = httpx.Client(base_url=server.url, headers=AUTHORIZED, timeout=TIMEOUT_S)
        self.schema = schemathesis.openapi.from_dict(self._client.get("/openapi.json").raise_for_status().json())
        self.schema.config.update(base_url=server.url)
        self.operations = [found.ok() for found in self.schema.get_all_operations() if isinstance(found, Ok)]
        self.sessions = {*SESSIONS}
        self.findings: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.routes: Counter[tuple[str, int]] = Counter()

    def run(self, count: int, first_seed: int = 0) -> None:
        """Sends `count` requests. Raises AssertionError for a finding."""
        memory_mib: list[float] = []
        for part in (count // 2, count - count // 2):
            alone, linked, binary = part // 8, part // 4, part // 8
            self._random(part - alone - linked - binary, first_seed, self._check)
            self._random(alone, first_seed, self._check_without_key)
            self._binary(binary, first_seed)
            self._linked(linked, first_seed)
            self.check_left_behind()
            memory_mib.append(self.memory_mib())
            first_seed += SEEDS
        before, after = memory_mib
        assert after - before < GROWN_MIB, (
            f"the server's memory grew from {before:.0f} to {after:.0f} MiB, "
            f"but must grow by less than {GROWN_MIB:.0f} MiB"
        )

    # Requests

    def _random(self, count: int, first_seed: int, check: Callable[[Case], None]) -> None:
        """Sends random requests to all operations. Half of the requests match the description, and half do not."""
        kinds = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        weighted = [one for one in self.operations for _ in range(BODY_WEIGHT if one.method == "post" else 1)]

        @st.composite
        def cases(draw: st.DrawFn) -> Case:
            operation = draw(st.sampled_from(weighted))
            case: Case = draw(operation.as_strategy(generation_mode=draw(st.sampled_from(kinds))))
            if draw(st.integers(0, 9)) < 9:  # most random names are names of no model, so known names are chosen here
                for name, known in (("name", MODELS), ("version", ("1",)), ("session", SESSIONS)):
                    if name in (case.path_parameters or {}):
                        case.path_parameters[name] = draw(st.sampled_from(known))
            if isinstance(case.body, dict) and "model" in case.body and draw(st.booleans()):
                case.body["model"] = draw(st.sampled_from(MODELS))
            # Random tensors are mostly invalid, because the schema cannot describe the rules between tensors.
            if operation.path.endswith("/infer") and draw(st.booleans()):
                case.body, case.media_type = draw(altered(draw(st.sampled_from(INFERENCES)))), "application/json"
            return case

        if count:
            self._make_sessions()
            seed(first_seed)(settings(max_examples=count, **OPTIONS)(given(cases())(check)))()

    def _make_sessions(self) -> None:
        """Creates the sessions whose ids the random requests use."""
        for index, session in enumerate(SESSIONS):
            self._client.post("/v1/sessions", json={"session": session, "model": MODELS[index % 2]})

    def _check(self, case: Case) -> None:
        self._note_sessions(case)
        response = case.call(headers=AUTHORIZED, timeout=TIMEOUT_S)
        self.judge(case, response)
        if case.operation.method == "delete" and response.status_code == 204:
            self._make_sessions()
        if case.operation.path.endswith("/unload") and response.status_code == 200:  # later requests need the model
            self._client.post(f"/v2/repository/models/{case.path_parameters['name']}/load").raise_for_status()

    def _check_without_key(self, case: Case) -> None:
        response = case.call(timeout=TIMEOUT_S)
        self.statuses[response.status_code] += 1
        if case.operation.path not in OPEN:
            allowed = {401, 404}
            if "upgrade" in map(str.lower, case.headers or ()):  # the connection refuses it before it knows the route
                allowed.add(400)
            assert response.status_code in allowed, (case.as_curl_command(), response.status_code)

    def _binary(self, count: int, first_seed: int) -> None:
        """Sends random requests with binary tensors."""

        def check(message: Message) -> None:
            headers = {"content-type": "application/octet-stream"}
            if message.header_length is not None and message.header_length.isascii():
                headers["inference-header-content-length"] = message.header_length
            if message.encoding is not None:
                headers["content-encoding"] = message.encoding
            for model in MODELS:
                self.sessions |= {f"{model}:{one}" for one in range(1, 10)}
                try:
                    response = self._client.post(f"/v2/models/{model}/infer", content=message.body, headers=headers)
                except httpx.LocalProtocolError:  # the header is not valid in HTTP
                    return
                status = response.status_code
                self.statuses[status] += 1
                self.routes["POST /v2/models/{name}/infer", status] += 1
                assert status < 500 or status in ALLOWED, (message, status, response.text[:500])

        if count:
            seed(first_seed)(settings(max_examples=max(1, count // 2), **OPTIONS)(given(messages())(check)))()

    def judge(self, case: Case, response: schemathesis.Response) -> None:
        """Checks one answer. If the check fails, adds a finding to `findings`, and raises the error."""
        try:
            self._judge(case, response)
        except BaseException as error:
            self.findings.append(f"{case.as_curl_command()} was answered {response.status_code}: {error}")
            raise

    def _judge(self, case: Case, response: schemathesis.Response) -> None:
        status = response.status_code
        self.statuses[status] += 1
        self.routes[case.operation.label, status] += 1
        assert status < 500 or status in ALLOWED, response.text[:500]
        kind = (response.headers.get("content-type") or [""])[0]
        if status < 500:
            # The OpenAPI description declares server-sent events as one text, which schemathesis cannot check.
            # test_openapi.py checks the events.
            checks = CHECKS[1:] if kind.startswith("text/event-stream") else CHECKS
            case.validate_response(response, checks=checks)
        if status < 300 and "json" in kind:
            self._note(response.json())

    def _linked(self, count: int, first_seed: int) -> None:
        """Sends requests along links: each request uses values of an earlier answer."""
        fuzz = self

        class Linked(self.schema.as_state_machine()):  # type: ignore[misc]
            def get_call_kwargs(self, case: Case) -> dict[str, Any]:
                fuzz._note_sessions(case)
                return {"headers": AUTHORIZED, "timeout": TIMEOUT_S}

            def validate_response(self, response: schemathesis.Response, case: Case, *_: object, **__: object) -> None:
                fuzz.judge(case, response)

        machine: type[APIStateMachine] = Linked
        enough = self.statuses.total() + count
        for again in range(MOST_RUNS):
            left = enough - self.statuses.total()
            if left <= 0:
                return
            examples = max(1, left // LINKED_STEPS)
            options = settings(max_examples=examples, stateful_step_count=LINKED_STEPS, **OPTIONS)
            # Answers depend on the server's state, so hypothesis may report that the test is flaky.
            with suppress(Flaky):
                seed(first_seed + again)(machine).run(settings=options)
            assert not self.findings, self.findings[0]

    # Sessions that requests may have created

    def _note_sessions(self, case: Case) -> None:
        """Adds to `self.sessions` the sessions that a request may create."""
        if not isinstance(case.body, dict):
            return
        self._note(case.body)
        parameters = case.body.get("parameters")
        sequence = parameters.get("sequence_id") if isinstance(parameters, dict) else None
        if isinstance(sequence, int | str) and "name" in (case.path_parameters or {}):
            self.sessions.add(f"{case.path_parameters['name']}:{sequence}")

    def _note(self, document: Any) -> None:
        if isinstance(document, dict) and isinstance(document.get("session"), str):
            self.sessions.add(document["session"])
        if isinstance(document, dict) and isinstance(document.get("steps"), list):
            for step in document["steps"]:
                self._note(step)

    # The checks at the end

    def memory_mib(self) -> float:
        """Returns the server's resident memory, in MiB."""
        lines = Path(f"/proc/{self._server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def check_left_behind(self) -> None:
        """Checks that every model answers, that every session can be deleted, and that no session or queued item is
        left afterwards."""
        client = self._client
        for model in MODELS:
            assert client.post(f"/v2/repository/models/{model}/load").status_code == 200
            assert client.post("/v1/predict", json={"model": model, "tokens": [5]}).status_code == 200
        for session in self.sessions:
            if is_session_id(session):
                status = client.delete(f"/v1/sessions/{quote(session, safe='')}").status_code
                assert status in (204, 404), (session, status)
        end = time.monotonic() + SETTLED_S
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.2)
        assert not left, left

    def _left(self) -> list[str]:
        """Returns a line for each model that still has sessions, and for each queue that still has items. The
        result should be empty, because all requests have been answered."""
        models = self._client.get("/v1/report").json()["models"]
        found = [
            f"{model['model']} has sessions: {model['sessions']}"
            for model in models
            if model["sessions"]["resident"] or model["sessions"]["parked"]
        ]
        metrics = self._client.get("/metrics").text.splitlines()
        found += [line for line in metrics if line.startswith("wane_queue_items{") and not line.endswith(" 0.0")]
        return found


def fuzz(count: int, first_seed: int = 0) -> HttpFuzz:
    """Starts a server and sends `count` requests. Raises AssertionError for a finding."""
    with served() as server:
        found = HttpFuzz(server)
        found.run(count, first_seed)
        return found
