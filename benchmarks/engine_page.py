"""Puts the figures of `parked`, `shadow`, `precision` and `lookup` into the tables of docs/engine.md.

python -m benchmarks.engine_page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, put_all

PAGE, FIGURES = Path("docs/engine.md"), Path("docs/figures")
GIB = 2**30
WAYS = {
    "objects": "Python objects in a dict",
    "store": "the store alone",
    "server": "a server with its default model, and the store",
}


def tables(figures: Path) -> dict[str, list[str]]:
    """The page's tables by name, each as its lines in Markdown; `figures` is the folder with the benchmarks' JSON."""
    kept = {
        name: json.loads((figures / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("parked", "shadow", "precision", "lookup")
    }
    return {
        "parked": parked(kept["parked"]["results"]),
        "shadows": shadows(kept["shadow"]["windows"].values()),
        "precision": in_turns(kept["precision"]["subjects"], "float32", "int8", slower="float32"),
        "lookup": in_turns(kept["lookup"]["subjects"], "looked up", "multiplied", slower="multiplied"),
    }


def parked(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Resident memory of a whole process, and of each of its sessions."""
    return markdown(
        ["", "GiB", "bytes a session", "append, us", "get, us"],
        [
            [
                WAYS[result["way"]],
                f"{result['churned_bytes'] / GIB:.3f}",
                f"{(result['churned_bytes'] - result['before_bytes']) / result['sessions']:,.0f}",
                f"{result['append_us']:.1f}",
                f"{result['get_us']:.1f}" if "get_us" in result else "",
            ]
            for result in results
        ],
    )


def shadows(windows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Live latency by k and rate, its difference from the same round's without shadows, and what they took and did."""
    rows = []
    for window in windows:
        none = window["rounds"]["0.0"]
        for rate, rounds in window["rounds"].items():
            requests = sum(one["requests"] for one in rounds)
            over = {
                name: [one[name] - other[name] for one, other in zip(rounds, none, strict=True)]
                for name in ("p50_ms", "p99_ms")
            }
            rows.append(
                [
                    f"{window['k']}",
                    rate,
                    _spread([one["p50_ms"] for one in rounds], ".2f"),
                    _spread([one["p99_ms"] for one in rounds], ".2f"),
                    *(["", ""] if rounds is none else [_spread(values, "+.2f") for values in over.values()]),
                    _spread([1000 * one["shadow_cpu_s"] / one["requests"] for one in rounds], ".3f"),
                    f"{sum(one['compared'] for one in rounds) / requests:.1%}",
                    f"{sum(one['dropped'] for one in rounds) / requests:.1%}",
                ]
            )
    return markdown(
        ["k", "rate", "p50, ms", "p99, ms", "p50 over none", "p99 over none", "CPU s a 1,000", "compared", "dropped"],
        rows,
    )


def in_turns(subjects: Sequence[Mapping[str, Any]], first: str, second: str, *, slower: str) -> list[str]:
    """Processor time an item of two ways that took turns, median (least to most), and how many times that of the other
    the `slower` one takes."""
    quicker = first if slower == second else second
    rows = []
    for subject in subjects:
        for run in subject["runs"]:
            taken = run["us_per_item"]
            role = f"window of {subject['window']}" if run["role"] == "window" else run["role"]
            ratios = [
                more / less for more, less in zip(taken[slower], taken[quicker], strict=True)
            ]  # of one round each
            rows.append(
                [
                    f"`{subject['model']}`, {role}, batch {run['batch']}",
                    *(_spread(taken[way]) for way in (first, second)),
                    f"{statistics.median(ratios):.2f}",
                ]
            )
    return markdown(["us an item", first, second, f"{slower} / {quicker}"], rows)


def _spread(values: Sequence[float], form: str = ".1f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    put_all(PAGE, tables(FIGURES))


if __name__ == "__main__":
    main()
