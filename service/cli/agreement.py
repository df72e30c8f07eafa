"""Measures the agreement of a model's two modes over one or more sequences.

A session gets one token in each step, in the mode `both`. Then windows of several sizes are compared with recurrent
mode at a few positions, to show agreement as a function of k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from rich.progress import Progress

from wane.client import Agreement, ComparedMode, Model, Wane
from wane.service.cli.connect import CommandError

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
COMPARED_POSITIONS = 16  # the number of positions at which windows of every size are compared
COMPARED_HISTORY = 1024  # the largest number of tokens that are sent for such a position
REPEAT = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgreementSummary:
    """The agreement of the two modes over all pairs of answers. `error_bound` is the largest error bound of a window's
    answer with `prove`, and `error_bound_median` is their median. Both are None if an answer has no error bound."""

    compared: int
    top1_match_rate: float
    top1_proved_rate: float
    total_variation_mean: float
    total_variation_max: float
    max_logit_difference: float
    error_bound_median: float | None
    error_bound: float | None

    @classmethod
    def of(cls, pairs: Iterable[Agreement | None]) -> AgreementSummary:
        agreements = [agreement for agreement in pairs if agreement is not None]
        bounds = [agreement.error_bound for agreement in agreements if agreement.error_bound is not None]
        variations = [agreement.total_variation for agreement in agreements]
        return cls(
            compared=len(agreements),
            top1_match_rate=float(np.mean([agreement.top1_match for agreement in agreements])),
            top1_proved_rate=float(np.mean([agreement.top1_proved for agreement in agreements])),
            total_variation_mean=float(np.mean(variations)),
            total_variation_max=max(variations),
            max_logit_difference=max(agreement.max_logit_difference for agreement in agreements),
            error_bound_median=None if len(bounds) < len(agreements) else float(np.median(bounds)),
            error_bound=None if len(bounds) < len(agreements) else max(bounds),
        )


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """The results for windows of one size: the median compute time on the server and the agreement with recurrent mode,
    at up to COMPARED_POSITIONS positions."""

    window: int
    compute_ms: float
    agreement: AgreementSummary


@dataclass(frozen=True, slots=True)
class ModeAgreement:
    """The agreement of windows with recurrent mode. `k`: the model's own window size. `of_k`: the agreement of windows
    of k tokens, at all positions. `recurrent_compute_ms`: the median compute time of recurrent mode at the positions of
    `windows`."""

    k: int
    of_k: AgreementSummary
    recurrent_compute_ms: float
    windows: list[WindowSummary]


def choose(client: Wane, name: str | None = None) -> Model:
    """Returns the model `name`, or the server's default model. Raises WaneError, CommandError."""
    cards = client.models()
    for card in cards:
        if name in (None, card.id):
            return card
    if not cards:
        raise CommandError("the server has no models")
    raise CommandError(f"there is no model {name!r}; there are {', '.join(card.id for card in cards)}")


def track(progress: Progress, items: Iterable[T], total: int, description: str) -> list[T]:
    """Collects the items, and shows on a bar how many of `total` there are."""
    task = progress.add_task(description, total=total)
    collected = []
    for item in items:
        collected.append(item)
        progress.advance(task)
    progress.remove_task(task)
    return collected


def measure(
    client: Wane, card: Model, window: int, sequences: Sequence[list[int]], progress: Progress
) -> ModeAgreement:
    """Measures the agreement of a model's modes over sequences. `window` is a further window size. Raises WaneError."""
    # Each place is a pair: a sequence, and the number of its tokens that the model has read.
    places = [(tokens, end) for tokens in sequences for end in range(1, len(tokens) + 1)]
    few = [places[at] for at in np.linspace(0, len(places) - 1, min(len(places), COMPARED_POSITIONS), dtype=int)]
    sizes = sorted({*(size for size in WINDOWS if size <= card.max_window), window})

    def in_sessions() -> Iterator[Agreement | None]:
        for tokens in sequences:
            with client.session(model=card.id) as session:
                yield from (session.append(token, mode="both").agreement for token in tokens)

    comparisons = (
        client.compare(tokens[max(0, end - COMPARED_HISTORY) : end], model=card.id, windows=sizes, repeat=REPEAT)[0]
        for tokens, end in few
    )
    of_k = track(progress, in_sessions(), len(places), "Mode both")
    answers = track(progress, comparisons, len(few), "Windows of several sizes")
    return ModeAgreement(
        k=card.k,
        of_k=AgreementSummary.of(of_k),
        recurrent_compute_ms=_median_compute_ms([answer.recurrent for answer in answers]),
        windows=[_summary(size, [answer.windows[index] for answer in answers]) for index, size in enumerate(sizes)],
    )


def _median_compute_ms(lines: Sequence[ComparedMode]) -> float:
    return float(np.median([line.latency["compute"].p50_ms for line in lines]))


def _summary(size: int, lines: Sequence[ComparedMode]) -> WindowSummary:
    return WindowSummary(size, _median_compute_ms(lines), AgreementSummary.of([line.agreement for line in lines]))
