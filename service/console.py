"""Comparisons and reports for people: rich tables on a terminal, and a plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from service.client import Document
from service.compare import PHASES, AgreementSummary, Measurements


def latency_table(compared: Measurements) -> Table:
    """Milliseconds by mode and phase."""
    title = f"Latency of one next token, ms ({compared.steps} tokens, {compared.device})"
    table = _table(title, ("mode", "phase"), ("p50", "p90", "p99"))
    for mode, phases in compared.latency.items():
        label = mode if mode == "recurrent" else f"window of {compared.k}"
        for phase in PHASES:
            row = phases[phase]
            values = [f"{value:.3f}" for value in (row.p50, row.p90, row.p99)]
            table.add_row(label, phase.replace("_", " "), *values, end_section=phase == PHASES[-1])
            label = ""
    return table


def agreement_table(compared: Measurements) -> Table:
    """How far windows are from recurrent: the model's k over all tokens, then every size at a few positions."""
    columns = ("window", "pairs", "top-1", "proved", "TV mean", "TV max", "bound", "ms")
    table = _table("Agreement of window and recurrent (TV: total variation)", (), columns)
    table.caption = "ms: compute, median over positions"

    def add(label: str, agreement: AgreementSummary, compute: str, last: bool = False) -> None:
        table.add_row(
            label,
            str(agreement.compared),
            f"{agreement.top1_match_rate:.1%}",
            f"{agreement.top1_proved_rate:.1%}",
            f"{agreement.total_variation_mean:.2e}",
            f"{agreement.total_variation_max:.2e}",
            "none" if agreement.error_bound is None else f"{agreement.error_bound:.2e}",
            compute,
            end_section=last,
        )

    add(str(compared.k), compared.agreement, "", last=True)
    for line in compared.windows:
        add(str(line.window), line.agreement, f"{line.compute_ms:.3f}")
    return table


def report_tables(report: Document) -> list[Table]:
    """What a server has measured so far: latency by model and mode, agreement by model, sessions by model."""
    of = f"{report['replicas']} replicas, {report['device']}" if "replicas" in report else report["device"]
    latency = _table(f"Latency, ms ({of})", ("model", "mode", "phase"), ("requests", "p50", "p90", "p99"))
    agreement = _table(
        "Agreement (TV: total variation)",
        ("model",),
        ("pairs", "top-1", "proved", "TV mean", "TV max", "bound mean", "bound max", "over bound"),
    )
    if "replicas" in report:
        latency.caption = "quantiles are read from the buckets' sums"
    sessions = _table("Sessions", ("model", "version"), ("resident", "parked", "rebuilt"))
    for model in report["models"]:
        name = model["model"]
        for mode, measured in model["modes"].items():
            for phase, durations in measured["latency"].items():
                quantiles = [_number(durations[f"{quantile}_ms"], ".3f") for quantile in ("p50", "p90", "p99")]
                latency.add_row(name, mode, phase, str(measured["requests"]), *quantiles)
        found = model["agreement"]
        agreement.add_row(
            name,
            str(found["compared"]),
            _number(found["top1_match_rate"], ".1%"),
            _number(found["top1_proved_rate"], ".1%"),
            _number(found["total_variation"]["mean"], ".2e"),
            _number(found["total_variation"]["max"], ".2e"),
            _number(found["error_bound"]["mean"], ".2e"),
            _number(found["error_bound"]["max"], ".2e"),
            str(found["bound_violations"]),
        )
        sessions.add_row(
            name, model["model_version"], *(str(model["sessions"][kind]) for kind in ("resident", "parked", "rebuilt"))
        )
    return [latency, agreement, sessions]


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
