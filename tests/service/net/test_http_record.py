"""Tests that the server answers mutated requests as recorded. `python -m tests.service.net.http_record` makes and
compares records."""

from __future__ import annotations

from copy import deepcopy

from tests.service.net.http_cases import make_case
from tests.service.net.http_record import RECORD, SEED, differences, is_same, read


async def test_mutated_requests_are_answered_as_recorded() -> None:
    assert await differences(read(RECORD)[::8]) == []


async def test_a_changed_record_is_a_difference() -> None:
    changed = deepcopy(next(one for one in read(RECORD) if one["responses"]))
    changed["responses"][0][0] += 1
    ((record, _),) = await differences([changed])
    assert record == changed


def test_equal_results_may_differ_by_rounding() -> None:
    assert is_same(["a", 0.25], ["a", 0.2500001]) and is_same(['{"p":0.5}'], ['{"p":0.500001}'])
    assert not is_same(["a", 0.25], ["a", 0.2501]) and not is_same(["a"], ["b"])


def test_a_seed_always_makes_the_same_case() -> None:
    assert make_case(SEED, 7) == make_case(SEED, 7) != make_case(SEED + 1, 7)
