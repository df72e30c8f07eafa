from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.service.engine_harness import byte_vocabulary, name_vocabulary
from wane.models.vocabulary import LINES_AT_ONCE, Vocabulary

BYTES = byte_vocabulary()
WORDS = name_vocabulary("words")
EVENTS = name_vocabulary("events")


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", []), ("\n", [0]), ("open", [2]), ("open\n", [2, 0]), ("\n\nopen  shut\nread", [0, 0, 2, 1, 0, 3])],
    ids=repr,
)
def test_a_line_break_is_encoded_as_eos(text: str, ids: list[int]) -> None:
    assert WORDS.encode(text) == ids


def test_the_ids_of_events() -> None:
    assert [EVENTS.event_id(name) for name in ("open", "close", "halt", "<eos>")] == [2, 4, None, 0]
    assert EVENTS.event_id("<unk>") is None
    assert (EVENTS.unlisted, WORDS.unlisted) == ((0, 1), (1,))


def test_a_text_longer_than_one_batch_of_lines_is_encoded_completely() -> None:
    assert WORDS.encode("open\n" * (3 * LINES_AT_ONCE)) == [2, 0] * (3 * LINES_AT_ONCE)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_text_round_trips(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


@pytest.mark.parametrize("vocabulary", [BYTES, WORDS], ids=lambda one: one.kind)
@settings(deadline=None)
@given(text=st.text(alphabet="open read\nxé"))
def test_fewest_tokens_is_a_lower_bound_of_the_number_of_tokens(vocabulary: Vocabulary, text: str) -> None:
    assert 0 <= vocabulary.fewest_tokens(text) <= len(vocabulary.encode(text))


@pytest.mark.parametrize("vocabulary", [BYTES, WORDS], ids=lambda one: one.kind)
def test_half_of_a_surrogate_pair_is_refused_with_its_position(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="character 1 of the text is half of a surrogate pair"):
        vocabulary.encode("a\ud800")


def test_usual_names_of_padding_and_masks_are_reserved() -> None:
    events = name_vocabulary(names=("open", "[PAD]", "read", "<mask>"))
    assert events.reserved == {3, 5}
    assert events.unlisted == (0, 1, 3, 5)
    assert [events.event_id(name) for name in ("open", "[PAD]", "<mask>")] == [2, None, None]
    assert events.never_drawn() == {1, 3, 5}
    assert events.never_drawn(include_unknown=True) == {3, 5}
    with pytest.raises(ValueError, match=r"it contains '\[PAD\]', which the vocabulary reserves"):
        events.encode_events(["open", "[PAD]"])
    words = name_vocabulary("words", names=("open", "[PAD]", "read"))
    assert words.encode("open read") == [2, 4]
    with pytest.raises(ValueError, match=r"it contains '\[PAD\]', which the vocabulary reserves"):
        words.encode("open\nopen [PAD]")


def _json(*names: str) -> str:
    ids = {name: index for index, name in enumerate(("<eos>", "<unk>", *names))}
    json: str = Tokenizer(models.WordLevel(ids, "<unk>")).to_str()
    return json


def test_reserved_tokens_can_be_given() -> None:
    json = _json("[PAD]", "read", "open")
    assert Vocabulary("events", json, (4,)).reserved == {4}
    assert Vocabulary("events", json, ()).reserved == set()
    assert Vocabulary("events", json, ()).event_id("[PAD]") == 2
    for wrong in (0, 1, 5, -1):
        with pytest.raises(ValueError, match="the reserved tokens are"):
            Vocabulary("events", json, (wrong,))
