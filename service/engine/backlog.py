"""Admission control for long requests: refuses a request that cannot finish before its deadline.

The runner alternates between long requests: it runs one piece of each request's tokens at a time. A request *takes
turns* while it has pieces to run. Each long request therefore slows down all others. If too many are admitted, all of
them miss their deadlines, and their runs are wasted. Therefore the work of each request is estimated from the measured
cost of runs. A new request is refused if it, or a request admitted before it, would miss its deadline. The expected
time until request i ends is

    pace * (sum over j of min(left of i, left of j))

because the requests take equal turns: until request i ends, the runner works no longer for request j than for request
i. `left` is the expected remaining work of a request, in seconds of the runner's time. `pace` is the elapsed time per
second of work. The pace differs from 1 because steps and short requests use the runner too, and the processor may be
shared.

To measure the pace, each second of elapsed time is divided equally among the requests that take turns. A request's part
of the elapsed time is its *turn time*. The pace is the turn time per second of work. A stream that waits for its client
takes no turns.

Estimates may be wrong. A request is always admitted if no other request takes turns.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from wane.service.errors import Overloaded

LONG_S = 0.05
"""A request is long if its expected work is at least this many seconds. A shorter request is not counted in the
backlog, because it runs between the pieces of long requests.
"""

MEASURED_S, EMA_ALPHA = 0.5, 1 / 4
"""A measurement over MEASURED_S seconds of work or more has the weight EMA_ALPHA in the moving average of the pace. The
weight of a shorter measurement is proportional to its work."""

MARGIN = 1.25
"""Safety factor on the expected time until a request ends. The factor is above 1 because a request that misses its
deadline has slowed down all other requests, whereas a refused request can be retried."""

FASTEST, SLOWEST = 0.25, 8.0
"""The smallest and the largest accepted value of a measured pace. A measured value outside of this range is replaced by
the nearest accepted value."""

left_of = attrgetter("left_s")


def loop_time() -> float:
    """Returns the event loop's time in seconds, which is the time scale of deadlines."""
    return asyncio.get_running_loop().time()


class Share:
    """One request's entry in the backlog. It takes turns until it is paused, has no work left, or has ended."""

    __slots__ = ("_backlog", "deadline", "left_s", "seconds", "takes_turns", "turn_s")

    def __init__(self, backlog: Backlog | None, seconds: float, deadline: float | None) -> None:
        self._backlog = backlog
        self.seconds = self.left_s = seconds
        self.deadline = math.inf if deadline is None else deadline
        self.takes_turns = False
        self.turn_s = 0.0  # turn time since the last progress

    def progress(self, part: float) -> None:
        """Records that the fraction `part` of the request's work, from 0 to 1, is done."""
        left_s = min(self.left_s, max(0.0, 1 - part) * self.seconds)
        worked_s, self.left_s = self.left_s - left_s, left_s
        if self._backlog is None or not worked_s:
            return
        self._backlog.divide_time()
        self._backlog.worked(worked_s, self.turn_s)
        self.turn_s = 0.0
        if not left_s:
            self.pause()

    def pause(self) -> None:
        """Stops taking turns, because the request waits for its client or has ended."""
        if self._backlog is not None:
            self._backlog.divide_time()
            self.takes_turns = False

    def resume(self) -> None:
        """Takes turns again, if work remains."""
        if self._backlog is not None and self.left_s:
            self._backlog.divide_time()
            self.takes_turns = True


class Backlog:
    """The long requests of one engine. All methods must be called on the event loop's thread."""

    def __init__(self, on_refuse: Callable[[], None], clock: Callable[[], float] = loop_time) -> None:
        """`clock` returns seconds on the deadlines' time scale."""
        self._on_refuse = on_refuse
        self._clock = clock
        self.shares: list[Share] = []
        self.pace = 1.0
        self._divided_s = 0.0  # until when the elapsed time is divided among the shares

    @contextmanager
    def share(self, seconds: float, deadline: float | None) -> Iterator[Share]:
        """Admits a request with an expected work of `seconds`. If the request ends early, its unfinished work does not
        change the pace, because only `Share.progress` updates the pace. Raises Overloaded.
        """
        if seconds < LONG_S:
            yield Share(None, seconds, deadline)
            return
        share = Share(self, seconds, deadline)
        if any(other.takes_turns and other.deadline > self._clock() for other in self.shares):
            self.check(share)
        self.shares.append(share)
        share.resume()
        try:
            yield share
        finally:
            share.pause()
            share.left_s = 0.0  # prevents a later resume
            self.shares.remove(share)

    def divide_time(self) -> None:
        """Divides the time since the last call among the shares that take turns. A share calls this before it begins or
        ends to take turns."""
        before_s, self._divided_s = self._divided_s, self._clock()
        taking = [share for share in self.shares if share.takes_turns]
        for share in taking:
            share.turn_s += (self._divided_s - before_s) / len(taking)

    def worked(self, seconds: float, turn_s: float) -> None:
        """Updates the pace: `seconds` of expected work were done in `turn_s` of turn time."""
        weight = EMA_ALPHA * min(seconds / MEASURED_S, 1)
        self.pace += weight * (min(max(turn_s / seconds, FASTEST), SLOWEST) - self.pace)

    def check(self, new: Share) -> None:
        """Raises Overloaded if the new request would miss its deadline, or would make an admitted request miss its
        deadline."""
        now = self._clock()
        shares = [share for share in self.shares if share.deadline > now]
        shares.sort(key=left_of)
        own_s, left_s = MARGIN * self.pace * new.left_s, new.deadline - now
        finish_s = MARGIN * self.pace * (new.left_s + sum([min(share.left_s, new.left_s) for share in shares]))
        if 0 < left_s < finish_s:
            self._refuse(
                f"the request may take {own_s:.1f} s, and {finish_s:.1f} s with the requests that were admitted "
                f"before it; its deadline is in {left_s:.1f} s",
                finish_s - left_s,
            )
        shorter_s = 0.0
        for index, share in enumerate(shares):
            before_s, left_s = self.pace * (shorter_s + share.left_s * (len(shares) - index)), share.deadline - now
            if before_s <= left_s < MARGIN * (before_s + self.pace * min(share.left_s, new.left_s)):
                self._refuse(
                    f"the request may take {own_s:.1f} s, and would make a request that was admitted earlier miss its "
                    "deadline",
                    before_s,
                )
            shorter_s += share.left_s

    def _refuse(self, why: str, retry_after_s: float) -> None:
        self._on_refuse()
        raise Overloaded(why, retry_after_s)
