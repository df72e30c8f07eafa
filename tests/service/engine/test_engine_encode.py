"""Tests of the encoding of text. The engine refuses a text without encoding it if a lower bound of its number of tokens
exceeds the limit. The engine encodes long texts on another thread than the event loop's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from tokenizers import Encoding as Encoded

from tests.service.engine_harness import TIMEOUT_S, EngineHarness, MakeHarness, name_vocabulary
from wane.service.errors import DeadlineExceeded, InvalidRequest, TooLarge, Unavailable

LONG = "The history\nof the " * 500


class Encoding:
    """A replacement for a vocabulary's `encode`. Appends each text to `texts`, and waits until the test sets `gate`."""

    def __init__(self, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self._encode = harness.vocabulary.encode
        self.texts: list[str] = []
        self.gate = threading.Event()
        self.busy = threading.Event()
        monkeypatch.setattr(harness.vocabulary, "encode", self)

    def __call__(self, text: str, most: int | None = None) -> list[int]:
        self.texts.append(text)
        self.busy.set()
        assert self.gate.wait(TIMEOUT_S), "the test has not set `gate`"
        return self._encode(text, most)


@pytest.fixture
def encoding(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> Encoding:
    return Encoding(harness, monkeypatch)


async def test_long_text_is_encoded_by_the_models_vocabulary(harness: EngineHarness) -> None:
    assert await harness.engine.encode(LONG) == tuple(harness.vocabulary.encode(LONG))


@pytest.mark.parametrize("text", ["x" * 5 * 65_537, "\n" * 65_537, "é\n" * 47_000], ids=len)
async def test_a_text_that_is_certainly_over_the_limit_is_refused_without_encoding(
    harness: EngineHarness, encoding: Encoding, text: str
) -> None:
    # In this vocabulary no token has more than five bytes, and a line break is a token. So the engine knows a lower
    # bound of the number of tokens before it encodes the text.
    with pytest.raises(TooLarge, match=r"the input has at least 65\d\d\d tokens, but at most 65536 are allowed"):
        await harness.engine.encode(text)
    assert encoding.texts == []


async def test_a_text_over_the_limit_is_refused_before_its_ids_are_listed(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(max_input_tokens=5000)
    taken = []

    class Counted:
        """An encoded text that records each access to its token ids."""

        def __init__(self, encoding: Encoded) -> None:
            self._encoding = encoding

        def __len__(self) -> int:
            return len(self._encoding)

        @property
        def ids(self) -> list[int]:
            taken.append(len(self))
            return self._encoding.ids

    encodings = harness.vocabulary._encodings
    monkeypatch.setattr(harness.vocabulary, "_encodings", lambda lines: [Counted(one) for one in encodings(lines)])
    with pytest.raises(TooLarge, match="the input has at least 6005 tokens, but at most 5000 are allowed"):
        await harness.engine.encode("abcd\n" + "x" * 6000)
    assert taken == [4]


async def test_a_word_of_any_length_is_one_token(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary("words"), max_input_tokens=2)
    assert await harness.engine.encode("x" * 100_000) == (1,)
    with pytest.raises(TooLarge):
        await harness.engine.encode("x\nx\nx\n")


async def test_a_model_of_events_refuses_text_and_shows_how_to_write_events(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary("events"))
    with pytest.raises(InvalidRequest, match=r'reads events: write "events": \["open", "read"\] instead'):
        await harness.engine.encode("open read")


async def test_an_example_shows_no_controls_of_a_terminal(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary("events", ["\x9b2J"]))
    with pytest.raises(InvalidRequest, match=r'write "events": \["\\u009b2J"\] instead'):
        await harness.engine.encode("open read")


async def test_a_deadline_applies_while_a_text_is_encoded(
    harness: EngineHarness, encoding: Encoding, travel: Callable[[float], None]
) -> None:
    deadline = asyncio.get_running_loop().time() + 3600
    late = asyncio.create_task(harness.engine.encode(LONG, deadline))
    assert await asyncio.to_thread(encoding.busy.wait, TIMEOUT_S)
    waiting = asyncio.create_task(harness.engine.encode(LONG * 2, deadline))
    await asyncio.sleep(0)
    travel(2 * 3600)
    for task in (late, waiting):
        with pytest.raises(DeadlineExceeded):
            await task
    encoding.gate.set()
    assert await harness.engine.encode(LONG) == tuple(harness.vocabulary.encode(LONG))
    assert LONG * 2 not in encoding.texts, "an abandoned text must not be encoded"


async def test_long_texts_do_not_use_the_event_loops_threads(harness: EngineHarness, encoding: Encoding) -> None:
    tasks = [asyncio.create_task(harness.engine.encode(LONG)) for _ in range(64)]
    assert await asyncio.to_thread(encoding.busy.wait, TIMEOUT_S)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), TIMEOUT_S) == "free"
    encoding.gate.set()
    assert len(set(await asyncio.gather(*tasks))) == 1


async def test_draining_waits_for_texts_in_encoding_and_refuses_new_texts(
    harness: EngineHarness, encoding: Encoding
) -> None:
    admitted = asyncio.create_task(harness.engine.encode(LONG))
    assert await asyncio.to_thread(encoding.busy.wait, TIMEOUT_S)
    draining = asyncio.create_task(harness.engine.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    for text in ("short", LONG):
        with pytest.raises(Unavailable, match="stopping"):
            await harness.engine.encode(text)
    encoding.gate.set()
    assert await admitted
    await draining


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udfff" + "x" * 5000], ids=len)
async def test_half_of_a_surrogate_pair_is_refused_with_its_index(harness: EngineHarness, text: str) -> None:
    with pytest.raises(InvalidRequest, match="character 2 of the text is half of a surrogate pair") as caught:
        await harness.engine.encode(text)
    assert caught.value.field == "input"
