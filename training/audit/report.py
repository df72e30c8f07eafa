"""The report of an audit: `audit.json`, and the printed tables.

The schema is stable. If a field is renamed or its meaning changes, `schema_version` must be increased.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wane.models.architecture import AnyArchitecture, Architecture
from wane.models.layer_registry import Frozen
from wane.models.manifest import Certificate, NotNegative, Perplexity, Positive, Sha256
from wane.training.audit.forgetting import AtLag, AtWindow, Quantiles


class AuditedModel(Frozen):
    """The audited model. `tensors`: each weight's name in the file. `notes`: the assumptions and conversions."""

    source: Literal["checkpoint", "onnx", "bundle", "run"]
    file: str
    sha256: Sha256 | None
    architecture: AnyArchitecture
    parameters: NotNegative
    tensors: dict[str, str]
    notes: tuple[str, ...]


class AuditedText(Frozen):
    """The audited text.

    `unknown`: the number of `<unk>` tokens. `positions`: the number of positions at which windows were compared with
    the uninterrupted run. At each of these positions, the uninterrupted run has read at least `behind` tokens.
    `gradient_positions`: the number of positions at which gradients were computed. Both counts of positions are 0 if no
    measurement was possible.
    """

    split: str
    files: dict[str, Sha256]
    tokens: Positive
    words: int | None
    unknown: int
    positions: int = Field(ge=0)
    behind: Positive
    gradient_positions: int = Field(ge=0)


class Margin(Frozen):
    """A sufficient condition for a layer's state to forget the earlier inputs. The condition holds if `factor` < 1.

    `margin`: 1 - factor, negative if the condition fails. `factor` and `margin` are null if the condition does not
    apply to the layer. `best`: whether the certificate uses this condition for the layer.
    """

    layer: int
    rule: str
    norm: str
    factor: float | None
    margin: float | None
    best: bool


class Recommended(Frozen):
    """The recommended window lengths k for a tolerance of total variation. A field is null if no evaluated window is
    long enough.

    Each field is the smallest evaluated k for which a condition holds, and also holds for all larger evaluated k.
    `p99`: 99 % of the positions are within the tolerance (measured). `max`: all positions are within the tolerance
    (measured). `certified`: every token of every text is within the tolerance (proved). `perplexity`: the windows'
    perplexity is within 0.5 % of the recurrent perplexity (measured).
    """

    tolerance: float = Field(gt=0)
    p99: Positive | None
    max: Positive | None
    certified: Positive | None
    perplexity: Positive | None


class AuditReport(Frozen):
    """The content of `audit.json`.

    `perplexity`: the recurrent perplexity over the whole text. Distances are 2-norms of differences between inputs of
    the output layer. The certificate's curves hold for the float32 weights in exact arithmetic. Measurements are of
    float32 runs. At large k the window and the uninterrupted run differ only by rounding. `unmeasured`: if the model's
    runs overflow, the reason why the report has no perplexity, windows and gradients.
    """

    schema_version: Literal[1] = 1
    model: AuditedModel
    text: AuditedText
    perplexity: Perplexity | None
    certificate: Certificate
    margins: tuple[Margin, ...]
    unmeasured: str | None = None
    windows: tuple[AtWindow, ...]
    gradients: tuple[AtLag, ...]
    recommended: Recommended


def margins(certificate: Certificate) -> tuple[Margin, ...]:
    """Returns all conditions that were tried on all layers, bottom to top."""
    found = []
    for layer in certificate.layers:
        tried = [(one.rule, one.norm, one.factor) for one in layer.conditions]
        if all((layer.rule, layer.norm) != one[:2] for one in tried):
            tried.insert(0, (layer.rule, layer.norm, layer.factor))
        found += [
            Margin(
                layer=layer.layer,
                rule=rule,
                norm=norm,
                factor=factor,
                margin=None if factor is None else 1 - factor,
                best=(rule, norm) == (layer.rule, layer.norm),
            )
            for rule, norm, factor in tried
        ]
    return tuple(found)


