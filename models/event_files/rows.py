"""Collects the events of a log as arrays of small integers: about 20 bytes an event, so that ten million events fit in
well under a gigabyte."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wane.models.event_files.faults import BadLine, Faults, shown
from wane.models.event_files.format import Column, EventFormat
from wane.models.event_files.times import Cell, Clock, number_or_nan
from wane.models.vocabulary import EOS, UNK

LARGEST_NAME = 1 << 20
"""The largest number of characters of an event's name."""

LINE_BREAK = re.compile(r"\r\n|\r|\n")
CONTROL = re.compile(r"[\x00\x07\x08\x1b\x7f\x9b]")  # a terminal obeys them; other ones stand in published logs
NAMES = frozenset({str, int})
"""The types of an event's name. True and false are of another type, although they equal 1 and 0."""

NOT_NAMES = "not a list of event names (texts or integers)"
TIMES_OF_SOME = "the events of some lines have times, and those of others have none"


class BadName(BadLine):
    """A name that an event cannot have."""


class Rows:
    """The events of a log in the order of its files.

    `names`: the event names, in the order of their first events. `sessions`: the index of each session that has an id.
    `timed`: whether the events have times, or None before the first event. `faults`: the bad lines of the file that is
    being read. `left_out`: the events of this file that are left out because of their names. `stripped`: the number of
    different names from which blanks or line breaks were removed.
    """

    def __init__(self, form: EventFormat) -> None:
        self.names: list[str] = []
        self.sessions: dict[str, int] = {}
        self.session_count = 0
        self.clock = Clock(form.time_unit)
        self.timed: bool | None = None
        self.faults, self.left_out = Faults(), Faults()
        self.stripped = 0
        self._columns, self._on_bad_name = form.columns, form.on_bad_name
        self._ids: dict[str | int, int] = {}  # by name, and by the forms of a name that the files have
        self._owners, self._events = array("i"), array("i")
        self._times, self._orders = array("d"), array("d")

    def __len__(self) -> int:
        """Returns the number of events."""
        return len(self._events)

    @property
    def owners(self) -> NDArray[np.int32]:
        """The index of each event's session: int32 (events,)."""
        return np.frombuffer(self._owners, np.int32) if self._owners else np.zeros(0, np.int32)

    @property
    def events(self) -> NDArray[np.int32]:
        """The index in `names` of each event: int32 (events,)."""
        return np.frombuffer(self._events, np.int32) if self._events else np.zeros(0, np.int32)

    @property
    def times(self) -> NDArray[np.float64]:
        """The time of each event in seconds since 1970: float64 (events,)."""
        return np.frombuffer(self._times, np.float64) if self._times else np.zeros(0)

    @property
    def orders(self) -> NDArray[np.float64] | None:
        """The number that orders events of the same time: float64 (events,), or None if there is no such column."""
        if self._columns.order is None:
            return None
        return np.frombuffer(self._orders, np.float64) if self._orders else np.zeros(0)

    def extend(
        self,
        lines: Sequence[int],
        sessions: Sequence[str],
        times: Sequence[Cell],
        items: Sequence[str],
        orders: Sequence[Cell] | None,
        clock: Clock | None = None,
    ) -> None:
        """Adds the events of a table's rows. `lines`: the numbers of the rows' lines. `clock` converts the times;
        absent: the clock of the log. Records the faults of rows that cannot be read."""
        if self.timed is False:
            for line in lines:
                self.faults.add(line, BadLine(TIMES_OF_SOME))
            return
        clock = clock or self.clock
        seconds = clock.seconds(times)
        places = np.zeros(len(lines)) if orders is None else _numbers(orders)
        sessions = [*map(str.strip, sessions)]
        self.timed = True
        if not (np.isnan(seconds).any() or np.isnan(places).any() or "" in sessions) and self._learn(items):
            owners = [*map(self.sessions.get, sessions)]
            if None in owners:
                owners = [self.owner(session) for session in sessions]
            self._owners.extend(owners)  # type: ignore[arg-type]
            self._events.extend([*map(self._ids.__getitem__, items)])
            self._times.frombytes(seconds.tobytes())
            if orders is not None:
                self._orders.frombytes(places.tobytes())
            return
        for at, (line, session, second, place) in enumerate(
            zip(lines, sessions, seconds.tolist(), places.tolist(), strict=True)
        ):
            try:
                if not session:
                    raise BadLine(f"the value of {_named(self._columns.session)} is empty")
                if not items[at].strip():
                    raise BadLine(f"the value of {_named(self._columns.item)} is empty")
                if math.isnan(second):
                    raise clock.fault(times[at])
                if math.isnan(place):
                    assert orders is not None, "an absent order is not a number: this is a bug"
                    raise self._not_a_number(orders[at])
                event = self._event(line, items[at])
            except BadLine as fault:
                self.faults.add(line, fault)
            else:
                if event is not None:
                    self._add(self.owner(session), event, second, place)

    def add_session(
        self,
        line: int,
        session: str | None,
        names: Sequence[object],
        times: Sequence[Cell] | None,
        orders: Sequence[Cell] | None,
    ) -> None:
        """Adds the events of a session; `session` is None if it has no id. `times` is None if the events have none.
        Raises BadLine."""
        if self.timed not in (None, times is not None):
            raise BadLine(TIMES_OF_SOME)
        if not NAMES.issuperset(map(type, names)):
            raise BadLine(NOT_NAMES)
        try:
            events = [*map(self._ids.__getitem__, names)]  # type: ignore[arg-type]
            kept = None
        except KeyError:  # a new name
            found = [self._event(line, name) for name in names]
            events = [event for event in found if event is not None]
            kept = [at for at, event in enumerate(found) if event is not None]
        if times is not None:
            seconds = self.clock.seconds(times)
            if np.isnan(seconds).any():
                raise self.clock.fault(times[int(np.isnan(seconds).argmax())])
            places = np.zeros(0) if orders is None else _numbers(orders)
            if np.isnan(places).any():
                assert orders is not None, "an absent order is not a number: this is a bug"
                raise self._not_a_number(orders[int(np.isnan(places).argmax())])
            self._times.frombytes((seconds if kept is None else seconds[kept]).tobytes())
            if orders is not None:
                self._orders.frombytes((places if kept is None else places[kept]).tobytes())
        self.timed = times is not None
        self._owners.extend([self.owner(session)] * len(events))
        self._events.extend(events)

    def owner(self, session: str | None) -> int:
        """Returns the index of a session. None stands for a new session without an id."""
        found = None if session is None else self.sessions.get(session)
        if found is None:
            found = self.session_count
            self.session_count += 1
            if session is not None:
                self.sessions[session] = found
        return found

    def _event(self, line: int, name: object) -> int | None:
        """Returns the index of an event name, or None if the name is bad and the event is left out. Raises BadLine."""
        if type(name) not in NAMES:
            raise BadLine(NOT_NAMES)
        assert isinstance(name, str | int), "a name is neither text nor an integer: this is a bug"
        if (found := self._ids.get(name)) is not None:
            return found
        read = text = str(name)
        if self._on_bad_name == "strip":
            read = LINE_BREAK.sub(" ", text.strip())
        try:
            found = self._ids[name] = self._new(read)
            self.stripped += read != text
            return found
        except BadName as fault:
            if self._on_bad_name != "skip":
                raise
            self.left_out.add(line, fault)
            return None

    def _learn(self, names: Sequence[str]) -> bool:
        """Gives each name an index. Returns whether all names can name events."""
        known = self._ids
        try:
            if not all(map(known.__contains__, names)):
                for name in names:
                    if name not in known:
                        self._new(name)
        except BadName:
            return False
        return True

    def _new(self, name: str) -> int:
        if (found := self._ids.get(name)) is not None:
            return found
        _check_name(name)
        found = self._ids[name] = len(self.names)
        self.names.append(name)
        return found

    def _add(self, owner: int, event: int, second: float, place: float) -> None:
        self._owners.append(owner)
        self._events.append(event)
        if self.timed:
            self._times.append(second)
        if self._columns.order is not None:
            self._orders.append(place)

    def _not_a_number(self, cell: Cell) -> BadLine:
        return BadLine(f"the value of {_named(self._columns.order)}, {{}}, is not a number", cell)


def _check_name(name: str) -> None:
    """Raises BadName if an event cannot have this name."""
    if not name.strip():
        raise BadName("not a list of event names: a name is empty")
    if name in (EOS, UNK):
        raise BadName(f"{name} is reserved by the vocabulary and cannot name an event")
    if LINE_BREAK.search(name) or name != name.strip():
        raise BadName("the event name {} has a line break, or blanks around it (data.on_bad_name = 'strip')", name)
    if CONTROL.search(name):
        raise BadName("the event name {} has a control character", name)
    if len(name) > LARGEST_NAME:
        raise BadName(f"the event name {{}} is longer than {LARGEST_NAME >> 20} MiB", name)
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise BadName("the event name {} is not Unicode text", name)


def _numbers(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """Returns the numbers of a column: float64 (n,), NaN for a cell that is not a number."""
    try:
        return np.fromiter(map(float, cells), np.float64, len(cells))
    except (ValueError, TypeError, OverflowError):
        return np.array([number_or_nan(cell) for cell in cells])


def _named(column: Column | None) -> str:
    """Returns a column for a message, such as "'item'" or "column 3"."""
    return f"column {column}" if isinstance(column, int) else shown(column)
