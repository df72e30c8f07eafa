"""Measures the latency of a model's two modes over one or more sequences, and the agreement of their answers.

The measurement makes three passes over the same positions. The first pass is recurrent: a session gets one token in
each step. The second pass uses windows of k tokens without a session. Each request has the last k + 1 tokens, because
an input that fits in the window would be run from the start token. The third pass uses the mode `both`, and gives the
agreement of the two modes. Finally, windows of several sizes are compared at a few positions, to show agreement as a
function of k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import numpy as np
from rich.progress import Progress

from wane.client import Agreement, Answer, ComparedMode, Model, Wane
from wane.client.answers import Mode
from wane.service.cli.compared_input import ComparedInput
from wane.service.cli.connect import CommandError

PHASES = ("queue", "compute", "total", "round_trip")
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
COMPARED_POSITIONS = 16  # the number of positions at which windows of every size are compared
COMPARED_HISTORY = 1024  # the largest number of tokens that are sent for such a position
REPEAT = 5

Timed = tuple[Answer, float]
"""An answer and its round-trip time in milliseconds."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of durations in milliseconds, with linear interpolation between two values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        return cls(*(float(value) for value in np.percentile(values, (50, 90, 99))))


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
    def of(cls, agreements: Sequence[Agreement]) -> AgreementSummary:
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
class Measurements:
    """The results of `measure`. `k`: the number of tokens in the measured windows. `model_k`: the model's default
    window size. `latency`: the quantiles of the latency by mode and phase, in milliseconds. `agreement`: the agreement
    of windows of `model_k` tokens with recurrent mode. `windows`: the results for each window size.

    `sequences`: the number of sequences. `unknown`: the number of occurrences of each event that the vocabulary lacks.
    These events were left out."""

    url: str
    model: str
    model_version: str
    device: str
    k: int
    model_k: int
    sequences: int
    steps: int
    unknown: dict[str, int]
    latency: dict[str, dict[str, Quantiles]]
    agreement: AgreementSummary
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


def measure(client: Wane, url: str, card: Model, k: int, compared: ComparedInput, progress: Progress) -> Measurements:
    """Measures both modes of a model over the sequences of `compared`. `k` is the number of tokens in a window. Raises
    WaneError."""
    model, sequences = card.id, compared.sequences
    # Each place is a pair: a sequence, and the number of its tokens that the model has read.
    places = [(tokens, end) for tokens in sequences for end in range(1, len(tokens) + 1)]
    few = [places[at] for at in np.linspace(0, len(places) - 1, min(len(places), COMPARED_POSITIONS), dtype=int)]
    sizes = sorted({*(size for size in WINDOWS if size <= card.max_window), k})

    def in_sessions(mode: Mode) -> Iterator[Timed]:
        for tokens in sequences:
            with client.session(model=model) as session:
                yield from (_timed(partial(session.append, token, mode=mode)) for token in tokens)

    in_windows = (
        _timed(partial(client.predict, tokens[max(0, end - 1 - k) : end], model=model, mode="window", window=k))
        for tokens, end in places
    )
    comparisons = (
        client.compare(tokens[max(0, end - COMPARED_HISTORY) : end], model=model, windows=sizes, repeat=REPEAT)[0]
        for tokens, end in few
    )
    recurrent = track(progress, in_sessions("recurrent"), len(places), "Mode recurrent")
    windowed = track(progress, in_windows, len(places), "Mode window")
    both = track(progress, in_sessions("both"), len(places), "Mode both")
    answers = track(progress, comparisons, len(few), "Windows of several sizes")
    return Measurements(
        url=url,
        model=model,
        model_version=card.model_version,
        device=card.device,
        k=k,
        model_k=card.k,
        sequences=len(sequences),
        steps=len(places),
        unknown=dict(compared.unknown),
        latency={"recurrent": _quantiles(recurrent), "window": _quantiles(windowed)},
        agreement=AgreementSummary.of([answer.agreement for answer, _ in both if answer.agreement is not None]),
        recurrent_compute_ms=_median_compute_ms([answer.recurrent for answer in answers]),
        windows=[_summary(size, [answer.windows[index] for answer in answers]) for index, size in enumerate(sizes)],
    )


def _timed(ask: Callable[[], Answer]) -> Timed:
    started = perf_counter()
    answer = ask()
    return answer, (perf_counter() - started) * 1000


def _quantiles(answers: Sequence[Timed]) -> dict[str, Quantiles]:
    phases = {phase: [getattr(answer.latency, f"{phase}_ms") for answer, _ in answers] for phase in PHASES[:3]}
    phases["round_trip"] = [round_trip_ms for _, round_trip_ms in answers]
    return {phase: Quantiles.of(values) for phase, values in phases.items()}


def _median_compute_ms(lines: Sequence[ComparedMode]) -> float:
    return float(np.median([line.latency["compute"].p50_ms for line in lines]))


def _summary(size: int, lines: Sequence[ComparedMode]) -> WindowSummary:
    return WindowSummary(
        size,
        _median_compute_ms(lines),
        AgreementSummary.of([line.agreement for line in lines if line.agreement is not None]),
    )
