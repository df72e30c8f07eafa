"""Random input for the parsers of the service: binary tensors, tokenizer files, bundles.

Each parser must accept an input or reject it with its own error. Any other exception is a finding. A parser's test is a
function of one random case. `PARSERS` lists these tests. To fuzz another parser, such as that of another protocol's
body, add an entry to `PARSERS`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from starlette.requests import Request

from tests.models.bundles import words_tokenizer, write_small_bundle
from tests.service.conftest import never
from tests.service.engine_harness import name_vocabulary
from tests.service.fake_engine import FakeEngine, FakeRegistry
from wane.models.bundle import Bundle, BundleError
from wane.models.vocabulary import Vocabulary
from wane.service.api.disconnect import WHOLE_BODY
from wane.service.api.exchange import RequestContext
from wane.service.api.routes.infer import decoded_call, rows_of
from wane.service.api.tensors import EVENTS, INPUTS, LENGTHS, OUTPUTS, SOURCES
from wane.service.app import Application, create_app
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventNames
from wane.service.errors import WaneError
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

MOST_BODY_BYTES = 1 << 16
LONGEST_MESSAGE = 500
AT_ONCE = 5000
"""The largest number of cases in one run of hypothesis, because hypothesis uses memory for every case until the run
ends."""

JUNK: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2, 1.5, 2**31, 2**63, -(2**63), 10**40, "", "1", [], [[]], {}]),
    st.floats(),
    st.text(max_size=5),
    st.integers(),
)


def run(test: Callable[[Any], None], cases: st.SearchStrategy[Any], count: int, first_seed: int = 0) -> int:
    """Runs a test on random cases, and returns the number of cases. If a case fails, hypothesis reduces the case. The
    error of the reduced case is then raised, and its notes contain this case."""
    done = 0

    def counted(case: Any) -> None:
        nonlocal done
        done += 1
        test(case)

    for start in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - start)
        options = settings(
            max_examples=size, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck)
        )

        seed(first_seed + start)(options(given(cases)(counted)))()
    return done


# Binary tensors


@dataclass(frozen=True, slots=True)
class Message:
    """A request to `infer`."""

    body: bytes
    header_length: str | None = None
    encoding: str | None = None


@st.composite
def tensors(draw: st.DrawFn, names: Sequence[str], rows: int) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON of an input tensor with one of `names` and with `rows` rows, and its binary data."""
    name = draw(st.sampled_from(names))
    shape = [rows, draw(st.integers(1, 4))][: len(INPUTS[name].shape)]
    count = int(np.prod(shape))
    tensor: dict[str, Any] = {"name": name, "shape": shape, "datatype": INPUTS[name].datatype}
    rank, is_text = len(shape), tensor["datatype"] == "BYTES"
    values: list[Any]
    if is_text:
        values = draw(st.lists(st.text(max_size=6), min_size=count, max_size=count))
    else:
        largest = 1 if name == "lengths" else 255
        values = draw(st.lists(st.integers(largest // 255, largest), min_size=count, max_size=count))
    raw = b""
    if draw(st.booleans()):
        tensor["data"] = values
        if rank == 2 and draw(st.booleans()):
            tensor["data"] = [values[at : at + shape[1]] for at in range(0, count, shape[1])]
    elif is_text:
        encoded = [value.encode(errors="replace") for value in values]
        raw = b"".join(struct.pack("<I", len(value)) + value for value in encoded)
    else:
        raw = np.array(values, "<i8").tobytes()
    if "data" not in tensor:
        tensor["parameters"] = {"binary_data_size": len(raw)}
    return tensor, raw


PARAMETERS = {
    "mode": st.sampled_from(["auto", "recurrent", "window", "both"]),
    "window": st.integers(1, 20),
    "tolerance": st.floats(0, 1),
    "truncated": st.booleans(),
    "expected_position": st.integers(0, 5),
    "priority": st.integers(0, 5),
    "timeout": st.integers(10**6, 10**7),
    "sequence_id": st.one_of(st.integers(0, 9), st.sampled_from(["1", "2", "", "a/b", "é"])),
    "sequence_start": st.booleans(),
    "sequence_end": st.booleans(),
    "binary_data_output": st.booleans(),
}


def paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a document."""
    yield path
    if isinstance(document, dict):
        for name, value in document.items():
            yield from paths(value, (*path, name))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from paths(value, (*path, index))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of the document in which the value at `path` is `value`."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = changed(document[path[0]], path[1:], value)
    return copy


@st.composite
def altered(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """Returns a document with up to `most` changes. A change replaces, removes or adds a value."""
    for _ in range(max(draw(st.integers(-2, most)), 0)):
        path = draw(st.sampled_from([*paths(document)]))
        kind = draw(st.sampled_from(["replace", "remove", "add"]))
        if kind == "replace" or not path:
            document = changed(document, path, draw(JUNK))
        elif kind == "add":
            document = changed(document, path, {draw(st.text(max_size=3)): draw(JUNK)})
        else:
            holder: Any = document
            for part in path[:-1]:
                holder = holder[part]
            rest = holder.copy()
            del rest[path[-1]]
            document = changed(document, path[:-1], rest)
    return document


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Returns a request: a valid one, one with changed fields, or random bytes."""
    if draw(st.integers(0, 29)) == 29:
        raw = draw(st.binary(max_size=200))
        return Message(raw, draw(st.none() | st.text(max_size=4)), draw(st.sampled_from([None, "gzip", "deflate"])))
    rows = draw(st.integers(1, 3))
    parts = [draw(tensors(SOURCES, rows))]
    if draw(st.booleans()):
        parts.append(draw(tensors([*INPUTS, LENGTHS, LENGTHS, LENGTHS], rows)))
    document: Any = {"inputs": [tensor for tensor, _ in parts]}
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(sorted(OUTPUTS)), max_size=4, unique=draw(st.integers(0, 9)) < 9))
        document["outputs"] = [{"name": name, "parameters": {"binary_data": draw(st.booleans())}} for name in names]
    if draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(sorted(PARAMETERS)), unique=True, max_size=3))
        document["parameters"] = {name: draw(PARAMETERS[name]) for name in chosen}
    document = draw(altered(document))
    binary = b"".join(raw for _, raw in parts)
    head = json.dumps(document).encode()
    kind = draw(st.integers(-9, 2))
    if kind == 0:
        binary = binary[: draw(st.integers(0, len(binary)))]
    elif kind == 1:
        binary += draw(st.binary(min_size=1, max_size=9))
    elif kind == 2 and binary:
        at = draw(st.integers(0, len(binary) - 1))
        binary = binary[:at] + draw(st.binary(min_size=1, max_size=4)) + binary[at + 1 :]
    length: str | None = str(len(head))
    if not binary and draw(st.booleans()):
        length = None
    if draw(st.integers(0, 9)) == 9:
        length = draw(st.one_of(st.none(), st.integers(-3, len(head) + len(binary) + 3).map(str), st.text(max_size=3)))
    body, encoding = head + binary, None
    if draw(st.integers(0, 4)) == 4:
        encoding = draw(st.sampled_from(["gzip", "deflate", "br", "identity", ""]))
        if encoding == "gzip":
            body = gzip.compress(body)
        elif encoding == "deflate":
            body = zlib.compress(body)
        if draw(st.integers(0, 4)) == 4:
            body = body[: draw(st.integers(0, len(body)))] + draw(st.binary(max_size=3))
    return Message(body, length, encoding)


