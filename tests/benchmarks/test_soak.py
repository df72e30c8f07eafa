"""Tests the summaries of the samples that a soak test records."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.soak.__main__ import Samples


def test_the_rates_of_slices_add_up_to_the_counts() -> None:
    seconds = np.arange(0, 25.5, 0.5)
    samples = Samples(seconds.tolist(), (100 + seconds).tolist(), (3 * seconds).tolist(), (seconds**2).tolist())
    found = samples.over_time()
    assert found["at_s"] == [5, 15, 22.5]
    assert found["resident_mib"] == [105, 115, 122.5]
    assert found["rebuilt_per_s"] == pytest.approx([3, 3, 3])
    assert np.dot(found["requests_per_s"], [10, 10, 5]) == pytest.approx(25**2)


def test_memory_growth_is_measured_after_a_settling_time() -> None:
    samples = Samples(list(range(100)), [900.0] * 20 + [100.0] * 60 + [130.0] * 20)
    assert samples.memory() == {"settled": 100, "end": 130}
