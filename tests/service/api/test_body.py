"""Tests that the server refuses an invalid or large body without decoding or validating much of it."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from pydantic_core import from_json, to_json
from starlette.requests import Request
from websockets.sync.client import connect as connect_sync

from tests.service.api.routes.test_stream import url_of
from tests.service.live_server import LiveServer
from tests.service.problems import assert_problem
from wane.service.api import body as decoding
from wane.service.api import faults
from wane.service.api.body import LARGE_BYTES, MOST_FIELDS, Decoder, decode
from wane.service.api.exchange import RequestContext
from wane.service.api.routes.inference import UnloadBody
from wane.service.api.schemas.completions import CompletionBody
from wane.service.api.schemas.sessions import RewindBody, StepsBody, StreamBody
from wane.service.errors import DeadlineExceeded, InvalidRequest, NotJson, TooLarge, WaneError, truncate_repr
from wane.service.settings import Settings
from wane.service.types.body import Body
from wane.service.types.generate import GenerateBody
from wane.service.types.predict import CompareBody, PredictBody, ScoreBody

UNKNOWN = {f"unknown {index}": 1 for index in range(1000)}
BODY_BYTES = 4 * 2**20
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(Settings(max_batch_inputs=1000))


async def refusal(decoder: Decoder, model: type[Body], document: object) -> InvalidRequest:
    """Decodes a request body that contains `document` as JSON. Returns the decoder's error."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": to_json(document)}

    app = SimpleNamespace(state=SimpleNamespace(decoder=decoder))
    request = Request({"type": "http", "wane.context": RequestContext("id", None), "app": app}, receive)
    with pytest.raises(InvalidRequest) as refused:
        await decode(request, model)
    return refused.value


@pytest.mark.parametrize(
    ("model", "document", "field"),
    [
        (PredictBody, {"tokens": ["", ""] * 500}, "tokens[0]"),
        (PredictBody, {"inputs": [1, 1] * 500}, "inputs[0]"),
        (PredictBody, {"inputs": [["", ""] * 500]}, "inputs[0][0]"),
        (PredictBody, {"events": [None] * 1000}, "events[0]"),
        (PredictBody, {"inputs": [{"events": [None] * 1000}]}, "inputs[0].events[0]"),
        (PredictBody, UNKNOWN, "unknown 0"),
        (PredictBody, {"tokens": [1], **UNKNOWN}, "unknown 0"),
        (CompareBody, {"tokens": [1], "windows": ["", ""] * 16}, "windows[0]"),
        (CompareBody, {"tokens": [1], "models": [1] * 8}, "models[0]"),
        (GenerateBody, {"tokens": [1], "stop": [1, 1] * 8}, "stop[0]"),
        (StepsBody, {"steps": [{"session": "s", "tokens": [1]}, UNKNOWN]}, "steps[1].unknown 0"),
        (StepsBody, {"steps": [{"tokens": [1]}] * 1000}, "steps[0].session"),
        (UnloadBody, {"parameters": UNKNOWN}, "parameters.unknown 0"),
    ],
    ids=[
        "ids",
        "inputs",
        "ids of an input",
        "events",
        "events of an input",
        "only unknown fields",
        "unknown fields",
        "windows",
        "models",
        "stops",
        "unknown fields of a step",
        "steps",
        "unknown parameters",
    ],
)
async def test_a_body_with_a_thousand_faults_is_described_up_to_the_first(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, model: type[Body], document: object, field: str
) -> None:
    described: list[str] = []
    shown = truncate_repr

    def counted(value: object) -> str:
        described.append(shown(value))
        return described[-1]

    monkeypatch.setattr(faults, "truncate_repr", counted)
    refused = await refusal(decoder, model, document)
    assert refused.field == field
    # A body with a thousand faults must not be described more than once.
    assert len(described) <= 1


