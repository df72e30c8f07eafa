from __future__ import annotations

import pytest

from tests.service.engine_harness import byte_vocabulary, name_vocabulary
from wane.models.vocabulary import Vocabulary
from wane.service.engine.generate import TextStream

BYTES = byte_vocabulary()


def pushed(stream: TextStream, tokens: list[int]) -> list[str]:
    """Adds the tokens to the stream one by one. Returns the text that each token adds, up to the token that completes a
    stop string."""
    pieces = []
    for index, token in enumerate(tokens):
        pieces.append(stream.push(token, final=index == len(tokens) - 1))
        if stream.stopped:
            break
    return pieces


@pytest.mark.parametrize(
    ("vocabulary", "tokens"),
    [
        (BYTES, BYTES.encode("Grüße, 世界 🙂\nzwei")),
        (BYTES, BYTES.encode("🙂")[:3]),
        (BYTES, [1, 0, 1]),
        (name_vocabulary("words"), [2, 3, 0, 4, 1]),
        (name_vocabulary("events"), [2, 3, 4, 1]),
    ],
    ids=["bpe", "unfinished", "special", "words", "events"],
)
def test_the_joined_pieces_equal_the_text_that_the_vocabulary_decodes(
    vocabulary: Vocabulary, tokens: list[int]
) -> None:
    stream = TextStream(vocabulary, ())
    assert "".join(pushed(stream, tokens)) == vocabulary.decode(tokens) == stream.text
    assert stream.tokens == tokens


def test_an_unfinished_character_is_withheld() -> None:
    assert pushed(TextStream(BYTES, ()), BYTES.encode("aü🙂")) == ["a", "", "ü", "", "", "", "🙂"]


def test_a_possible_stop_string_is_withheld_until_it_is_ruled_out() -> None:
    assert pushed(TextStream(BYTES, ("abc",)), BYTES.encode("xababd")) == ["x", "", "", "ab", "", "abd"]


def test_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    stream = TextStream(BYTES, (". The",))
    pieces = pushed(stream, BYTES.encode("End. The next"))
    assert (stream.stopped, stream.text, "".join(pieces)) == (True, "End", "End")
    assert stream.tokens == BYTES.encode("End. The")


def test_the_earliest_of_several_stop_strings_stops() -> None:
    stream = TextStream(BYTES, ("zzz", "lo", "hello"))
    pushed(stream, BYTES.encode("say hello"))
    assert stream.text == "say "


def test_a_multibyte_stop_string_is_found() -> None:
    stream = TextStream(BYTES, ("ß",))
    pushed(stream, BYTES.encode("Grüße"))
    assert stream.text == "Grü"


def test_text_before_a_stop_string_in_one_token_is_kept() -> None:
    stream = TextStream(name_vocabulary("words"), ("ad",))
    assert pushed(stream, [2, 3, 4]) == ["open", " re"]


def test_the_last_token_withholds_nothing() -> None:
    assert pushed(TextStream(BYTES, ("abc",)), BYTES.encode("xab")) == ["x", "", "ab"]


def test_a_line_break_can_stop_text() -> None:
    stream = TextStream(BYTES, ("\n",))
    pushed(stream, [*BYTES.encode("one"), BYTES.eos_id, *BYTES.encode("two")])
    assert stream.text == "one"


def test_a_sequence_of_events_ends_at_its_eos() -> None:
    stream = TextStream(name_vocabulary("events"), ())
    pushed(stream, [2, 3, 0, 4])
    assert (stream.stopped, stream.text, stream.tokens) == (True, "open\nread", [2, 3, 0])
