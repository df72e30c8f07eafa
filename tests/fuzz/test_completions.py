"""Tests that a short run of the fuzzer on the route of completions has no finding."""

from __future__ import annotations

import pytest

from tests.fuzz.completions import fuzz


@pytest.mark.slow
def test_a_completion_is_answered_or_refused() -> None:
    seen = fuzz(1000)
    assert seen[200] > 30 and seen[400] > 100
