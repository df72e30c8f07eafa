"""What a large body holds, counted before it is decoded: decoding is one call that nothing interrupts.

A decoder of JSON takes a second for four megabytes of empty lists, and it holds the interpreter for all of it, on
whatever thread it runs. To count what it would make takes some milliseconds of numpy, which leaves the interpreter to
the event loop meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.errors import NotJson

MOST_DIGITS = 1000
"""Of one number in a large body: what a number takes to decode grows with the square of its digits."""

QUOTE, BACKSLASH, COMMA, COLON, BRACKET, BRACE, ZERO = b'"\\,:[{0'

Mask = NDArray[np.bool_]


class Most(NamedTuple):
    """What a body may hold: values in all, and fields, and objects and lists."""

    values: int
    fields: int
    containers: int


def excess(raw: bytes, most: Most) -> tuple[int, str] | None:
    """Where a body goes over what it may hold, and of what it holds too much; None if it does not.

    What is in a string does not count. Raises NotJson for a number that is too long to be read.
    """
    data = np.frombuffer(raw, np.uint8)
    outside = np.bitwise_xor.accumulate(_quotes(data).view(np.uint8)) == 0
    _check_numbers(outside & (data - ZERO <= 9))
    found = [
        (place, f"{count} {name}")
        for name, count, mask in (
            ("comma-separated values", most.values, data == COMMA),
            ("fields", most.fields, data == COLON),
            ("objects and lists", most.containers, (data == BRACKET) | (data == BRACE)),
        )
        if (place := _place_after(mask & outside, count)) is not None
    ]
    return min(found, default=None)


def _quotes(data: NDArray[np.uint8]) -> Mask:
    """Where strings begin and end: at quotes with no backslash before them, or an even number of them."""
    quotes: Mask = data == QUOTE
    backslashes: Mask = data == BACKSLASH
    if backslashes.any():
        ordinals = np.arange(1, len(data) + 1, dtype=np.int64)
        run = ordinals - np.maximum.accumulate(ordinals * ~backslashes)  # of backslashes, up to each place
        quotes[1:] &= run[:-1] & 1 == 0
    return quotes


def _place_after(mask: Mask, count: int) -> int | None:
    """Where the first is that is one too many; None if there is none."""
    return int(np.flatnonzero(mask)[count]) if np.count_nonzero(mask) > count else None


def _check_numbers(digits: Mask) -> None:
    ends = np.flatnonzero(~digits)
    runs = np.diff(ends, prepend=-1, append=len(digits)) - 1
    longest = int(runs.argmax())
    if runs[longest] > MOST_DIGITS:
        at = 0 if longest == 0 else int(ends[longest - 1]) + 1
        raise NotJson(f"the body has a number of {runs[longest]} digits at byte {at}; at most {MOST_DIGITS} are read")
