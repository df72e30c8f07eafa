"""A run's tables: in the terminal, and as markdown between their markers on the page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.bench.contenders import contenders
from benchmarks.bench.loads import loads_of
from benchmarks.bench.results import Results, Target
from benchmarks.page import markdown

FIGURES = ("contender", "load", "rate: median (smallest to largest)", "p50, ms", "p99, ms", "server's CPUs")
TARGETS = ("what", "against", "target", "reached (by round)", "met")


def figure_rows(results: Results, model: str) -> Iterator[list[str]]:
    """One row for each contender and load that was measured, in the order of measuring."""
    for name, contender in contenders().items():
        for load in loads_of(contender, model):
            found = results.summary(model, name, load.name)
            if found is None:
                continue
            yield [
                contender.title,
                load.title,
                f"{found.rate:,.0f} {load.unit}",
                f"{found.p50_ms.median:.2f}",
                f"{found.p99_ms.median:.2f}",
                f"{found.server_cpus.median:.2f}" if found.server_cpus else "",
            ]


def target_rows(results: Results) -> Iterator[list[str]]:
    """One row for each target whose figures are there."""
    for target in results.targets:
        yield [
            target.what,
            target.against,
            f"{'at most' if target.most else 'at least'} {target.wanted:g}{target.unit}",
            f"{_value(target, target.value)} ({_value(target, target.spread.least)} to "
            f"{_value(target, target.spread.most)})",
            "yes" if target.met else "**no**",
        ]


def show(results: Results, console: Console) -> None:
    """All of it, in the terminal."""
    for model in results.figures:
        console.print(
            _rich(f"{model}, {results.rounds} rounds of {results.seconds:g} s", FIGURES, figure_rows(results, model))
        )
    rows = [[cell.replace("**", "") for cell in row] for row in target_rows(results)]
    if rows:
        console.print(_rich("targets", TARGETS, iter(rows)))


def _rich(title: str, names: tuple[str, ...], rows: Iterator[list[str]]) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def page_tables(results: Results) -> dict[str, list[str]]:
    """What the page shows, by the names that it has there."""
    return {"bench": _figures(results), "targets": markdown(TARGETS, target_rows(results))}


def _figures(results: Results) -> list[str]:
    machine = ", ".join(results.machine.values())
    versions = "; ".join(f"{contenders()[name].title}: {version}" for name, version in results.versions.items())
    lines = [
        f"{results.created}, {machine}; {results.rounds} rounds, {results.seconds:g} s a load. {versions}.",
    ]
    for model, facts in results.models.items():
        lines += ["", f"`{model}` ({facts['about']}):", "", *markdown(FIGURES, figure_rows(results, model))]
    return lines


def _value(target: Target, value: float) -> str:
    return f"{value:.3g}{target.unit}"
