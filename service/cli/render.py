"""Renders comparisons and reports as tables on a terminal, and comparisons as a plot. Only `save` imports matplotlib,
because the import takes a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from wane.service.cli.connect import Document
from wane.service.cli.measure import PHASES, AgreementSummary, Measurements
from wane.service.cli.side_by_side import CONNECTIONS, ROUNDS, ModelFigures, Spread


def latency_table(compared: Measurements) -> Table:
    """Returns a table of latency in milliseconds, by mode and phase."""
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
    """Returns a table of the agreement of windows with recurrent mode. The first row is for windows of the model's k,
    at all positions. Each further row is for one window size, at a few positions."""
    columns = ("window", "pairs", "top-1", "proved", "TV mean", "TV max", "bound median", "bound max", "ms")
    table = _table("Agreement of window and recurrent (TV: total variation)", (), columns)
    table.caption = "proved, bound: of windows with `prove`; ms: median compute time over the compared positions"

    def add(label: str, agreement: AgreementSummary, compute: str, last: bool = False) -> None:
        table.add_row(
            label,
            str(agreement.compared),
            f"{agreement.top1_match_rate:.1%}",
            f"{agreement.top1_proved_rate:.1%}",
            f"{agreement.total_variation_mean:.2e}",
            f"{agreement.total_variation_max:.2e}",
            _number(agreement.error_bound_median, ".2e"),
            _number(agreement.error_bound, ".2e"),
            compute,
            end_section=last,
        )

    add(str(compared.model_k), compared.agreement, "", last=True)
    for line in compared.windows:
        add(str(line.window), line.agreement, f"{line.compute_ms:.3f}")
    return table


SHOWN_WINDOWS = (1, 4, 16, 64)
"""The windows whose perplexities the table of several models shows. The JSON document has all."""


def quality_table(models: Sequence[ModelFigures], same_tokens: bool) -> Table:
    """Returns a table of the perplexities of several models and of the shares proved. `same_tokens`: whether the models
    predict the same tokens."""
    title = f"Perplexity of {f'{models[0].tokens:,}' if same_tokens else 'different'} tokens"
    columns = ("recurrent", *(f"k = {k}" for k in SHOWN_WINDOWS), "k, 1 %", "proved")
    table = _table(title, ("model",), columns)
    windows = " or ".join(sorted({f"{model.window}" for model in models}))
    table.caption = (
        "k: windows of k tokens; k, 1 %: the smallest k within 1 % of recurrent\n"
        f"proved: the share of windows of {windows} with `prove` whose first token is proved"
    )
    if not same_tokens:
        table.caption += (
            "\nThe models read the same input as different tokens, so their perplexities\n"
            "cannot be compared with one another. The models are in the order given."
        )
    for model in models:
        table.add_row(
            model.model,
            f"{model.perplexity:.2f}",
            *(_number(model.by_k.get(k), ".2f") for k in SHOWN_WINDOWS),
            "-" if model.smallest_k is None else str(model.smallest_k),
            _number(model.proved, ".1%"),
        )
    return table


def cost_table(models: Sequence[ModelFigures]) -> Table:
    """Returns a table of the costs of several models."""
    columns = ("weights", "memory", "state", "step, ms", "window, ms", "steps/s")
    table = _table("Costs", ("model",), columns)
    table.caption = (
        "memory: the earlier tokens that an answer depends on; state: bytes of a session\n"
        f"step, window: over one connection; steps/s: over {CONNECTIONS}; {ROUNDS} rounds: median, range"
    )

    def spread(value: Spread, form: str) -> str:
        return f"{value.median:{form}}\n{value.least:{form}}-{value.most:{form}}"

    for model in models:
        table.add_row(
            model.model,
            "-" if model.weights is None else f"{model.weights / 1e6:.2f} M",
            {FADES: "fades", UNKNOWN: "-"}.get(_memory(model), f"{model.reach or 0:,}"),
            _number(model.state_bytes, ","),
            spread(model.step_ms, ".2f"),
            spread(model.window_ms, ".2f"),
            spread(model.tokens_per_s, ".0f"),
        )
    return table


FADES, FINITE, UNKNOWN = "memory fades", "finite memory", "memory unknown"


def _memory(model: ModelFigures) -> str:
    if model.reach is not None:
        return FINITE
    return UNKNOWN if model.weights is None else FADES


def report_tables(report: Document) -> list[Table]:
    """Returns the tables of a report. The tables show the latency of each model and mode, the error bounds that its
    windows reached, and the agreement and the sessions of each model."""
    of = f"{report['replicas']} replicas, {report['device']}" if "replicas" in report else report["device"]
    latency = _table(f"Latency, ms ({of})", ("model", "mode", "phase"), ("requests", "p50", "p90", "p99"))
    agreement = _table(
        "Agreement (TV: total variation)",
        ("model",),
        ("pairs", "top-1", "proved", "TV mean", "TV max", "bound mean", "bound max", "over bound"),
    )
    if "replicas" in report:
        latency.caption = "quantiles are computed from the summed histograms"
    windows = _table(
        "Windows that left tokens out", ("model", "window", "prove"), ("answers", "bound p50", "bound p90", "proved")
    )
    sessions = _table("Sessions", ("model", "version"), ("resident", "parked", "rebuilt"))
    for model in report["models"]:
        name = model["model"]
        for mode, measured in model["modes"].items():
            for phase, durations in measured["latency"].items():
                quantiles = [_number(durations[f"{quantile}_ms"], ".3f") for quantile in ("p50", "p90", "p99")]
                latency.add_row(name, mode, phase, str(measured["requests"]), *quantiles)
        for window in model["windows"]:
            windows.add_row(
                name,
                f"{window['k']} to {2 * window['k'] - 1}",
                "yes" if window["prove"] else "no",
                str(window["answers"]),
                _number(window["p50"], ".2g"),
                _number(window["p90"], ".2g"),
                f"{window['top1_proved'] / window['answers']:.1%}",
            )
        measured = model["agreement"]
        agreement.add_row(
            name,
            str(measured["compared"]),
            _number(measured["top1_match_rate"], ".1%"),
            _number(measured["top1_proved_rate"], ".1%"),
            _number(measured["total_variation"]["mean"], ".2e"),
            _number(measured["total_variation"]["max"], ".2e"),
            _number(measured["error_bound"]["mean"], ".2e"),
            _number(measured["error_bound"]["max"], ".2e"),
            str(measured["bound_violations"]),
        )
        sessions.add_row(
            name, model["model_version"], *(str(model["sessions"][kind]) for kind in ("resident", "parked", "rebuilt"))
        )
    some = [windows, *_live_tables(report["models"])]
    return [latency, *(table for table in some if table.rows), agreement, sessions]


def _live_tables(models: Sequence[Document]) -> list[Table]:
    """Returns the tables of live accuracy, one for each K."""
    tables: dict[int, Table] = {}
    for model in models:
        if (live := model["live_accuracy"]) is None:
            continue
        k = live["k"]
        if k not in tables:
            title = "Next tokens among those that the answer before listed"
            columns = ("steps judged", f"recall@{k}", f"MRR@{k}", "unjudged")
            tables[k] = _table(title, ("model", "time"), columns)
        for span, counts in (("since the start", live["since_start"]), ("the last 10 min", live["recent"])):
            figures = (_number(counts[name], ".4f") for name in ("recall", "mrr"))
            tables[k].add_row(model["model"], span, f"{counts['judged']:,}", *figures, f"{counts['unjudged']:,}")
    return list(tables.values())


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for figure in figures:
        table.add_column(figure, justify="right", overflow="fold")
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"recurrent": "#0072b2", "window": "#d55e00"}  # the palette of Okabe and Ito, for colour-blind readers
FORMATS = (".png", ".svg", ".pdf")
FLOOR = 1e-9  # smaller values are drawn at this height, because a logarithmic axis has no zero


def save(compared: Measurements, path: Path) -> None:
    """Writes the plot to `path`. The suffix of `path` selects the format from FORMATS. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    latency, distance, top1 = figure.subplots(1, 3)
    figure.suptitle(f"{compared.model} {compared.model_version} on {compared.device}: recurrent against window")
    _draw_latency(latency, compared)
    _draw_distance(distance, compared)
    _draw_top1(top1, compared)
    figure.savefig(path, dpi=150)


