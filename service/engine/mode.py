"""How requests are answered, and where the state behind an answer comes from."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How a request may ask to be answered."""

    AUTO = "auto"
    RECURRENT = "recurrent"
    WINDOW = "window"
    BOTH = "both"


class Origin(StrEnum):
    """Where the state behind an answer came from (the answer's `state`)."""

    RESIDENT = "resident"
    REBUILT = "rebuilt"
    WINDOW = "window"
    FULL = "full"
