"""Tests that Wane's and uvicorn's protocol classes give the same answers to mutated requests. `python -m
tests.service.net.http_fuzz` runs more cases."""

from __future__ import annotations

from tests.service.net.http_cases import make_case
from tests.service.net.http_fuzz import Fuzz
from wane.service.errors import Overloaded

CASES, SEED = 500, 1


async def test_both_protocol_classes_answer_mutated_requests_alike() -> None:
    counted, different = await Fuzz().run(SEED, range(CASES))
    assert different == []
    assert counted.total() == CASES and counted["same"] > CASES / 2


async def test_the_fuzz_finds_a_difference() -> None:
    fuzz = Fuzz(sure_s=0.0)
    fuzz.theirs.registry.engine.failure = Overloaded("planted")
    _, different = await fuzz.run(SEED, range(20))
    assert any(b'"overloaded"' in one.compared.theirs.received for one in different)


def test_a_seed_always_makes_the_same_case() -> None:
    assert make_case(SEED, 7) == make_case(SEED, 7) != make_case(SEED + 1, 7)
