"""Structured logs: one JSON object a line on standard error, for our messages and for uvicorn's alike."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

import orjson

ACCESS = logging.getLogger("wane.access")
SERVICE = logging.getLogger("wane")


class JsonFormatter(logging.Formatter):
    """A record as one line: time, level, logger, message, then the fields given as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:  # half of a surrogate pair, which is no UTF-8
            return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Sends every log record of the process through one JSON handler. `level` is a name such as "info"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel("WARNING")  # what it has to say of starts and stops, the server says itself
    # No line tells a thread, a process or a task: a record need not look for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def log_access(message: str, fields: dict[str, object]) -> None:
    """The line of what is over: `ACCESS.info`, without a search for where in the code it was called."""
    if ACCESS.isEnabledFor(logging.INFO):
        extra = {"fields": fields}
        ACCESS.handle(ACCESS.makeRecord(ACCESS.name, logging.INFO, __file__, 0, message, (), None, extra=extra))