@cache
def application() -> Application:
    """Returns the application with a fake engine."""
    options = Settings(max_body_bytes=MOST_BODY_BYTES)
    return create_app(options, cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=never)


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def check_message(message: Message) -> None:
    """Parses a request. Checks that each tensor has the announced shape, or that the error is one of Wane's."""
    headers = {}
    if message.header_length is not None:
        headers[b"inference-header-content-length"] = message.header_length.encode(errors="replace")
    if message.encoding is not None:
        headers[b"content-encoding"] = message.encoding.encode()
    context = RequestContext("fuzz", headers=headers, timeout_s=30.0, deadline=loop().time() + 30)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v2/models/fake/infer",
        "headers": [*headers.items()],
        "app": application(),
        "wane.context": context,
        WHOLE_BODY: message.body,
    }

    async def parse() -> None:
        call = await decoded_call(Request(scope))
        for name, tensor in call.inputs.items():
            assert len(tensor.shape) == len(INPUTS[name].shape) and min(tensor.shape) > 0
            if isinstance(tensor.values, list):
                assert len(tensor.values) == np.prod(tensor.shape)
                assert all(isinstance(value, str) for value in tensor.values)
            else:
                assert tensor.values.shape == tensor.shape and tensor.values.dtype == np.int64
        assert call.wanted and call.names <= OUTPUTS
        engine = FakeEngine()
        if EVENTS in call.inputs:
            engine.vocabulary = vocabulary = name_vocabulary("events")
            engine.events = EventNames(engine.manifest.model_copy(update={"unknown": "token"}), vocabulary, Settings())
        rows = await rows_of(cast(Engine, engine), call, application().settings, 256)
        assert rows and all(row.tokens for row in rows)

    try:
        loop().run_until_complete(parse())
    except WaneError as error:
        assert error.http_status < 500, repr(error)
        assert len(error.message) < LONGEST_MESSAGE, error.message


