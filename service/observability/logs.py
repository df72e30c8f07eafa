"""Structured logs: one JSON object a line on standard error, for our messages and for uvicorn's alike."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

import orjson

ACCESS = logging.getLogger("wane.access")
SERVICE = logging.getLogger("wane")

WAIT_S = 0.05  # of a line for others to be written with


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


class TogetherHandler(logging.Handler):
    """Writes the lines of a moment with one system call, on a thread of its own: the caller does not wait.

    A line is written `WAIT_S` late at most; one that warns, and those before it, at once.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._some = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._write_on, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        try:
            self._lines.append(self.format(record))
        except Exception:  # of a record that cannot be written: the library's own way to say so
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING:
            self.flush()
        elif len(self._lines) == 1:
            self._some.set()

    def flush(self) -> None:
        """Writes what there is."""
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
        finally:
            self.release()

    def close(self) -> None:
        """Writes what there is, and ends the thread."""
        self.flush()
        self._ended.set()
        self._some.set()
        super().close()

    def _write_on(self) -> None:
        while not self._ended.is_set():
            self._some.wait()
            self._ended.wait(WAIT_S)
            self._some.clear()
            self.flush()


def configure(level: str) -> None:
    """Sends every log record of the process through one JSON handler. `level` is a name such as "info"."""
    handler = TogetherHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel("WARNING")  # what it has to say of starts and stops, the server says itself
    # No line tells a thread, a process or a task: a record need not look for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def flush() -> None:
    """Writes every line that was said."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def logs_access() -> bool:
    """Whether anybody wants to know of what is over."""
    return ACCESS.isEnabledFor(logging.INFO)


def log_access(message: str, fields: dict[str, object]) -> None:
    """The line of what is over: `ACCESS.info`, without a search for where in the code it was called."""
    if logs_access():
        extra = {"fields": fields}
        ACCESS.handle(ACCESS.makeRecord(ACCESS.name, logging.INFO, __file__, 0, message, (), None, extra=extra))
