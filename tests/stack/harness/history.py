"""Checks the final tokens of sessions against the operations and answers of their clients, like Jepsen.

A session is an append-only list of tokens. A client invokes an append, of one token or several. The answer is a
position, a rejection, or nothing, if the connection broke or timed out. One append may be sent many times, by a client
or by a proxy, and still is one operation. From the final tokens of a session, and from the times at which operations
were invoked and answered, `faults` finds

    lost          an acknowledged append that is not at its position, or not alone there
    duplicated    tokens at more places than appends put them
    strange       tokens that no client appended
    reordered     an append before another that was answered before it was invoked
    refused       tokens of an append that was rejected, but applied

An append without an answer may have been applied or not, even after its client gave up. It counts as applied if that
explains the tokens. So does an append acknowledged as not durable: a store may lose it, but not reorder it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """The outcome of an operation, as far as its client knows."""

    ACKNOWLEDGED = "acknowledged"
    NOT_DURABLE = "not durable"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Append:
    """One operation on one session. `start`: the position of its first token in the answer, or else in the request, or
    None. Times are seconds on one clock; an operation without an answer never ends."""

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
    """Returns the faults in the final tokens of a session. There are none if some order of the appends, which agrees
    with their times, explains the tokens."""
    acknowledged = sorted((one for one in history if one.outcome is Outcome.ACKNOWLEDGED), key=_start)
    found = list(_lost(acknowledged, final))
    return found or _Explanation(history, {_start(one): one for one in acknowledged}, tuple(final)).faults()


def _start(append: Append) -> int:
    assert append.start is not None, "an acknowledgement says where the tokens are"
    return append.start


def _lost(acknowledged: Sequence[Append], final: Sequence[int]) -> Iterator[Fault]:
    """Returns acknowledged appends that are not at their positions, or share one."""
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
    """Searches an order of appends that explains the tokens of a session. Acknowledged appends are at their positions.
    Between them are appends that may have been applied: none twice, and none before one that was answered before it was
    invoked. If several appends are possible at a position, the search tries each."""

    def __init__(self, history: Sequence[Append], fixed: Mapping[int, Append], final: tuple[int, ...]) -> None:
        self.final = final
        self.fixed = fixed
        self.possible = [one for one in history if one.outcome in (Outcome.UNKNOWN, Outcome.NOT_DURABLE)]
        self.refused = [one for one in history if one.outcome is Outcome.REFUSED]

    def faults(self) -> list[Fault]:
        """Returns no faults if there is such an order, else those at the first position that no order explains."""
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
        """Returns whether the append's tokens are at the position, may be there, and overlap no acknowledged append."""
        end = place + len(append.tokens)
        return (
            self.final[place:end] == append.tokens
            and append.start in (None, place)
            and not any(start in self.fixed for start in range(place, end))
        )

    def _unexplained(self) -> int | None:
        """Returns the first position that no order explains. A branch of the search is a position, the possible appends
        before it, and the latest time at which one of those was invoked."""
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
