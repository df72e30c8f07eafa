"""A run's tables, for the terminal and as Markdown for the page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.bench.baseline import NAME
from benchmarks.bench.contenders import Contender, contenders, wanes
from benchmarks.bench.loads import Load, loads_of
from benchmarks.bench.results import Comparison, Results, Target
from benchmarks.page import markdown

FIGURES = (
    "contender",
    "load",
    "rate: median (smallest to largest)",
    "p50, ms",
    "p99, ms",
    "server's CPUs",
    "server's CPU, us per item",
)
TARGETS = ("what", "against", "target", "reached (by round)", "met")
COMPARISONS = ("server", "load", "figure", "baseline", "this", "ratio", "CPU, us per item: baseline", "this", "ratio")
NAMES = {"rate": "", "p50_ms": "p50, ms", "p99_ms": "p99, ms"}
"""The heading of each figure in the table that compares two checkouts. The heading of a rate is empty, because the
table shows the load's unit instead."""


def figure_rows(results: Results, model: str) -> Iterator[list[str]]:
    """Yields a row for each contender and load that was measured or refused, in the order of measurement."""
    for name, contender in contenders().items():
        for load in loads_of(contender, model):
            found = results.summary(model, name, load.name)
            if found is None:
                if said := results.refusal(model, name, load.name):
                    yield [contender.title, load.title, said, "", "", "", ""]
                continue
            yield [
                contender.title,
                load.title,
                f"{found.rate:,.0f} {load.unit}",
                f"{found.p50_ms.median:.2f}",
                f"{found.p99_ms.median:.2f}",
                f"{found.server_cpus.median:.2f}" if found.server_cpus else "",
                f"{found.item_cpu_us.median:,.1f}" if found.item_cpu_us else "",
            ]


def target_rows(results: Results) -> Iterator[list[str]]:
    """Yields a row for each target."""
    for target in results.targets:
        yield [
            target.what,
            target.against,
            ""
            if target.wanted is None
            else f"{'at most' if target.most else 'at least'} {target.wanted:g}{target.unit}",
            f"{_value(target, target.value)} ({_value(target, target.spread.least)} to "
            f"{_value(target, target.spread.most)})",
            {True: "yes", False: "**no**", None: ""}[target.met],
        ]


def comparison_rows(results: Results, model: str) -> Iterator[list[str]]:
    """Yields a row for each load that was measured or refused on the server of this checkout and on the baseline's
    server."""
    found = {(one.contender, one.load): one for one in results.comparisons if one.model == model}
    for ours, theirs in zip(wanes(), wanes(name=NAME), strict=True):
        for load in loads_of(ours, model):
            sides = [_side(results, model, contender, load) for contender in (theirs, ours)]
            if not all(side for side, _ in sides):
                continue
            named = NAMES[load.figure] or load.unit
            ratios = _ratios(found.get((ours.name, load.name)))
            yield [
                ours.title,
                load.title,
                named,
                sides[0][0],
                sides[1][0],
                ratios[0],
                sides[0][1],
                sides[1][1],
                ratios[1],
            ]


def _side(results: Results, model: str, contender: Contender, load: Load) -> tuple[str, str]:
    """Returns the contender's figure of the load and the CPU time per item, as texts. If the server does not support
    the load, returns the server's answer and an empty text."""
    summary = results.summary(model, contender.name, load.name)
    if summary is None:
        return results.refusal(model, contender.name, load.name), ""
    figure = f"{getattr(summary, load.figure):{',.0f' if load.figure == 'rate' else '.2f'}}"
    return figure, f"{summary.item_cpu_us.median:,.1f}" if summary.item_cpu_us else ""


def _ratios(comparison: Comparison | None) -> tuple[str, str]:
    return ("", "") if comparison is None else (f"{comparison.ratio:.3f}", f"{comparison.item_cpu:.3f}")


def show(results: Results, console: Console) -> None:
    """Prints all tables."""
    for model in results.figures:
        console.print(
            _rich(f"{model}, {results.rounds} rounds of {results.seconds:g} s", FIGURES, figure_rows(results, model))
        )
        if rows := list(comparison_rows(results, model)):
            console.print(_rich(f"{model}: this checkout and the baseline", COMPARISONS, iter(rows)))
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
    """Returns the tables of the Markdown page. The keys are the names of the markers between which the tables stand."""
    return {"bench": _figures(results), "targets": markdown(TARGETS, target_rows(results))}


def _figures(results: Results) -> list[str]:
    machine = ", ".join(results.machine.values())
    versions = "; ".join(f"{contenders()[name].title}: {version}" for name, version in results.versions.items())
    lines = [
        f"{results.created}, {machine}; {results.rounds} rounds, {results.seconds:g} s for each load. {versions}.",
    ]
    for model, facts in results.models.items():
        lines += ["", f"`{model}` ({facts['about']}):", "", *markdown(FIGURES, figure_rows(results, model))]
    return lines


def _value(target: Target, value: float) -> str:
    return f"{value:.3g}{target.unit}"
