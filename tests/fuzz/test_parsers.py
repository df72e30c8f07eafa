"""Tests that a short run of the fuzzer on the parsers has no finding. `scripts/fuzz` tries more cases. The tests of
earlier findings stand beside the other tests of the fixed code."""

from __future__ import annotations

import pytest

from tests.fuzz import parsers
from tests.fuzz.parsers import PARSERS, Message, fuzz

CASES = 5000


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_reads_anything_or_refuses_it_with_its_own_error(name: str) -> None:
    assert fuzz(name, CASES) >= 0.9 * CASES * PARSERS[name].share


def test_the_shares_of_the_parsers_add_up() -> None:
    assert sum(parser.share for parser in PARSERS.values()) == pytest.approx(1)


def test_an_unexpected_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(parsers, "rows_of", breaks)
    with pytest.raises(ZeroDivisionError):
        fuzz("tensors", 200)


def test_a_valid_request_is_read() -> None:
    body = b'{"inputs": [{"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [5]}]}'
    parsers.check_message(Message(body))
