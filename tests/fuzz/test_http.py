"""Tests that a short run of the fuzzer over HTTP has no finding. `scripts/fuzz` sends more requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.http import HttpFuzz, served

REQUESTS = 300


@pytest.fixture(scope="module")
def fuzz() -> Iterator[HttpFuzz]:
    with served() as server:
        yield HttpFuzz(server)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the packages that generate the requests
def test_random_requests_are_answered_as_described(fuzz: HttpFuzz) -> None:
    fuzz.run(REQUESTS)
    assert fuzz.statuses.total() >= 0.8 * REQUESTS
    assert {200, 400, 401, 404, 422} <= set(fuzz.statuses)


def test_every_operation_of_the_description_is_tried(fuzz: HttpFuzz) -> None:
    described = {(method, path) for path, methods in fuzz.schema.raw_schema["paths"].items() for method in methods}
    assert {(one.method, one.path) for one in fuzz.operations} == described
