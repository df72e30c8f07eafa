"""Merges the reports of replicas into one report, as if a single process had served all their requests.

Histograms are added bucket by bucket, and quantiles are computed from the summed histograms. The merged report has the
sums of counts, the means weighted with their counts, and the largest maximum. Models are matched by name. If replicas
serve different versions of a model, the merged report lists the versions, and its statistics are for all these versions
together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from wane.service.engine.live_accuracy import LiveCounts
from wane.service.engine.stats import Cumulative, DurationsReport, WindowReport

Document = dict[str, Any]


class MergeError(Exception):
    """The reports cannot be merged. The message says why."""


def merge(reports: Sequence[Document]) -> Document:
    """Returns the merged report. The field `replicas` of the merged report is the number of merged reports. The field
    `replicas` of a model is the number of reports that contain the model. The merged report omits `costs`, because
    costs are valid for one machine only. Raises MergeError if histograms have different buckets.
    """
    assert reports, "there are no reports to merge: this is a bug"
    models: dict[str, list[Document]] = {}
    for report in reports:
        for model in report["models"]:
            models.setdefault(model["model"], []).append(model)
    serving = Counter(name for report in reports for name in {model["model"] for model in report["models"]})
    return {
        "device": _listed(report["device"] for report in reports),
        "replicas": len(reports),
        "models": [_model(name, serving[name], parts) for name, parts in models.items()],
    }


def _model(name: str, replicas: int, parts: Sequence[Document]) -> Document:
    return {
        "model": name,
        "model_version": _listed(part["model_version"] for part in parts),
        "device": _listed(part["device"] for part in parts),
        "replicas": replicas,
        "modes": _by_name([part["modes"] for part in parts], _mode),
        "windows": _windows([window for part in parts for window in part["windows"]]),
        "operations": _by_name([part["operations"] for part in parts], sum),
        "agreement": {
            **_agreement([part["agreement"] for part in parts]),
            "sources": _by_name([part["agreement"]["sources"] for part in parts], _agreement),
        },
        "shadow": _by_name([part["shadow"] for part in parts], sum),
        "live_accuracy": _live_accuracy([part["live_accuracy"] for part in parts]),
        "sessions": _by_name([part["sessions"] for part in parts], sum),
    }


def _live_accuracy(parts: Sequence[Document | None]) -> Document | None:
    """Merges the live accuracies of replicas that measure it."""
    some = [part for part in parts if part is not None]
    if not some:
        return None
    if len({part["k"] for part in some}) > 1:
        raise MergeError("the replicas' settings live_accuracy differ")
    spans = ("since_start", "recent")
    names = ("judged", "hits", "reciprocal_ranks", "unjudged")
    return {
        "k": some[0]["k"],
        **{span: asdict(LiveCounts.of(*(sum(part[span][name] for part in some) for name in names))) for span in spans},
    }


def _mode(parts: Sequence[Document]) -> Document:
    return {
        "requests": sum(part["requests"] for part in parts),
        "latency": _by_name([part["latency"] for part in parts], _durations),
    }


def _windows(parts: Sequence[Document]) -> list[Document]:
    """Merges the counts of windows with the same `k` and `prove`."""
    by_key: dict[tuple[int, bool], list[Document]] = {}
    for part in parts:
        by_key.setdefault((part["k"], part["prove"]), []).append(part)
    merged = [
        WindowReport.of(k, prove, _cumulative(same, "le"), sum(part["top1_proved"] for part in same))
        for (k, prove), same in sorted(by_key.items(), key=itemgetter(0))
    ]
    return [to_builtins(window) for window in merged]


def _durations(parts: Sequence[Document]) -> Document:
    merged = DurationsReport.of(_cumulative(parts, "le_ms"), math.fsum(part["sum_ms"] for part in parts))
    document: Document = to_builtins(merged)
    return document


def _cumulative(parts: Sequence[Document], name: str) -> Cumulative:
    """Returns the sums of the parts' cumulative buckets. name: the field of a bucket's bound."""
    bounds = [[bucket[name] for bucket in part["buckets"]] for part in parts]
    if any(other != bounds[0] for other in bounds[1:]):
        raise MergeError(
            "the replicas' histograms have different buckets: the replicas run different versions of the service"
        )
    counts = [
        sum(bucket["count"] for bucket in same) for same in zip(*(part["buckets"] for part in parts), strict=True)
    ]
    return [(math.inf if le is None else le, count) for le, count in zip(bounds[0], counts, strict=True)]


def _agreement(parts: Sequence[Document]) -> Document:
    compared = [part["compared"] for part in parts]
    bounds = [part["error_bound"] for part in parts]
    bounded = [bound["bounded"] for bound in bounds]
    variations = [part["total_variation"] for part in parts]
    return {
        "compared": sum(compared),
        "top1_match_rate": _rate([part["top1_match_rate"] for part in parts], compared),
        "total_variation": {
            "mean": _mean([variation["mean"] for variation in variations], compared),
            "max": _largest(variation["max"] for variation in variations),
        },
        "max_logit_difference": _largest(part["max_logit_difference"] for part in parts),
        "error_bound": {
            "bounded": sum(bounded),
            "mean": _mean([bound["mean"] for bound in bounds], bounded),
            "max": _largest(bound["max"] for bound in bounds),
        },
        "bound_violations": sum(part["bound_violations"] for part in parts),
        "top1_proved_rate": _rate([part["top1_proved_rate"] for part in parts], compared),
    }


def _by_name(parts: Sequence[Document], merged: Callable[[Sequence[Any]], Any]) -> Document:
    """Merges dictionaries by key. For each key, merges the values of all dictionaries that have the key."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merged([part[name] for part in parts if name in part]) for name in names}


def _rate(rates: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Merges the parts' rates, such as the rates of top-1 matches. First converts each rate to a whole number of
    matches, so that the sum of these numbers is exact. `counts` are the parts' numbers of comparisons."""
    total = sum(counts)
    return sum(round((rate or 0) * count) for rate, count in zip(rates, counts, strict=True)) / total if total else None


def _mean(means: Sequence[float | None], counts: Sequence[int]) -> float | None:
    total = sum(counts)
    return math.fsum((mean or 0) * count for mean, count in zip(means, counts, strict=True)) / total if total else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _listed(values: Iterable[str]) -> str:
    """Returns the distinct values as a comma-separated text, in their order of appearance."""
    return ", ".join(dict.fromkeys(values))