LONG: list[tuple[type[Body], dict[str, object], str]] = [
    (ScoreBody, {"tokens": [5] * 8000, "tolerance": "x"}, "tolerance"),
    (ScoreBody, {"tokens": [*[5] * 8000, "x"]}, "tokens[8000]"),
    (PredictBody, {"events": ["a", 5] * 4000, "top_k": "x"}, "top_k"),
    (PredictBody, {"events": [*["a", 5] * 4000, 0.5]}, "events[8000]"),
    (PredictBody, {"inputs": [*[[5] * 40] * 200, {"events": [*["a"] * 40, None]}]}, "inputs[200].events[40]"),
    (CompletionBody, {"model": "m", "prompt": [[5]] * 8000, "n": "x"}, "n"),
    (CompletionBody, {"model": "m", "prompt": [*[[5]] * 8000, [5, "x"]]}, "prompt[8000][1]"),
    (
        CompletionBody,
        {"model": "m", "prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1000)), 1) | {"x": None}},
        "logit_bias.x",
    ),
    (StepsBody, {"steps": [*[{"session": "s", "tokens": [5] * 40}] * 200, {"tokens": [5]}]}, "steps[200].session"),
]


@pytest.mark.parametrize(("model", "document", "field"), LONG, ids=[field for *_, field in LONG])
def test_the_values_of_a_long_list_are_not_compared_one_by_one(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, model: type[Body], document: dict[str, object], field: str
) -> None:
    compared = 0

    def counted(*arguments: Any) -> bool:
        nonlocal compared
        compared += 1
        return fits(*arguments)

    fits = faults._fits
    monkeypatch.setattr(faults, "_fits", counted)
    with pytest.raises(InvalidRequest) as refused:
        decoder.decode_now(to_json(document), model)
    assert refused.value.field == field
    assert 0 < compared < 250


@pytest.mark.parametrize(
    ("model", "document", "refusal"),
    [
        (StepsBody, {"steps": [{}] * 10_000}, r"^steps\[0\].session is missing"),
        (PredictBody, {"inputs": [1] * 10_000}, r"^inputs\[0\] is 1, but"),
    ],
)
def test_the_type_of_the_items_of_a_long_list_is_read_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, model: type[Body], document: dict[str, object], refusal: str
) -> None:
    """A body of up to LARGE_BYTES is read again on the event loop."""
    read = 0

    def counted(*arguments: Any) -> Any:
        nonlocal read
        read += 1
        return choices(*arguments)

    choices = faults._choices
    monkeypatch.setattr(faults, "_choices", counted)
    assert len(to_json(document)) <= LARGE_BYTES
    with pytest.raises(InvalidRequest, match=refusal):
        decoder.decode_now(to_json(document), model)
    assert 0 < read < 250