def save_models(models: Sequence[ModelFigures], path: Path, same_tokens: bool) -> None:
    """Writes a plot of perplexity against the time of a step. See `save` and `quality_table`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, colour in ((FADES, COLOURS["recurrent"]), (FINITE, COLOURS["window"]), (UNKNOWN, "#009e73")):
        some = [model for model in models if _memory(model) == label]
        if some:
            x = [model.step_ms.median for model in some]
            around = [
                [model.step_ms.median - model.step_ms.least for model in some],
                [model.step_ms.most - model.step_ms.median for model in some],
            ]
            axes.errorbar(
                x, [model.perplexity for model in some], xerr=around, fmt="o", color=colour, label=label, lw=0.8
            )
    perplexity = "perplexity" if same_tokens else "perplexity, each of other tokens: not comparable"
    axes.set(xlabel="round trip of a step, one connection, ms (rounds: median, least to most)", ylabel=perplexity)
    axes.legend(frameon=False)
    _label_points(axes, [(model.model, model.step_ms, model.perplexity) for model in models])
    figure.savefig(path, dpi=150)


def _label_points(axes: Axes, points: Sequence[tuple[str, Spread, float]]) -> None:
    """Writes the name of each point (name, spread of x, y) beside its median, at the nearest place where it covers no
    name, point or spread."""
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None, "the axes are in no figure: this is a bug"
    figure.draw_without_rendering()  # The data's coordinates are final only after the layout.
    taken = []
    for _, x, y in points:
        (start, height), (middle, _), (end, _) = axes.transData.transform(
            [(at, y) for at in (x.least, x.median, x.most)]
        )
        taken.append(Bbox.from_bounds(middle - 8, height - 8, 16, 16))
        taken.append(Bbox.from_extents(start, height - 1, end, height + 1))
    for name, x, y in points:
        for up, across in itertools.product((8, -8, 16, -16, 24, -24, 32, -32, 40, -40), (8, -8)):
            label = axes.annotate(
                name, (x.median, y), xytext=(across, up), textcoords="offset points", fontsize=8, va="center",
                ha="left" if across > 0 else "right",
            )  # fmt: skip
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            label.remove()
        taken.append(box)


def _draw_latency(axes: Axes, compared: Measurements) -> None:
    """Draws the latency of each phase and mode, with a mark at the median and a line to the 99th percentile."""
    for offset, (mode, phases) in zip((-0.12, 0.12), compared.latency.items(), strict=True):
        places = [index + offset for index in range(len(PHASES))]
        medians = [phases[phase].p50 for phase in PHASES]
        tails = [phases[phase].p99 - phases[phase].p50 for phase in PHASES]
        label = mode if mode == "recurrent" else f"window of {compared.k}"
        lines = ([0.0] * len(PHASES), tails)
        axes.errorbar(places, medians, lines, fmt="o", capsize=3, color=COLOURS[mode], label=label)
    axes.set_xticks(range(len(PHASES)), [phase.replace("_", " ") for phase in PHASES])
    title = f"Latency of one next token ({compared.steps} tokens)"
    axes.set(yscale="log", title=title, ylabel="ms, from p50 to p99")
    axes.legend(loc="lower right")


def _draw_distance(axes: Axes, compared: Measurements) -> None:
    """For a window size at which every answer has an error bound, draws the largest bound, too."""
    sizes = [line.window for line in compared.windows]
    for name, label, style in (("max", "largest", "o-"), ("mean", "mean", "s--")):
        values = [max(getattr(line.agreement, f"total_variation_{name}"), FLOOR) for line in compared.windows]
        axes.plot(sizes, values, style, color=COLOURS["window"], label=label)
    certified = [(line.window, line.agreement.error_bound) for line in compared.windows]
    bounds = [(size, max(bound, FLOOR)) for size, bound in certified if bound is not None]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), ":", color="black", label="bound")
    floored = any(line.agreement.total_variation_mean < FLOOR for line in compared.windows)
    label = "total variation" + (f" (values under {FLOOR:g} are drawn at {FLOOR:g})" if floored else "")
    axes.set(yscale="log", title="Total variation between window and recurrent", ylabel=label)
    _finish_window_axis(axes, compared, "lower left")


def _draw_top1(axes: Axes, compared: Measurements) -> None:
    sizes = [line.window for line in compared.windows]
    shares = [100 * line.agreement.top1_match_rate for line in compared.windows]
    axes.plot(sizes, shares, "o-", color=COLOURS["window"], label="top-1 equal")
    axes.set(ylim=(min(*shares, 90) - 2, 102), title="The same most probable token", ylabel="% of positions")
    _finish_window_axis(axes, compared, "lower right")


def _finish_window_axis(axes: Axes, compared: Measurements, legend: str) -> None:
    sizes = [line.window for line in compared.windows]
    axes.axvline(compared.model_k, color="grey", linewidth=0.8, label=f"the model's k = {compared.model_k}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("window, tokens")
    axes.legend(loc=legend)
