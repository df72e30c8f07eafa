"""Updates the tables of docs/engine.md with the figures of the benchmarks `start`, `parked`, `shadow`, `precision` and
`lookup`.

python -m benchmarks.engine_page
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, put_all
from benchmarks.start import FIGURES as OF_A_START
from benchmarks.start import shown
from benchmarks.summary import Spread

PAGE, FIGURES = Path("docs/engine.md"), Path("docs/figures")
GIB = 2**30
WAYS = {
    "objects": "Python objects in a dict",
    "store": "the store alone",
    "server": "a server with its default model, and the store",
}


def tables(figures: Path) -> dict[str, list[str]]:
    """Returns the page's tables by name, as lines of Markdown. `figures` is the folder of the benchmarks' JSON."""
    kept = {
        name: json.loads((figures / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("start", "parked", "shadow", "precision", "lookup")
    }
    return {
        "start": starts(kept["start"]["servers"]),
        "parked": parked(kept["parked"]["results"]),
        "shadows": shadows(kept["shadow"]["windows"].values()),
        "precision": in_turns(kept["precision"]["subjects"], "float32", "int8", ratio="float32 / int8"),
        "lookup": in_turns(kept["lookup"]["subjects"], "looked up", "multiplied", ratio="multiplied / looked up"),
    }


def starts(servers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a table of start times and memory. There is one column for each pair of a server and a set of models that
    the server serves."""
    names = [f"{served}: {name}" for served, measured in servers.items() for name in measured]
    columns = [found for measured in servers.values() for found in measured.values()]
    return markdown(
        ["", *names],
        [[what, *(shown(figure, Spread(**found[figure])) for found in columns)] for figure, what in OF_A_START.items()],
    )


def parked(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a table with a row for each way to store sessions (see `benchmarks.parked`): the resident memory of the
    process, the bytes per session, and the store's time per call."""
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
    """Returns a table of the costs of shadows, with one row for each k and shadow rate (see `benchmarks.shadow`). Its
    columns are the latency of live answers, the difference between this latency and the latency in the same round
    without shadows, the CPU time of shadows, the share of live answers that were compared with a shadow, and the share
    of live answers whose shadow was dropped."""
    rows = []
    for window in windows:
        for rate, found in window["rates"].items():
            over = (found["p50_over_none_ms"], found["p99_over_none_ms"])
            rows.append(
                [
                    f"{window['k']}",
                    rate,
                    *(f"{Spread(**found[name]):.2f}" for name in ("p50_ms", "p99_ms")),
                    *("" if spread is None else f"{Spread(**spread):+.2f}" for spread in over),
                    f"{Spread(**found['shadow_cpu_s_per_1000']):.3f}",
                    f"{found['compared'] / found['requests']:.1%}",
                    f"{found['dropped'] / found['requests']:.1%}",
                ]
            )
    return markdown(
        [
            "k",
            "rate",
            "p50, ms",
            "p99, ms",
            "p50 minus p50 without shadows",
            "p99 minus p99 without shadows",
            "CPU s per 1,000 answers",
            "compared",
            "dropped",
        ],
        rows,
    )


def in_turns(subjects: Sequence[Mapping[str, Any]], first: str, second: str, *, ratio: str) -> list[str]:
    """Returns a table of the CPU time per item of two variants that were measured alternately. `ratio` is the name of
    the last column."""
    rows = []
    for subject in subjects:
        for run in subject["runs"]:
            role = f"window of {subject['window']}" if run["role"] == "window" else run["role"]
            rows.append(
                [
                    f"`{subject['model']}`, {role}, batch {run['batch']}",
                    *(f"{Spread(**run['us_per_item'][way]):.1f}" for way in (first, second)),
                    f"{run['ratio']['median']:.2f}",
                ]
            )
    return markdown(["us an item", first, second, ratio], rows)


def main() -> None:
    put_all(PAGE, tables(FIGURES))


if __name__ == "__main__":
    main()
