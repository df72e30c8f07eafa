"""Random bodies for the route of completions. Some are random JSON, others are valid or nearly valid.

The server must answer a body with a completion, or refuse it with a status below 500 and an error in OpenAI's format.
The engine runs a small model, so valid bodies are completed by a model.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.service.conftest import never
from tests.service.engine_harness import EngineHarness
from tests.service.server_harness import OneEngine
from wane.service.api.schemas.completions import CompletionBody
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
IDS = st.lists(st.integers(-1, 260), max_size=6)
TEXTS = st.text(max_size=12) | st.sampled_from(["\ud800", "\n\n", "<eos>", "\u4e16"])
NUMBERS = st.sampled_from([0, 1, -1, 2, 0.5, 1e-9, 1e300, -2.5, 3, 101, 2**64, None])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "fake", "fake", "other", ""]),
    "prompt": TEXTS | IDS | st.lists(TEXTS, max_size=3) | st.lists(IDS, max_size=3),
    "max_tokens": st.integers(-1, 4) | st.none(),
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "n": st.integers(0, 3) | st.none(),
    "stream": st.booleans() | st.none(),
    "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": JSON}),
    "logprobs": st.integers(-1, 101) | st.none(),
    "echo": st.booleans() | st.none(),
    "stop": TEXTS | st.lists(TEXTS, max_size=18) | st.none(),
    "seed": st.integers(-(2**64), 2**64) | st.none(),
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "logit_bias": st.dictionaries(st.sampled_from(["0", "5", "07", "x", "999", "-1"]), NUMBERS, max_size=3),
    "user": st.text(max_size=4) | st.none(),
    "suffix": st.sampled_from(["", None, "x"]),
    "best_of": st.integers(0, 3) | st.none(),
    "include_unknown": st.booleans(),
    "session": st.sampled_from(["a", "b", "a b", None]),
    "expected_position": st.integers(-1, 3) | st.none(),
}
assert FIELDS.keys() == set(CompletionBody.__struct_fields__), "FIELDS and CompletionBody have different fields"


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Returns a body with the required fields and some of the others. At most one field has a random JSON value."""
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=6)) | {"model", "prompt"}
    body = {name: draw(FIELDS[name]) for name in sorted(names)}
    if draw(st.integers(0, 5)) == 0:
        body[draw(st.sampled_from([*sorted(FIELDS), "top_k"]))] = draw(JSON)
    return body


BODIES = bodies() | JSON


class Served:
    """The application with the engine of a small model. Both run on the same new event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self.harness = EngineHarness()
        registry = cast(ModelRegistry, OneEngine(self.harness.engine))
        app = create_app(Settings(max_generated_tokens=8), registry, Metrics(), on_load_failure=never)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wane")
        for session in ("a", "b"):
            await self.harness.engine.create_session(session)

    def answer(self, content: bytes) -> httpx.Response:
        """Sends a body and returns the response."""
        return self.loop.run_until_complete(self.client.post("/v1/completions", content=content))

    def close(self) -> None:
        """Checks that no request holds a slot of the state pool or the lock of a session, and closes everything."""
        self.loop.run_until_complete(self._close())
        self.loop.close()

    async def _close(self) -> None:
        await self.client.aclose()
        await self.harness.engine.drain()
        self.harness.engine.state_cache.check_integrity(idle=True)
        for session in ("a", "b"):
            await self.harness.engine.delete_session(session, self.loop.time() + 10)
        await self.harness.engine.close()


def check(response: httpx.Response) -> None:
    """Checks the response to a body: a completion, or an error in OpenAI's format."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *_, last = response.text.strip().split("\n\n")
        assert last == "data: [DONE]", last
        return
    document = response.json()
    if response.is_success:
        assert document["object"] == "text_completion"
        assert all(choice["finish_reason"] in ("stop", "length") for choice in document["choices"])
        return
    assert response.status_code < 500, response.text
    assert document["error"].keys() == {"message", "type", "param", "code"}


def fuzz(cases: int, first_seed: int = 0) -> dict[int, int]:
    """Sends random bodies. Returns the number of answers by status."""
    served, seen = Served(), dict[int, int]()

    @seed(first_seed)
    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(BODIES)
    def one(body: Any) -> None:
        response = served.answer(json.dumps(body).encode())
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        check(response)

    try:
        one()
    finally:
        served.close()
    return seen
