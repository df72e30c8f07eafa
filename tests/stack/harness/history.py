"""Checks the final tokens of sessions against the operations of their clients and the answers to them, as Jepsen does.

A session is an append-only list of tokens. A client invokes an append of one or several tokens. The answer is a
position or a rejection. There is no answer if the connection broke or timed out. A client or a proxy may send the same
append many times. It is still one operation. `faults` compares the final tokens of a session with the operations, and
with the times at which they were invoked and answered. It finds these kinds of faults:

    lost          an acknowledged append that is not at its position, or not alone there
    duplicated    a token that the session has more often than clients appended it
    strange       a token that no client appended
    reordered     a token at a position where no append can have put it, such as the token of an append that was
                  invoked after the answer to another append, but is before that append in the session
    refused       a token of an append that was rejected, but applied

An append without an answer may have been applied, even after its client stopped waiting. Such an append counts as
applied if the session's tokens can then be explained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """The outcome of an operation, as its client knows it."""

    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Append:
    """One append to one session. `start` is the position of its first token. If the append was answered, `start`
    follows from the answer. Otherwise `start` is the position in the request, or None if the request has no position.
    All times are seconds of the same clock. `ended_s` is infinite if there was no answer."""

    tokens: tuple[int, ...]
    outcome: Outcome
    start: int | None
    invoked_s: float
    ended_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `place` is a position in the session."""

    kind: str
    place: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}: {self.text}"


def faults(history: Sequence[Append], final: Sequence[int]) -> list[Fault]:
    """Returns the faults in the final tokens of a session. The result is empty if an order of the appends explains the
    tokens and agrees with the times of the appends."""
    acknowledged = sorted((one for one in history if one.outcome is Outcome.ACKNOWLEDGED), key=_start)
    found = list(_lost(acknowledged, final))
    return found or _Explanation(history, {_start(one): one for one in acknowledged}, tuple(final)).faults()


def _start(append: Append) -> int:
    assert append.start is not None, "an acknowledged append has no position"
    return append.start


def _lost(acknowledged: Sequence[Append], final: Sequence[int]) -> Iterator[Fault]:
    """Yields a fault for each acknowledged append that is not at its position, or that overlaps another acknowledged
    append."""
    end = 0
    for append in acknowledged:
        start = _start(append)
        there = tuple(final[start : start + len(append.tokens)])
        if there != append.tokens:
            yield Fault("lost", start, f"{list(append.tokens)} was acknowledged, but the session has {list(there)}")
        elif start < end:
            yield Fault("lost", start, f"{list(append.tokens)} was acknowledged at the position of another append")
        end = start + len(append.tokens)


class _Explanation:
    """Searches for an order of appends that explains the tokens of a session. Acknowledged appends are at their
    positions. Between them are appends that may have been applied, each at most once. An append that was answered
    before another append was invoked is applied before that append. If several appends are possible at a position, the
    search tries each of them."""

    def __init__(self, history: Sequence[Append], fixed: Mapping[int, Append], final: tuple[int, ...]) -> None:
        self.final = final
        self.fixed = fixed
        self.possible = [one for one in history if one.outcome is Outcome.UNKNOWN]
        self.refused = [one for one in history if one.outcome is Outcome.REFUSED]

    def faults(self) -> list[Fault]:
        """Returns no faults if an order explains all tokens. Otherwise returns the fault at the first position that no
        order explains."""
        place = self._unexplained()
        if place is None:
            return []
        token = self.final[place]
        if any(self._fits(append, place) for append in self.refused):
            return [
                Fault("refused", place, f"an append of the token {token} was rejected, but the session has the token")
            ]
        given = sum(append.tokens.count(token) for append in (*self.fixed.values(), *self.possible))
        if not given:
            return [Fault("strange", place, f"no client appended the token {token}")]
        if self.final.count(token) > given:
            return [Fault("duplicated", place, f"the token {token} was appended {given} times, but occurs more often")]
        return [Fault("reordered", place, f"the token {token} is at a position where no append can have put it")]

    def _fits(self, append: Append, place: int) -> bool:
        """Returns whether an append can be at `place`: its tokens are there, its `start` is None or `place`, and its
        tokens overlap no acknowledged append."""
        end = place + len(append.tokens)
        return (
            self.final[place:end] == append.tokens
            and append.start in (None, place)
            and not any(start in self.fixed for start in range(place, end))
        )

    def _unexplained(self) -> int | None:
        """Returns the first position that no order explains, or None if an order explains all tokens. A branch of the
        search consists of a position, the appends that explain the tokens before this position, and the latest time at
        which one of these appends was invoked."""
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