@pytest.mark.parametrize("value", ["NaN", '["x"]'])
def test_a_rewind_excludes_a_repeated_field_whose_first_value_is_invalid(decoder: Decoder, value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^`rewind` excludes other fields; found `top_k`$"):
        decoder.decode_now(f'{{"rewind": 0, "top_k": {value}, "top_k": 5}}', StreamBody)


MakeBody = Callable[[], bytes]


def filled(before: bytes, item: bytes, after: bytes) -> MakeBody:
    """Returns a function that makes a body of almost BODY_BYTES bytes. The body is `before`, many copies of `item` with
    commas between them, and `after`."""
    return lambda: before + b",".join([item] * ((BODY_BYTES - len(before + after)) // (len(item) + 1))) + after


HUGE: list[tuple[str, type[Body], MakeBody, type[WaneError]]] = [
    ("steps", StepsBody, filled(b'{"steps":[', b'{"session":"s","tokens":[1]}', b"]}"), TooLarge),
    ("empty steps", StepsBody, filled(b'{"steps":[', b"{}", b"]}"), TooLarge),
    ("texts", PredictBody, filled(b'{"inputs":[', b'"a"', b"]}"), TooLarge),
    ("empty lists", PredictBody, filled(b'{"inputs":[', b"[]", b"]}"), TooLarge),
    ("windows", CompareBody, filled(b'{"tokens":[1],"windows":[', b"1", b"]}"), TooLarge),
    ("unknown", PredictBody, filled(b'{"tokens":[1],', b'"topk":1', b"}"), TooLarge),
    ("a message's lists", StreamBody, filled(b'{"tokens":[', b"[]", b"]}"), TooLarge),
    ("ids", PredictBody, filled(b'{"tokens":[', b"5", b"]}"), TooLarge),
    ("ids of inputs", PredictBody, filled(b'{"inputs":[', b"[" + b"1," * 8000 + b"1]", b"]}"), TooLarge),
    ("nested", RewindBody, filled(b'{"position":', b"[" * 150 + b"]" * 150, b"}"), TooLarge),
    ("only opening brackets", PredictBody, lambda: b"[" * BODY_BYTES, TooLarge),
    ("long numbers", PredictBody, filled(b'{"tokens":[', b"9" * 4000, b"]}"), NotJson),
]


class Watched:
    """Wraps the functions that decode bodies and find faults. Records the number of values of each decoded body, the
    fields whose values were compared with their types, and the names of the threads that decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[int] = []
        self.compared: list[object] = []
        self.threads: set[str] = set()
        reader = decoding.reader

        def noted(raw: bytes | str, **named: Any) -> object:
            self.threads.add(threading.current_thread().name)
            document: object = from_json(raw, **named)
            self.values.append(values(document))
            return document

        def decoder_of(kind: Any) -> Any:
            def decode(raw: bytes | str) -> object:
                with suppress(ValueError):
                    noted(raw)
                return reader(kind).decode(raw)

            return SimpleNamespace(decode=decode)

        def compare(document: object, kind: Any) -> Any:
            self.compared.append(document)
            return msgspec.convert(document, kind)

        monkeypatch.setattr(faults, "from_json", noted)
        monkeypatch.setattr(faults, "convert", compare)
        monkeypatch.setattr(decoding, "reader", decoder_of)


def values(document: object) -> int:
    """Returns the number of values in a document, including nested values."""
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return 1 + sum(map(values, inner))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture(scope="module")
def default_decoder() -> Decoder:
    """A decoder with the default settings."""
    return Decoder(Settings())


@pytest.mark.parametrize(("model", "make", "error"), [case[1:] for case in HUGE], ids=[case[0] for case in HUGE])
async def test_a_body_with_too_many_values_is_refused_without_decoding_it(
    default_decoder: Decoder, watched: Watched, model: type[Body], make: MakeBody, error: type[WaneError]
) -> None:
    with pytest.raises(error):
        await default_decoder.decode(make(), model)
    assert watched.values == []


async def test_the_largest_request_that_the_settings_allow_is_decoded(
    default_decoder: Decoder, watched: Watched
) -> None:
    ids = list(range(1000, 1000 + Settings().max_scored_tokens))
    scored = await default_decoder.decode(to_json({"tokens": ids}), ScoreBody)
    assert scored.tokens == array("q", ids)
    step = dict.fromkeys(("expected_position", "mode", "idempotency_key"))
    steps = [{**step, "session": f"s{index}", "top_k": 5, "tokens": [5] * 1000} for index in range(256)]
    assert len((await default_decoder.decode(to_json({"steps": steps}), StepsBody)).steps) == 256
    text = '[a], {"b": 1},\\" ' * (LARGE_BYTES // 4)
    assert (await default_decoder.decode(to_json({"input": text}), ScoreBody)).input == text
    assert all(thread.startswith("decoder") for thread in watched.threads)


def test_no_body_model_has_more_fields_than_the_decoder_allows() -> None:
    bodies = [model for model in Body.__subclasses__() for model in (model, *model.__subclasses__())]
    assert max(len(model.__struct_fields__) for model in bodies) <= MOST_FIELDS


async def test_a_large_body_waits_for_the_decoder_until_its_deadline(
    default_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, busy = threading.Event(), threading.Event()
    excess = decoding.excess

    def wait(*given: Any) -> Any:
        busy.set()
        assert gate.wait(TIMEOUT_S)
        return excess(*given)

    monkeypatch.setattr(decoding, "excess", wait)
    raw = b'{"tokens": [1' + b" " * LARGE_BYTES + b"]}"
    first = asyncio.create_task(default_decoder.decode(raw, PredictBody))
    assert await asyncio.to_thread(busy.wait, TIMEOUT_S)
    with pytest.raises(DeadlineExceeded):
        await default_decoder.decode(raw, PredictBody, asyncio.get_running_loop().time())
    assert (await default_decoder.decode(b'{"tokens": [2]}', PredictBody)).tokens == array("q", [2])
    gate.set()
    assert (await first).tokens == array("q", [1])


def test_the_server_refuses_and_answers_large_bodies_and_messages(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=60) as http:
        for path, body in (("/v1/sessions/tokens", HUGE[0][2]()), ("/v1/predict", HUGE[2][2]())):
            assert_problem(http.post(path, content=body), 413, "too_large")
        assert http.post("/v1/predict", content=b'{"tokens": [1' + b" " * LARGE_BYTES + b"]}").status_code == 200
        http.post("/v1/sessions", json={"session": "large"})
        with connect_sync(url_of(live, "/v1/sessions/large/stream"), max_size=None, proxy=None) as socket:
            for message, said in (
                (HUGE[6][2](), '"code":"too_large"'),
                (b'{"tokens":[1' + b" " * LARGE_BYTES + b"]}", '"position":1'),
            ):
                socket.send(message.decode())
                assert said in str(socket.recv()).replace(": ", ":")
        http.delete("/v1/sessions/large")
