"""What clients did to sessions and were told, held against what the sessions hold in the end; in the manner of Jepsen.

A session is a list that tokens are only ever appended to. A client invokes an append, of one token or several, and is
told where it went, that it was refused, or nothing: the connection broke, or time ran out. One append may be sent many
times, by a client or by what stands between, and is one operation all the same. From the tokens that a session holds in
the end, and from the times at which operations were invoked and answered, `faults` finds

    lost          an acknowledged append that is not where it was said to be, alone
    duplicated    tokens at more places than appends put them
    strange       tokens that nobody appended
    reordered     an append before another that was answered before it was invoked
    refused       tokens of an append that was refused, and is there all the same

An append without an answer may have been applied or not, and later than it was given up: it is taken for applied where
that explains what is there. So is one that was acknowledged as not durable, which a store may lose, but not turn round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What became of an operation, as far as its client knows."""

    ACKNOWLEDGED = "acknowledged"
    NOT_DURABLE = "not durable"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Append:
    """One operation on one session. `start` is where its first token was said to be, or was asked to be; None where
    neither is so. Times are seconds on one clock; what has no answer ends never."""

    tokens: tuple[int, ...]
    outcome: Outcome
    start: int | None
    invoked_s: float
    ended_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Fault:
    """One finding; `place` is a position in the session."""

    kind: str
    place: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}: {self.text}"


def faults(history: Sequence[Append], final: Sequence[int]) -> list[Fault]:
    """What is wrong with the tokens that a session holds in the end; nothing where some order of the appends, which
    agrees with their times, explains them."""
    acknowledged = sorted((one for one in history if one.outcome is Outcome.ACKNOWLEDGED), key=_start)
    found = list(_lost(acknowledged, final))
    return found or _Explanation(history, {_start(one): one for one in acknowledged}, tuple(final)).faults()


def _start(append: Append) -> int:
    assert append.start is not None, "an acknowledgement says where the tokens are"
    return append.start


def _lost(acknowledged: Sequence[Append], final: Sequence[int]) -> Iterator[Fault]:
    """Acknowledged appends that are not in their places, or have to share one."""
    end = 0
    for append in acknowledged:
        start = _start(append)
        there = tuple(final[start : start + len(append.tokens)])
        if there != append.tokens:
            yield Fault("lost", start, f"{list(append.tokens)} was acknowledged, but there is {list(there)}")
        elif start < end:
            yield Fault("lost", start, f"{list(append.tokens)} was acknowledged where another append was, too")
        end = start + len(append.tokens)


class _Explanation:
    """An order of appends that gives the tokens of a session. What was acknowledged stands at its place; in between,
    each place is taken by an append that may have been applied, no append twice, none before one that had been
    answered before it was invoked. Found by search: where several appends may have the same place, each is tried."""

    def __init__(self, history: Sequence[Append], fixed: Mapping[int, Append], final: tuple[int, ...]) -> None:
        self.final = final
        self.fixed = fixed
        self.possible = [one for one in history if one.outcome in (Outcome.UNKNOWN, Outcome.NOT_DURABLE)]
        self.refused = [one for one in history if one.outcome is Outcome.REFUSED]

    def faults(self) -> list[Fault]:
        """Nothing if there is one; else what is wrong at the first place that no order explains."""
        place = self._unexplained()
        if place is None:
            return []
        token = self.final[place]
        if any(self._fits(append, place) for append in self.refused):
            return [Fault("refused", place, f"{token} was refused, and is there")]
        given = sum(append.tokens.count(token) for append in (*self.fixed.values(), *self.possible))
        if not given:
            return [Fault("strange", place, f"nobody appended {token}")]
        if self.final.count(token) > given:
            return [Fault("duplicated", place, f"{token} was appended {given} times, and is more often there")]
        return [Fault("reordered", place, f"{token} is not where its append can have put it")]

    def _fits(self, append: Append, place: int) -> bool:
        """Whether the append's tokens are there, may be there, and leave what was acknowledged its place."""
        end = place + len(append.tokens)
        return (
            self.final[place:end] == append.tokens
            and append.start in (None, place)
            and not any(start in self.fixed for start in range(place, end))
        )

    def _unexplained(self) -> int | None:
        """The first place that no order explains. A branch of the search is a place, which of the possible appends
        stand before it, and when the latest of those that stand there was invoked."""
        branches: list[tuple[int, frozenset[int], float]] = [(0, frozenset(), -math.inf)]
        seen = set(branches)
        furthest = 0
        while branches:
            place, used, latest_s = branches.pop()
            furthest = max(furthest, place)
            if place == len(self.final):
                return None
            fixed = self.fixed.get(place)
            ways = (
                [(fixed, used)]
                if fixed is not None
                else [
                    (append, used | {number})
                    for number, append in enumerate(self.possible)
                    if number not in used and self._fits(append, place)
                ]
            )
            for append, using in ways:
                if append.ended_s >= latest_s:
                    branch = (place + len(append.tokens), using, max(latest_s, append.invoked_s))
                    if branch not in seen:
                        seen.add(branch)
                        branches.append(branch)
        return furthest
