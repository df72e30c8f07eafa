"""Reads Parquet files with one event in each row. It needs the extra `parquet` (pyarrow)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wane.models.event_files.faults import EventFileError, shown
from wane.models.event_files.format import EventFormat
from wane.models.event_files.rows import Rows
from wane.models.event_files.times import Clock

ROWS_AT_ONCE = 1 << 16


def read_parquet(path: Path, form: EventFormat, rows: Rows) -> int:
    """Reads a Parquet file. Returns the number of its rows. Raises EventFileError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EventFileError(f"{path}: Parquet files need pyarrow: pip install 'pyarrow'") from error
    count = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = _names(path, file.schema_arrow, form)
            clock = _clock(file.schema_arrow.field(names[1]).type)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                session, time, item, *order = (_cells(batch.column(name)) for name in names)
                lines = range(count + 1, count + 1 + len(batch))
                # A float column has NaN where a writer had no value.
                texts = [
                    ["" if cell is None or cell != cell else str(cell) for cell in cells] for cells in (session, item)
                ]
                rows.extend(lines, texts[0], time, texts[1], order[0] if order else None, clock)
                count += len(batch)
    except OSError as error:
        raise EventFileError(f"{path}: {error.strerror or error}") from error
    except pyarrow.ArrowException as error:
        raise EventFileError(f"{path}: not a Parquet file that can be read: {error}") from error
    if not count:
        raise EventFileError(f"{path}: the file is empty")
    return count


def _names(path: Path, schema: Any, form: EventFormat) -> list[str]:
    """Returns the names of the columns session, time, item and, if there is one, order. Raises EventFileError."""
    from pyarrow import types

    found = []
    for key in ("session", "time", "item", "order"):
        column = getattr(form.columns, key)
        if column is None:
            continue
        if isinstance(column, int) and column <= len(schema.names):
            column = schema.names[column - 1]
        if column not in schema.names:
            raise EventFileError(
                f"{path}: no column {shown(column)} ({', '.join(schema.names)}): set data.columns.{key}"
            )
        if schema.field(column).type.num_fields:
            raise EventFileError(f"{path}: the column {shown(column)} has lists or records: each row must be one event")
        if types.is_boolean(schema.field(column).type):
            raise EventFileError(f"{path}: the column {shown(column)} has true and false, which are not names or times")
        found.append(column)
    return found


def _clock(kind: Any) -> Clock | None:
    """Returns the clock of a column of dates or times, which `_cells` converts to seconds, or None."""
    from pyarrow import types

    return Clock("s") if types.is_timestamp(kind) or types.is_date(kind) else None


def _cells(column: Any) -> list[Any]:
    """Returns a column's values. Dates and times are seconds since 1970. Bytes are read as UTF-8, as some writers store
    text. Raises pyarrow.ArrowException."""
    import pyarrow
    from pyarrow import types

    if types.is_binary(column.type) or types.is_large_binary(column.type):
        column = column.cast(pyarrow.large_string())
    if types.is_date(column.type):
        column = column.cast(pyarrow.timestamp("ms"))
    if not types.is_timestamp(column.type):
        return list(column.to_pylist())
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    ticks = column.cast(pyarrow.int64()).to_pylist()
    return [None if tick is None else tick / per_second for tick in ticks]