# Tokenizer files


def tokenizers() -> st.SearchStrategy[bytes]:
    """Returns tokenizer files: files with changed fields, truncated files, and random bytes."""
    whole: Any = json.loads(words_tokenizer())
    edited = altered(whole).map(lambda document: json.dumps(document).encode())
    cut = st.integers(0, 400).map(lambda place: words_tokenizer().encode()[:place])
    return st.one_of(edited, edited, cut, st.binary(max_size=50))


def check_tokenizer(content: bytes) -> None:
    """Reads a tokenizer file and encodes a text with it."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(content)
        for kind in ("words", "bpe"):
            with suppress(ValueError):
                vocabulary = Vocabulary.read(kind, path)
                with suppress(ValueError):
                    assert all(0 <= token < vocabulary.size for token in vocabulary.encode("a b zz\nc"))
        with suppress(ValueError):
            vocabulary = Vocabulary.read("events", path)
            with suppress(ValueError):
                assert all(0 <= token < vocabulary.size for token in vocabulary.encode_events(["a", "zz"]))


# Bundles


@cache
def small_bundle() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the manifest and the other files of a small bundle."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small"
        write_small_bundle(path)
        files = {one.name: one.read_bytes() for one in path.iterdir()}
    return json.loads(files.pop("manifest.json")), files


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """The files of a bundle."""

    manifest: bytes
    files: dict[str, bytes]


@st.composite
def bundles(draw: st.DrawFn) -> BundleFiles:
    """Returns a bundle with a changed or random manifest, with a missing file, or with a damaged file whose hash in the
    manifest is correct."""
    manifest, files = small_bundle()
    files = dict(files)
    kind = draw(st.sampled_from(["manifest", "weights", "tokenizer", "raw", "missing"]))
    if kind == "manifest":
        manifest = draw(altered(manifest))
    elif kind == "raw":
        return BundleFiles(draw(st.binary(max_size=100)), files)
    elif kind == "missing":
        del files[draw(st.sampled_from(sorted(files)))]
    else:
        name = "weights.safetensors" if kind == "weights" else "tokenizer.json"
        content = bytearray(files[name])
        for _ in range(draw(st.integers(1, 4))):
            content[draw(st.integers(0, min(len(content) - 1, 600)))] = draw(st.integers(0, 255))
        cut = draw(st.integers(0, len(content))) if draw(st.integers(0, 3)) == 0 else len(content)
        files[name] = bytes(content[:cut])
        digest = hashlib.sha256(files[name]).hexdigest()
        manifest = changed(manifest, ("files", name), digest)
        if kind == "tokenizer":
            manifest = changed(manifest, ("vocabulary", "sha256"), digest)
    return BundleFiles(json.dumps(manifest).encode(), files)


def check_bundle(bundle: BundleFiles) -> None:
    """Reads a bundle. Any error except BundleError is a finding."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small"
        path.mkdir()
        (path / "manifest.json").write_bytes(bundle.manifest)
        for name, content in bundle.files.items():
            (path / name).write_bytes(content)
        with suppress(BundleError):
            Bundle.read(path)


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser's test, its random cases, and the share of all cases that this parser gets. The share is smaller if a
    case takes longer."""

    cases: Callable[[], st.SearchStrategy[Any]]
    check: Callable[[Any], None]
    share: float


PARSERS = {
    "tensors": Parser(messages, check_message, 0.7),
    "tokenizers": Parser(tokenizers, check_tokenizer, 0.2),
    "bundles": Parser(bundles, check_bundle, 0.1),
}


def fuzz(name: str, count: int, first_seed: int = 0) -> int:
    """Tests one parser with its share of `count` cases. Returns the number of these cases."""
    parser = PARSERS[name]
    return run(parser.check, parser.cases(), max(1, round(count * parser.share)), first_seed)
