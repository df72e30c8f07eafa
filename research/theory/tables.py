"""The tables of research/theory.md, from the results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.page import markdown
from research.theory.curve import Result


def number(value: float | None) -> str:
    """Returns a number with two significant digits, as 0.012, 3,100 or 1.2e-07."""
    if value is None:
        return "not reached"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{float(f'{value:.2g}'):,g}"


def within(values: Sequence[float | None], form: str = "{:,.0f}") -> str:
    """Returns the median, and in brackets the smallest and the largest value."""
    known = sorted(math.inf if value is None else value for value in values)
    middle, least, most = (form.format(value) for value in (median(known), known[0], known[-1]))
    return middle if least == most else f"{middle} ({least} to {most})"


def all_of(found: Result) -> dict[str, list[str]]:
    """Returns every table by its name on the page."""
    return {
        "lemma 1": lemma1(found["lemma 1"]),
        "served": served(found["served"]["needed"]),
        "lemmas 2 and 3": gradients(found["lemma 2"], found["lemma 3"]),
        "proposition 2": proposition2(found["proposition 2"]),
        "growth": growth(found["proposition 2"]["growth"]),
        "theorem 1": theorem1(found["theorem 1"]["needed"]),
    }


def lemma1(rows: Iterable[Result]) -> list[str]:
    """The share of the bound that is attained, and the k for each epsilon."""
    rows = list(rows)
    epsilons = [need["epsilon"] for need in rows[0]["needed"]]
    names = ["W", "lambda", "largest share of the bound"]
    names += [f"k for {epsilon:g}: measured; formula" for epsilon in epsilons]
    return markdown(
        names,
        (
            [row["kind"], f"{row['factor']:g}", f"{row['largest_ratio']:.4g}"]
            + [f"{within(need['measured'])}; {within(need['formula'])}" for need in row["needed"]]
            for row in rows
        ),
    )


def served(needed: Iterable[Result]) -> list[str]:
    """The formula's k beside the certificate's."""
    names = ["distance of states", "Lemma 1's formula, tokens", "certificate, tokens"]
    return markdown(names, ((f"{n['epsilon']:g}", str(n["formula"]), str(n["certificate"])) for n in needed))


def gradients(second: Iterable[Result], third: Iterable[Result]) -> list[str]:
    """The shares of the bounds of Lemma 2 and of Lemma 3 that are attained."""
    names = ("W", "lambda", "Lemma 2: largest share of gamma k lambda^k", "Lemma 3: measured slope", "beta", "share")
    return markdown(
        names,
        (
            (
                two["kind"],
                f"{two['factor']:g}",
                number(two["largest_ratio"]),
                number(three["measured"]["median"][0]),
                number(three["bound"]["median"][0]),
                number(three["largest_ratio"]),
            )
            for two, three in zip(second, third, strict=True)
        ),
    )


def proposition2(found: Result) -> list[str]:
    """The distance of the weights after the last step."""
    rates = found["rates"]
    windows = [curve["window"] for curve in rates[0]["curves"]]
    names = ["step size", "constants, exponent", *(f"k = {k}: distance; bound" for k in windows), "loss, first to last"]
    rows = []
    for rate in rates:
        cells = [
            f"{number(curve['measured']['median'][-1])}; {number(curve['bound']['median'][-1])}"
            for curve in rate["curves"]
        ]
        loss = [number(rate["loss"][when]["median"][0]) for when in ("first", "last")]
        rows.append([rate["rate"], constants(rate), *cells, " to ".join(loss)])
    return markdown(names, rows)


def constants(rate: Result) -> str:
    """Names the constants of a rate's bound, with the median of the exponent alpha beta + 1."""
    where = bound_of(rate)
    return f"{where}, {number(median(rate[f'{where.split()[-1].lower()}_exponent']))}"


def bound_of(rate: Result) -> str:
    """Returns which constants the bound of a rate has."""
    return "Omega" if "beta" in rate["rate"] else "the path"


def growth(rates: Iterable[Result]) -> list[str]:
    """The growth of a small difference."""
    names = ("step size", "growth of a small difference", "allowed: N^(alpha beta)", "leaves the bound at step")
    rows = []
    for rate in rates:
        last = [number(rate[key]["median"][-1]) for key in ("measured", "bound")]
        rows.append((rate["rate"], *last, left(rate["left_at"])))
    return markdown(names, rows)


def left(steps: Sequence[int | None]) -> str:
    """Returns the steps at which the seeds leave the bound."""
    return "never" if set(steps) == {None} else within(steps)


def theorem1(needed: Iterable[Result]) -> list[str]:
    """The k that each epsilon needs: measured, and by the theorem with two kinds of constants."""
    names = ("epsilon", "measured k", "theorem, constants of the path", "theorem, constants of Omega")
    return markdown(
        names, ((f"{n['epsilon']:g}", within(n["measured"]), within(n["path"]), within(n["omega"])) for n in needed)
    )
