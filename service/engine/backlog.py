"""The long requests that were let in, and whether one more can be over in time.

Long requests take turns at the runner, piece by piece, so that each of them is slowed down by all others. If more are
let in than can be over by their deadlines, all of them fail, after they have used the runner for nothing. So each is
estimated, by what runs were measured to cost, and refused at once where it, or one that was let in before, would be too
late:

    finish of i = pace * (sum over j of min(left of i, left of j))

which holds where turns are equal. `left` are the expected seconds of runs that a request still needs; `pace` is how
many seconds pass while one such second is worked off, measured while there is work: steps and short requests take their
part of the runner, and a processor may be shared.

Estimates may be wrong. A request that finds no other one here is let in, however long it is expected to take.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded

LONG_S = 0.05
"""What a request is expected to take at least to be counted here: shorter ones go between the turns of these."""

MEASURED_S = 0.5
"""Seconds of work for one measurement of the pace."""

NEWEST = 1 / 4
"""Weight of the latest measurement of the pace."""

MARGIN = 1.25
"""A request is let in if there is time for so much longer than is expected: one let in for nothing costs all others,
one refused for nothing only comes again."""

FASTEST, SLOWEST = 0.25, 8.0
"""Limits of the pace."""


def loop_time() -> float:
    """Seconds on the event loop's clock, on which deadlines are."""
    return asyncio.get_running_loop().time()


class Share:
    """What one request has in the backlog."""

    __slots__ = ("_backlog", "deadline", "left_s", "seconds")

    def __init__(self, backlog: Backlog | None, seconds: float, deadline: float | None) -> None:
        self._backlog = backlog
        self.seconds = self.left_s = seconds
        self.deadline = math.inf if deadline is None else deadline

    def progress(self, part: float) -> None:
        """That part of the request, from 0 to 1, is done."""
        left_s = min(self.left_s, max(0.0, 1 - part) * self.seconds)
        worked_s, self.left_s = self.left_s - left_s, left_s
        if self._backlog is not None and worked_s:
            self._backlog.worked(worked_s)


class Backlog:
    """The long requests of one engine. All methods belong to the event loop's thread."""

    def __init__(self, on_refuse: Callable[[], None], clock: Callable[[], float] = loop_time) -> None:
        """`clock`: the one that deadlines are on."""
        self._on_refuse = on_refuse
        self._clock = clock
        self._shares: list[Share] = []
        self._pace = 1.0
        self._since = 0.0
        self._worked_s = 0.0

    @property
    def seconds(self) -> float:
        """What is expected to be left of all, if nothing else comes."""
        return self._pace * sum(share.left_s for share in self._shares)

    @contextmanager
    def share(self, seconds: float, deadline: float | None) -> Iterator[Share]:
        """Lets a request in that is expected to take so many seconds of runs. Raises Overloaded."""
        if seconds < LONG_S:
            yield Share(None, seconds, deadline)
            return
        share = Share(self, seconds, deadline)
        if self._shares:
            self._check(share)
        else:
            self._measure_anew()
        self._shares.append(share)
        try:
            yield share
            share.progress(1)
        finally:
            self._shares.remove(share)

    def worked(self, seconds: float) -> None:
        """So many of the expected seconds were worked off."""
        self._worked_s += seconds
        if self._worked_s < MEASURED_S:
            return
        measured = (self._clock() - self._since) / self._worked_s
        self._pace += NEWEST * (min(max(measured, FASTEST), SLOWEST) - self._pace)
        self._measure_anew()

    def _measure_anew(self) -> None:
        self._since, self._worked_s = self._clock(), 0.0

    def _check(self, new: Share) -> None:
        """Raises Overloaded if the new one would be too late, or would make another too late."""
        now = self._clock()
        own_s, finish_s, left_s = self._pace * new.left_s, self._finish_s(new, new), new.deadline - now
        if 0 < left_s < MARGIN * finish_s:
            self._refuse(
                f"the request is expected to take {own_s:.1f} s, and {finish_s:.1f} s beside those that were let in "
                f"before it; its deadline is in {left_s:.1f} s",
                MARGIN * finish_s - left_s,
            )
        for share in self._shares:
            before_s, left_s = self._finish_s(share), share.deadline - now
            if before_s <= left_s < MARGIN * self._finish_s(share, new):
                self._refuse(
                    f"the request is expected to take {own_s:.1f} s, and one that was let in before it would miss its "
                    "deadline",
                    before_s,
                )

    def _finish_s(self, share: Share, *new: Share) -> float:
        """Seconds until it is over, where all of them take turns."""
        return self._pace * sum(min(share.left_s, other.left_s) for other in (*self._shares, *new))

    def _refuse(self, why: str, retry_after_s: float) -> None:
        self._on_refuse()
        raise Overloaded(why, retry_after_s)
