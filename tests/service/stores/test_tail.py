from __future__ import annotations

import pytest

from service.stores.tail import Tail


@pytest.mark.parametrize(("size", "width"), [(258, 2), (65536, 2), (65537, 4)])
def test_a_token_takes_two_bytes_where_every_id_fits_in_them(size: int, width: int) -> None:
    tail = Tail.start(0, size).append([size - 1, 1], position=2, keep=8)
    assert tail.width == width
    assert len(tail.data) == 3 * width
    assert tail.ids().tolist() == [0, size - 1, 1]


def test_eos_goes_with_the_first_token_that_is_cut_off() -> None:
    tail = Tail.start(0, 300)
    fed = [0]
    for position in range(1, 8):
        fed.append(100 + position)
        tail = tail.append([100 + position], position, keep=4)
        assert tail.ids().tolist() == (fed if position <= 4 else fed[-4:])


def test_many_tokens_at_once_are_cut_as_one_by_one() -> None:
    tail = Tail.start(0, 300).append(range(100, 120), position=20, keep=4)
    assert tail.ids().tolist() == [116, 117, 118, 119]


def test_the_latest_tokens_can_be_taken_off_but_not_all() -> None:
    tail = Tail.start(0, 300).append([7, 8], position=2, keep=4)
    assert tail.without_last(0) == tail
    assert tail.without_last(2).ids().tolist() == [0]
    with pytest.raises(AssertionError):
        tail.without_last(3)