def show(report: AuditReport, console: Console) -> None:
    """Prints the report."""
    model, text = report.model, report.text
    architecture = model.architecture
    console.print(
        f"[bold]{escape(model.file)}[/]: {_layers(architecture)}, vocabulary {architecture.vocabulary_size:,}, "
        f"{model.parameters:,} weights",
        highlight=False,
    )
    for note in model.notes:
        console.print(f"  [dim]- {escape(note)}[/]", highlight=False, soft_wrap=True)
    words = "" if text.words is None else f", {text.words:,} words"
    console.print(
        f"text: {text.tokens:,} tokens{words} of {len(text.files)} file(s), {text.unknown / text.tokens:.2%} unknown"
        f"{_perplexity(report.perplexity)}",
        highlight=False,
    )
    certificate = report.certificate
    if architecture.layers:
        console.print(_margins(report))
    if certificate.certified:
        console.print("[bold green]certified[/]: the bound on the total variation falls to 1e-3 and stays there")
    else:
        console.print(f"[bold red]not certified[/]: {escape(certificate.reason or 'no reason')}", highlight=False)
    if report.unmeasured is None:
        _show_measured(report, console)
    else:
        console.print(f"[bold red]not measured[/]: {escape(report.unmeasured)}", highlight=False)
    console.print(_recommended(report.recommended))


def _layers(architecture: Architecture) -> str:
    if not architecture.layers:
        return "an imported graph, of which everything below is measured"
    return f"{architecture.family}, {len(architecture.layers)} layer(s) of {architecture.hidden}"


def _perplexity(found: Perplexity | None) -> str:
    if found is None:
        return ""
    per_word = "" if found.per_word is None else f" ({found.per_word:.2f} per word)"
    return f"; recurrent perplexity {found.per_token:.2f} per token{per_word}"


def _show_measured(report: AuditReport, console: Console) -> None:
    text = report.text
    console.print(_forgetting(report))
    console.print(
        f"[dim]measured at {text.positions:,} positions spread evenly over the text ({text.split}), each with at least "
        f"{text.behind} tokens before it; gradients at {text.gradient_positions}[/]",
        highlight=False,
    )
    if report.certificate.error_bound:
        console.print("[dim]proved: in exact arithmetic; answers add float32's rounding[/]", highlight=False)
    console.print(_gradient(report), highlight=False)


def _margins(report: AuditReport) -> Table:
    table = Table(title="conditions that prove that a layer forgets: a factor below 1", box=box.SIMPLE_HEAD)
    for heading in ("layer", "rule"):
        table.add_column(heading)
    for heading in ("factor", "margin: 1 - factor"):
        table.add_column(heading, justify="right")
    for one in report.margins:
        factor = "does not apply" if one.factor is None else f"{one.factor:.4g}"
        margin = "" if one.margin is None else f"{one.margin:+.4g}"
        colour = "green" if one.margin is not None and one.margin > 0 else "red"
        style = "bold" if one.best else "dim"
        table.add_row(str(one.layer), escape(one.rule), factor, f"[{colour}]{margin}[/]", style=style)
    return table


def _forgetting(report: AuditReport) -> Table:
    title = "the last k tokens compared with all tokens: distance, total variation"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    headings = ["k", "dist.\nmedian", "\np99", "\nmax", "var.\nmedian", "\np99", "\nmax"]
    headings += ["top-1\nmatch", "perpl.\nratio"]
    proved = bool(report.certificate.error_bound)
    for heading in [*headings, *(["var.\nproved"] if proved else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for at in report.windows:
        cells = [str(at.k), *_cells(at.distance), *_cells(at.total_variation), f"{at.top1_match:.3f}"]
        cells.append(f"{at.perplexity_ratio:.4f}")
        bound = report.certificate.error_bound_at(at.k)
        table.add_row(*cells, *([] if bound is None else [_short(bound)]))
    return table


def _cells(spread: Quantiles) -> list[str]:
    return [_short(value) for value in (spread.median, spread.p99, spread.max)]


def _short(value: float) -> str:
    """Formats a value like 3.2e-4."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0"


def _gradient(report: AuditReport) -> str:
    """Returns a sentence that names the i from which on the gradient's median stays below a hundredth of its value at
    i = 0."""
    if not report.gradients:
        return "gradients: not measured, because an imported graph has none"
    first = report.gradients[0].gradient.median
    said = "gradient |dp_t+i / dx_t| of a prediction with respect to the input i tokens before it: median"
    if first == 0:
        return f"{said} 0 at i = 0"
    below = None
    for at in reversed(report.gradients):
        if not at.gradient.median <= first / 100:
            break
        below = at.i
    fallen = "never falls below" if below is None else "has fallen below"
    until = "" if below is None else f" by i = {below}"
    return f"{said} {_short(first)} at i = 0; it {fallen} a hundredth of that{until}"


def _recommended(found: Recommended) -> Table:
    table = Table(title=f"recommended k, total variation <= {found.tolerance:g}", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("k", justify="right")
    for name, k in (
        ("measured, 99 % of the positions", found.p99),
        ("measured, every position", found.max),
        ("measured, perplexity within 0.5 %", found.perplexity),
        ("proved, for every text", found.certified),
    ):
        table.add_row(name, "none" if k is None else str(k))
    return table
