"""A run's tables: in the terminal, and as markdown between their markers on the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bench.contenders import contenders
from benchmarks.bench.loads import loads_of
from benchmarks.bench.results import Results, Spread
from benchmarks.bench.targets import Target, p50, p99, rate, targets

FIGURES = ("contender", "load", "rate: median (smallest to largest)", "p50, ms", "p99, ms", "server's CPUs")
TARGETS = ("what", "against", "target", "reached (by round)", "met")


class PageError(Exception):
    """The page cannot hold the tables; the message names what is missing."""


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


def put_tables(results: Results, page: Path) -> None:
    """Writes the tables between their markers. Raises PageError."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise PageError(f"{page}: {error.strerror}") from error
    page.write_text(with_tables(results, text, str(page)), encoding="utf-8")


def with_tables(results: Results, text: str, page: str) -> str:
    """The page's text with the tables, each between `<!-- NAME -->` and `<!-- /NAME -->`."""
    for name, lines in (("bench", _figures(results)), ("targets", _markdown(TARGETS, target_rows(results)))):
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, opened, rest = text.partition(first)
        _, closed, after = rest.partition(last)
        if not opened or not closed:
            raise PageError(f"{page}: there is no {first.strip()} with a {last.strip()} behind it")
        text = before + opened + "\n" + "\n".join(lines) + "\n\n" + closed + after
    return text


def _figures(results: Results) -> list[str]:
    machine = ", ".join(results.machine.values())
    versions = "; ".join(f"{contenders()[name].title}: {version}" for name, version in results.versions.items())
    lines = [
        f"{results.created}, {machine}; {results.rounds} rounds, {results.seconds:g} s a load. {versions}.",
    ]
    for model, facts in results.models.items():
        lines += ["", f"`{model}` ({facts['about']}):", "", *_markdown(FIGURES, figure_rows(results, model))]
    return lines


def _markdown(names: tuple[str, ...], rows: Iterator[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _value(target: Target, value: float) -> str:
    return f"{value:.3g}{target.unit}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}"
