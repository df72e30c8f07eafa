"""The tables of `research.proofs`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.page import markdown
from research.proof_results import MedianAndLargest, ModelFigures, Results

SHOWN = 64


def tables(results: Results) -> dict[str, list[str]]:
    """Returns all tables, by the names of their markers on the page."""
    return {"models": models_table(results), "distances": distances_table(results), "answers": answers_table(results)}


def models_table(results: Results) -> list[str]:
    """Returns a table with one row per bundle: its certificate, its perplexity, and the shares of proved top-1 tokens
    for windows of SHOWN tokens."""
    names = (
        "bundle",
        "contraction by layer: factor, rule, norm",
        "k(1e-3)",
        f"epsilon({SHOWN})",
        f"perplexity: recurrent, window of {SHOWN}",
        f"top-1 proved at k = {SHOWN}: by the curve, by the request's bound, by the direction proof",
        "positions",
    )
    rows: list[list[str]] = []
    for name, model in sorted(results.models.items()):
        if (window := model.windows.get(SHOWN)) is None:
            continue
        by_window = model.window_perplexity.get(SHOWN)
        cells = [
            f"`{name}`",
            _layers(model),
            _k(model),
            "no curve" if window.worst_case_variation is None else _number(window.worst_case_variation),
            "unknown" if model.perplexity is None or by_window is None else f"{model.perplexity:.2f}, {by_window:.2f}",
            ", ".join(_share(share) for share in (window.proved.curve, window.proved.request, window.proved.direction)),
            f"{window.positions:,}",
        ]
        rows.append(cells)
    return markdown(names, rows)


def distances_table(results: Results) -> list[str]:
    """Returns the table of the observed distance between the window's and the never-interrupted run's states, and of
    the two bounds of this distance, by bundle and k."""
    names = (
        "bundle",
        "k",
        "positions",
        "observed distance",
        "worst case, e_k",
        "request's bound",
        "observed / e_k",
        "observed / request's bound",
    )
    rows: list[list[str]] = []
    for name, model in sorted(results.models.items()):
        for k, window in sorted(model.windows.items()):
            cells = [
                f"`{name}`",
                f"{k}",
                f"{window.positions:,}",
                _spread(window.observed),
                "none" if window.worst_case is None else _number(window.worst_case),
                _spread(window.request),
                "" if window.over_worst_case is None else _spread(window.over_worst_case),
                _spread(window.over_request),
            ]
            rows.append(cells)
    return markdown(names, rows)


def answers_table(results: Results) -> list[str]:
    """Returns the table of the total variation between the window's and the never-interrupted run's predictions, the
    bounds of this total variation, and the shares of proved top-1 tokens, by bundle and k."""
    names = (
        "bundle",
        "k",
        "observed total variation",
        "epsilon(k)",
        "request's bound",
        "direction proof's bound",
        "top-1 equal",
        "top-1 proved by the curve",
        "by the request's bound",
        "by the direction proof",
        "violations",
    )
    rows: list[list[str]] = []
    for name, model in sorted(results.models.items()):
        for k, window in sorted(model.windows.items()):
            cells = [
                f"`{name}`",
                f"{k}",
                _spread(window.observed_variation),
                "none" if window.worst_case_variation is None else _number(window.worst_case_variation),
                _spread(window.request_variation),
                "" if window.direction_variation is None else _spread(window.direction_variation),
                *(_share(share) for share in _shares(model, k)),
                f"{window.violations}",
            ]
            rows.append(cells)
    return markdown(names, rows)


def _shares(model: ModelFigures, k: int) -> Iterator[float]:
    window = model.windows[k]
    yield from (window.same_top1, window.proved.curve, window.proved.request, window.proved.direction)


def _layers(model: ModelFigures) -> str:
    if any(not layer.factor < 1 for layer in model.layers):
        return "none below 1"
    return "; ".join(
        f"{layer.factor:.4g}, {layer.rule}, {layer.norm.replace('|', chr(92) + '|')}" for layer in model.layers
    )


def _k(model: ModelFigures) -> str:
    if model.smallest_window is not None:
        return f"{model.smallest_window}"
    return f"over {model.max_window}" if model.curve else "none"


def _spread(spread: MedianAndLargest) -> str:
    """Formats a spread as `median (largest)`."""
    return f"{_number(spread.median)} ({_number(spread.largest)})"


def _number(value: float | None) -> str:
    """Formats a number with two significant digits. A value from 0.995 to 1 - 1e-9 is written as 0.99..., not as 1."""
    if value is None:
        return "none"
    if value == 0:
        return "0"
    if 0.995 <= value < 1:
        return "0.99..." if value < 1 - 1e-9 else "1"
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _share(share: float) -> str:
    """Formats a share as a percentage. Rounds down, so that only a share of 1 is written as 100 %."""
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    return f"{max(int(share * 1000), 1 if share > 0 else 0) / 10:.1f} %"
