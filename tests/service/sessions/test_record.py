from __future__ import annotations

import pytest

from wane.service.sessions.stores.store import TokenHistory


@pytest.mark.parametrize(("size", "width"), [(258, 2), (65536, 2), (65537, 4)])
def test_a_token_takes_two_bytes_if_every_id_fits(size: int, width: int) -> None:
    tail = TokenHistory.start(0, size).append([size - 1, 1], position=2, keep=8)
    assert tail.width == width
    assert len(tail.data) == 3 * width
    assert tail.ids().tolist() == [0, size - 1, 1]


def test_eos_is_dropped_with_the_first_token() -> None:
    tail = TokenHistory.start(0, 300)
    input_ids = [0]
    for position in range(1, 8):
        input_ids.append(100 + position)
        tail = tail.append([100 + position], position, keep=4)
        assert tail.ids().tolist() == (input_ids if position <= 4 else input_ids[-4:])


def test_appending_many_tokens_equals_appending_one_by_one() -> None:
    tail = TokenHistory.start(0, 300).append(range(100, 120), position=20, keep=4)
    assert tail.ids().tolist() == [116, 117, 118, 119]


@pytest.mark.parametrize(
    ("count", "position", "ids"),
    [
        (3, 3, [0, 100, 101, 102]),
        (4, 4, [0, 100, 101, 102, 103]),
        (5, 5, [101, 102, 103, 104]),
        (3, 4, [100, 101, 102]),
        (4, 5, [100, 101, 102, 103]),
        (5, 9, [101, 102, 103, 104]),
    ],
)
def test_an_incomplete_history_begins_without_eos(count: int, position: int, ids: list[int]) -> None:
    tail = TokenHistory.start(0, 300).ending(range(100, 100 + count), position, keep=4)
    assert tail.ids().tolist() == ids
    input_ids = ids[:]
    for after in range(position + 1, position + 8):
        input_ids.append(50 + after)
        tail = tail.append([50 + after], after, keep=4)
        assert tail.ids().tolist() == (input_ids if after <= 4 else input_ids[-4:])


def test_the_latest_tokens_can_be_removed_but_not_all_tokens() -> None:
    tail = TokenHistory.start(0, 300).append([7, 8], position=2, keep=4)
    assert tail.without_last(0) == tail
    assert tail.without_last(2).ids().tolist() == [0]
    with pytest.raises(AssertionError):
        tail.without_last(3)
