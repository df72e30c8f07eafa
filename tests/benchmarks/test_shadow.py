from __future__ import annotations

import dataclasses
from io import StringIO

from rich.console import Console

from benchmarks.shadow import RATES, OfRate, OfWindow, Results, Round, table


def figures(p99_ms: float, compared: int, shadow_cpu_s: float) -> Round:
    return Round(
        requests=1000,
        p50_ms=1.0,
        p99_ms=p99_ms,
        longest_ms=9.0,
        cpu_s=1.0,
        shadow_cpu_s=shadow_cpu_s,
        compared=compared,
        dropped=10,
    )


def rounds(rate: float) -> list[Round]:
    compared = int(90 * rate)
    return [figures(2 + rate, compared, 0.5 * rate), figures(4 + rate, compared, 0.7 * rate)]


RESULTS = Results(
    model="m",
    model_version="1",
    machine="two cores",
    versions={},
    windows={
        "64": OfWindow(
            k=64,
            events_per_s=500,
            capacity_per_s=1000,
            seconds=3,
            rates={str(rate): OfRate.of(rounds(rate), rounds(0.0) if rate else None) for rate in RATES},
        )
    },
)


def test_latencies_are_compared_with_those_of_the_same_round_without_shadows() -> None:
    printed = StringIO()
    Console(file=printed, width=200).print(table(RESULTS))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.getvalue().splitlines()]
    (cells,) = (row for row in rows if row[1:2] == ["1.0"])
    assert cells[:4] == ["64", "1.0", "1.00 (1.00 to 1.00)", "4.00 (3.00 to 5.00)"]
    assert cells[4:6] == ["+0.00 (+0.00 to +0.00)", "+1.00 (+1.00 to +1.00)"]
    assert cells[6:] == ["0.600 (0.500 to 0.700)", "9.00%", "1.00%"]


def test_cpu_time_is_given_for_a_thousand_live_answers() -> None:
    of_500 = dataclasses.replace(figures(1.0, 5, 0.25), requests=500)
    assert OfRate.of([of_500], None).shadow_cpu_s_per_1000.median == 0.5
