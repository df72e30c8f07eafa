"""Comparisons and reports for people: rich tables on a terminal, and a plot."""

from __future__ import annotations

from rich.table import Table

from service.client import Document
from service.comparison import PHASES, AgreementSummary, Comparison


def latency_table(compared: Comparison) -> Table:
    """Milliseconds by mode and phase."""
    table = Table(title=f"Latency of one next token, ms ({compared.steps} tokens, {compared.device})")
    table.add_column("mode")
    table.add_column("phase")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for mode, phases in compared.latency.items():
        label = mode if mode == "recurrent" else f"window of {compared.k}"
        for phase in PHASES:
            row = phases[phase]
            values = [f"{value:.3f}" for value in (row.p50, row.p90, row.p99)]
            table.add_row(label, phase.replace("_", " "), *values, end_section=phase == PHASES[-1])
            label = ""
    return table


def agreement_table(compared: Comparison) -> Table:
    """How far windows are from recurrent: the model's k over all tokens, then every size at a few positions."""
    table = Table(
        title="Agreement of window and recurrent (TV: total variation)",
        caption="ms: compute, median over positions",
    )
    for name in ("window", "pairs", "top-1", "proved", "TV mean", "TV max", "bound", "ms"):
        table.add_column(name, justify="right")

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
    """What a server has measured so far: latency by model and mode, then agreement and sessions by model."""
    latency = Table(title=f"Latency, ms ({report['device']})")
    for name in ("model", "mode", "requests", "phase", "p50", "p90", "p99"):
        latency.add_column(name, justify="left" if name in ("model", "mode", "phase") else "right")
    agreement = Table(title="Agreement (TV: total variation) and sessions")
    agreement.add_column("model")
    for name in ("pairs", "top-1", "TV mean", "TV max", "over bound", "resident", "parked"):
        agreement.add_column(name, justify="right")
    for model in report["models"]:
        for mode, measured in model["modes"].items():
            for phase, durations in measured["latency"].items():
                values = [_number(durations[name], ".3f") for name in ("p50_ms", "p90_ms", "p99_ms")]
                latency.add_row(model["model"], mode, str(measured["requests"]), phase, *values)
        found, sessions = model["agreement"], model["sessions"]
        agreement.add_row(
            model["model"],
            str(found["compared"]),
            _number(found["top1_match_rate"], ".1%"),
            _number(found["total_variation"]["mean"], ".2e"),
            _number(found["total_variation"]["max"], ".2e"),
            str(found["bound_violations"]),
            str(sessions["resident"]),
            str(sessions["parked"]),
        )
    return [latency, agreement]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
