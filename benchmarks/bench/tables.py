"""A run's tables: in the terminal, and as markdown between their markers on the page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.bench.contenders import contenders
from benchmarks.bench.loads import loads_of
from benchmarks.bench.results import Results, Spread
from benchmarks.bench.targets import Target, p50, p99, rate, targets
from benchmarks.page import markdown

FIGURES = ("contender", "load", "rate: median (smallest to largest)", "p50, ms", "p99, ms", "server's CPUs")
TARGETS = ("what", "against", "target", "reached (by round)", "met")


def figure_rows(results: Results, model: str) -> Iterator[list[str]]:
    """One row for each contender and load that was measured, in the order of measuring."""
    for name, contender in contenders().items():
        for load in loads_of(contender, model):
            rates = results.spread(model, name, load.name, rate)
            if rates is None:
                continue
            rounds = results.rounds_of(model, name, load.name)
            cpus = [measured.server_cpus for measured in rounds if measured.server_cpus is not None]
            yield [
                contender.title,
                load.title,
                f"{_count(rates.median)} ({_count(rates.smallest)} to {_count(rates.largest)}) {load.unit}",
                *(_milliseconds(results.spread(model, name, load.name, figure)) for figure in (p50, p99)),
                f"{Spread.of(cpus).median:.2f}" if cpus else "",
            ]


def target_rows(results: Results) -> Iterator[list[str]]:
    """One row for each target whose figures are there."""
    for target in targets(results):
        yield [
            target.what,
            target.against,
            f"{'at most' if target.most else 'at least'} {target.wanted:g}{target.unit}",
            f"{_value(target, target.value)} ({_value(target, target.spread.smallest)} to "
            f"{_value(target, target.spread.largest)})",
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


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}"
