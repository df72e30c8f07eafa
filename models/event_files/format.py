"""The options that say how files of events are read: the keys of the table `[data]` that a format has."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from wane.models.event_files.faults import EventFileError
from wane.models.layer_registry import Frozen

Column = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=1, strict=True)]
"""A column's name, or its number from 1."""

TimeUnit = Literal["s", "ms", "us", "ns", "yyyymmdd", "spreadsheet", "year"]


class EventColumns(Frozen):
    """The keys of the table `[data.columns]`: the columns of a table of events, or the keys of event objects."""

    session: Column = Field(default="session", description="column of the session's id, or of the user's id")
    time: Column = Field(
        default="time",
        description="column of the event's time: a number (`data.time_unit`), or ISO 8601 such as "
        "`2026-01-31T12:00:00Z`; without a zone it is UTC",
    )
    item: Column = Field(default="item", description="column of the event's name or number")
    order: Column | None = Field(
        default=None,
        description="column of numbers that orders events of the same time; absent: they keep the order of the file",
    )


class EventFormat(Frozen):
    """The keys of the table `[data]` that say how files of events are read."""

    layout: Literal["events", "leave_one_out"] = Field(
        default="events",
        description="`leave_one_out`: each line has a user's training items, validation item and test item, such as "
        "`12 7 31,9,14`; the last two may be empty",
    )
    columns: EventColumns = EventColumns()
    fields: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None, description="names of all columns, for a file without a header; absent: those of the header"
    )
    header: bool | None = Field(
        default=None,
        description="whether the first line names the columns; absent: yes, unless there are `fields`, or "
        "`data.columns` has numbers that are not names in the first line",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="text between two columns, such as `;` or `::`; absent: the usual separator with which the first "
        "line has the columns",
    )
    quoting: bool | None = Field(
        default=None,
        description="whether quotation marks enclose cells, as in CSV; absent: yes, if the separator is `,` or `;`",
    )
    time_unit: TimeUnit | None = Field(
        default=None,
        description="what a time that is a number counts: `s`, `ms`, `us`, `ns`: since 1970; `yyyymmdd`: a day such as "
        "20260131; `spreadsheet`: days since 1899-12-30; `year`; absent: one of the first four, found by the size of "
        "the times, which must be between 1990 and 2100",
    )
    session_gap_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="largest time between successive events of a session, in seconds; after a longer time, a new "
        "session starts; absent: no limit",
    )
    on_bad_line: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="lines that cannot be read: `refuse` stops with their numbers; `skip` leaves them out and counts "
        "them by reason",
    )
    on_bad_name: Literal["refuse", "skip", "strip"] = Field(
        default="refuse",
        description="names of events that are empty, reserved, too long, or have a line break, a control character or "
        "blanks around them: `refuse`: the line is bad; `skip` leaves the event out; `strip` removes the blanks around "
        "the name and writes a blank for a line break",
    )
    longest_line_bytes: int = Field(default=1 << 24, ge=1, description="largest number of bytes of a line")
    duplicates: Literal["keep", "drop"] = Field(
        default="keep",
        description="events with the session, time, order and item of another: `drop` leaves out all but the first",
    )

    @model_validator(mode="after")
    def _readable(self) -> EventFormat:
        if self.layout == "leave_one_out":
            for key in EventFormat.model_fields.keys() - {"layout", "separator", "on_bad_line"}:
                if getattr(self, key) != EventFormat.model_fields[key].default:
                    raise ValueError(f"layout = 'leave_one_out' does not read {key}")
        if self.separator is not None and ('"' in self.separator or "\n" in self.separator):
            raise ValueError("separator must have neither a quotation mark nor a line break")
        if self.fields is not None and len(set(self.fields)) < len(self.fields):
            raise ValueError("fields has the same name twice")
        return self

    @classmethod
    def read(cls, path: Path) -> EventFormat:
        """Reads the format from the table `[data]` of an experiment file. Ignores the other keys of the table. Raises
        EventFileError."""
        try:
            record = tomllib.loads(path.read_text(encoding="utf-8")).get("data", {})
            return cls.model_validate({key: value for key, value in record.items() if key in cls.model_fields})
        except OSError as error:
            raise EventFileError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            faults = (f"data.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise EventFileError(f"{path}: {'; '.join(faults)}") from error
        except (ValueError, AttributeError) as error:
            raise EventFileError(f"{path}: not an experiment file: {error}") from error
