"""Prometheus histograms for what is observed at every token.

prometheus_client's take a lock and walk through their buckets for each value. These are observed on the event loop's
thread only, find their bucket by bisection, and are made into metrics when somebody asks. A value that has a trace is
its bucket's exemplar until the next one that has.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class Observed:
    """The values of one set of labels."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket but the last, which has none."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value, and remembers by its bucket of which trace it was."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_all(self, buckets: Sequence[int], total: float) -> None:
        """Counts many values, of which it is known which buckets they belong to and what they come to."""
        counts = self.counts
        for bucket in buckets:
            counts[bucket] += 1
        self.total += total


class Histogram(Collector):
    """A metric of one name, as prometheus_client's `Histogram`."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._observed: dict[tuple[str, ...], Observed] = {}
        if not labels:
            self.labels()  # there from the start, at 0
        registry.register(self)

    def labels(self, *values: str) -> Observed:
        """What is observed of these labels."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)} of them")
        found = self._observed.get(values)
        if found is None:
            found = self._observed[values] = Observed(self._bounds)
        return found

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value of a histogram without labels."""
        self.labels().observe(value, trace_id)

    def describe(self) -> Iterator[Metric]:
        """Its name, for the registry."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Every value so far."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        names: list[str] = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        for values, observed in list(self._observed.items()):
            pairs = zip(names, map(float, accumulate(observed.counts)), strict=True)
            exemplars = observed.exemplars
            counts = [(*pair, exemplars[index]) if index in exemplars else pair for index, pair in enumerate(pairs)]
            family.add_metric(values, counts, sum_value=observed.total)
        yield family
