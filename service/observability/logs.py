"""Structured logs on standard error, with one JSON object per line. The logs include uvicorn's messages."""

from __future__ import annotations

import fcntl
import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import orjson

ACCESS = logging.getLogger("wane.access")
SERVICE = logging.getLogger("wane")

WAIT_S = 0.05  # the longest time in seconds that a log line waits for further lines before it is written

COMMANDS = re.compile(rb"\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")
"""In UTF-8, the characters that JSON allows in a string, but that are commands to a terminal (U+0080 to U+009F) or the
end of a line to some readers (U+0085, U+2028 and U+2029)."""


def without_commands(encoded: bytes) -> bytes:
    """Escapes the characters in JSON that a terminal or a reader of lines would take as commands."""
    if b"\xc2" not in encoded and b"\xe2\x80" not in encoded:
        return encoded  # these tests are much faster than the expression
    return COMMANDS.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), encoded)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: time, level, logger, message, the number of the worker if the server has several,
    then the fields in `extra={"fields": {...}}`."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._worker,
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        try:
            return without_commands(orjson.dumps(line, default=str)).decode()
        except TypeError:  # orjson rejects strings with a lone surrogate
            return json.dumps(line, default=str)


class TogetherHandler(logging.Handler):
    """Collects log lines for WAIT_S seconds, and writes them with one system call on a separate thread. Writes a
    warning or error immediately, after the collected lines. Locks `turns`, a file that the processes of a server share,
    while it writes, because the lines of several processes could otherwise be mixed."""

    def __init__(self, stream: TextIO, turns: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._turns = turns
        self._lines: list[str] = []
        self._some = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._write_on, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line. The caller must hold the handler's lock."""
        try:
            self._lines.append(self.format(record))
        except Exception:  # the logging library's own handlers report this error in the same way
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING:
            self.flush()
        elif len(self._lines) == 1:
            self._some.set()

    def flush(self) -> None:
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if not lines:
                return
            if self._turns is not None:
                fcntl.flock(self._turns, fcntl.LOCK_EX)
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        finally:
            if self._turns is not None:
                fcntl.flock(self._turns, fcntl.LOCK_UN)
            self.release()

    def close(self) -> None:
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


def configure(level: str, worker: int | None = None, turns: Path | None = None) -> None:
    """Sends every log record of the process through one JSON handler. `level` is a name such as "info". `worker` is
    the number of the process if the server has several, which write in `turns` (see `TogetherHandler`)."""
    handler = TogetherHandler(sys.stderr, None if turns is None else turns.open("a"))
    handler.setFormatter(JsonFormatter(worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel("WARNING")  # Wane logs the start and stop of the server itself
    # The log lines name no thread and no process, so a log record need not look up these names.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def flush() -> None:
    """Writes all collected lines."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_access(message: str, fields: dict[str, object]) -> None:
    """Logs a message like `ACCESS.info`. This function is faster, because it does not look up the caller's source
    line."""
    if ACCESS.isEnabledFor(logging.INFO):
        extra = {"fields": fields}
        ACCESS.handle(ACCESS.makeRecord(ACCESS.name, logging.INFO, __file__, 0, message, (), None, extra=extra))
