"""What the engine says of a text's log-probabilities, while it is run and when it is over."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.answers import Latency


@dataclass(frozen=True, slots=True)
class ScoreProgress:
    """So many of the tokens were run."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The log-probabilities of the tokens from the one at `position` on, which follow those known before.

    Of a truncated sequence nothing predicts the first token, whose log-probability and error bound are None; and
    `error_bounds` has that of each token, by the number of tokens before it.
    """

    position: int
    logprobs: tuple[float | None, ...]
    error_bounds: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """How `tokens` tokens were scored; `perplexity` is exp of minus the mean of the log-probabilities that there are,
    and None where there are none.

    `chunks`: how many the text was cut into, `warm_up` the fewest tokens that one was warmed up over, null in one.
    `rounds`: 1, and 1 for every cell of them that was run again. `max_residual`: how far a unit of the state was, at
    most, from where the chunk before had ended; 0: exact.
    """

    tokens: int
    perplexity: float | None
    chunks: int
    warm_up: int | None
    rounds: int
    max_residual: float
    error_bound: float | None
    latency: Latency


@dataclass(frozen=True, slots=True)
class Score:
    """One log-probability for each token asked about, and how they came about; `error_bounds` as in `ScoredTokens`."""

    logprobs: tuple[float | None, ...]
    summary: ScoreSummary
    error_bounds: tuple[float | None, ...] | None = None
