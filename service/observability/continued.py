"""Counters and histograms that go on where a process that has ended stopped.

The server's counts are the sums of its workers' counts. If a worker that starts again counted from 0, the sums would
fall. Prometheus takes a counter that falls for one that started again from 0, and would count everything twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SUMMED = frozenset({"counter", "histogram"})

Labels = tuple[tuple[str, str], ...]
Counts = dict[str, list[tuple[str, Labels, float]]]
"""For each metric, its samples' names, labels and values."""


class Continued(Collector):
    """Adds the counts that an earlier process of the same worker has exported to those of this process.

    Before the counts are exported, they are written to `file`, so that those of the next process never fall behind. If
    they cannot be written, for example because the disk is full, they are exported all the same."""

    def __init__(self, metrics: Collector, file: Path) -> None:
        self._metrics = metrics
        self._file = file
        self._lock = Lock()  # the file has the latest counts, also if two threads collect
        before: Counts = msgspec.json.decode(file.read_bytes(), type=Counts) if file.exists() else {}
        self._before = {
            metric: {(name, labels): value for name, labels, value in samples} for metric, samples in before.items()
        }

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            metrics = [*self._metrics.collect()]
            counts: Counts = {}
            for metric in metrics:
                if metric.type in SUMMED:
                    metric.samples = [*self._continued(metric)]
                    counts[metric.name] = [(sample.name, _labels(sample), sample.value) for sample in metric.samples]
            written = self._file.with_name(f"{self._file.name}.part")
            with suppress(OSError):
                written.write_bytes(msgspec.json.encode(counts))
                written.replace(self._file)
        yield from metrics

    def _continued(self, metric: Metric) -> Iterator[Sample]:
        before = self._before.get(metric.name, {}).copy()
        for sample in metric.samples:
            if (value := before.pop((sample.name, _labels(sample)), None)) is not None:
                is_time = sample.name.endswith("_created")
                sample = sample._replace(value=min(value, sample.value) if is_time else value + sample.value)
            yield sample
        for (name, labels), value in before.items():
            yield Sample(name, dict(labels), value)


def _labels(sample: Sample) -> Labels:
    return tuple(sorted(sample.labels.items()))
