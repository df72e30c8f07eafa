"""Finds ids that differ in form only, such as `1097` and `1097.0`, or `Blue` and `blue`, and ids such as `NaN`, which
programs write for an absent value."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.event_files.faults import counted, listed, shown

INTEGER = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")
UNUSUAL = re.compile(r"(?m)^[+-]|^0[0-9]|\.0*$|[^\S\n]")
"""What an ASCII name has if its plain form is not just the name in lower case."""

ABSENT = frozenset({"nan", "null", "none", "na", "n/a", "<na>"})
"""What programs write for an absent value, in lower case."""

LONGEST_ABSENT = max(map(len, ABSENT))


def plain(name: str) -> str:
    """Returns the form that names of the same meaning share: an integer without sign +, leading zeros and decimals, and
    other text in lower case, with Unicode's compatible characters (NFKC) and one blank for several."""
    number = INTEGER.fullmatch(name)
    if number is not None:
        sign, digits = number.groups()
        return digits if sign != "-" or digits == "0" else f"-{digits}"
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _plain_forms(names: Sequence[str]) -> list[str]:
    """Returns the plain form of each name. Plain ASCII names are converted all at once, which is ten times as fast."""
    text = "\n".join(names)
    if text.isascii() and not UNUSUAL.search(text):
        forms = text.lower().split("\n")
        if len(forms) == len(names):
            return forms
    return [*map(plain, names)]


def describe_forms(kind: str, names: Sequence[str], counts: NDArray[np.int64]) -> list[str]:
    """Returns a sentence about the names that differ from another one in form only, or nothing if there are none.
    `kind`: what the names are, in the plural. counts: int64 (names,), the number of events of each name."""
    forms = _plain_forms(names)
    if len(set(forms)) == len(forms):
        return []
    first: dict[str, int] = {}
    others = [(same, index) for index, form in enumerate(forms) if (same := first.setdefault(form, index)) != index]
    one, other = max(others, key=lambda pair: min(counts[pair[0]], counts[pair[1]]))
    differing = {index for pair in others for index in pair}
    example = " and ".join(f"{shown(names[at])} ({counted(int(counts[at]), 'event')})" for at in (one, other))
    return [
        f"{len(differing):,} {kind} differ from another one in form only, such as {example}: "
        f"they are read as different {kind}"
    ]


def describe_absent(kind: str, names: Sequence[str], counts: NDArray[np.int64]) -> list[str]:
    """Returns a sentence about the names that may stand for an absent value, or nothing. The arguments are those of
    `describe_forms`."""
    found = [at for at, name in enumerate(names) if len(name) <= LONGEST_ABSENT and name.lower() in ABSENT]
    if not found:
        return []
    such = listed(f"{shown(names[at])} ({counted(int(counts[at]), 'event')})" for at in found)
    return [f"{such} among the {kind} may stand for an absent value: read as a name like any other"]
