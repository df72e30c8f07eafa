"""The lines of a text file, plain or compressed by gzip. Lines end at line feeds only, with or without a carriage
return. A file is read as a stream, in blocks of whole lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from wane.models.event_files.faults import EventFileError

BLOCK = 1 << 13
"""The number of bytes that are read at once. The cells of a larger block leave the processor's cache."""

GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class Lines:
    """The lines of one file. `count`: the number of lines that were read so far."""

    def __init__(self, path: Path, longest_bytes: int) -> None:
        """`longest_bytes` is the largest number of bytes of a line."""
        self.path = path
        self._longest_bytes = longest_bytes
        self.count = 0

    def blocks(self) -> Iterator[tuple[int, str]]:
        """Yields blocks of whole lines: the number of the block's first line, from 1, and the lines, joined by line
        feeds. A byte that is not UTF-8 is half of a surrogate pair (the error handler `surrogateescape`). Raises
        EventFileError if the file cannot be read, is not text, is empty, or has a line that is too long."""
        try:
            blank = True
            with _opened(self.path) as file:
                for data in self._whole_lines(file):
                    text = data.decode("utf-8", "surrogateescape")
                    if self.count == 0:
                        text = text.removeprefix("\ufeff")
                    if "\r" in text:
                        text = text.replace("\r\n", "\n").removesuffix("\r")
                    first = self.count + 1
                    self.count += text.count("\n") + 1
                    blank = blank and not text.strip()
                    yield first, text
        except OSError as error:
            raise EventFileError(f"{self.path}: {error.strerror or error}") from error
        except (EOFError, zlib.error) as error:
            raise EventFileError(f"{self.path}: damaged after line {self.count:,}: {error}") from error
        if blank:
            raise EventFileError(f"{self.path}: the file is empty")

    def _whole_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yields the file's bytes in pieces that end before a line feed or at the end of the file."""
        parts: list[bytes] = []
        length = 0
        while data := file.read(BLOCK):
            if not self.count and not parts:
                self._check_text(data)
            cut = data.rfind(b"\n")
            if cut >= 0:
                yield b"".join([*parts, data[:cut]])
                parts, length = [], 0
            parts.append(data[cut + 1 :])
            length += len(parts[-1])
            if length > self._longest_bytes:
                raise EventFileError(
                    f"{self.path}: line {self.count + 1:,} is longer than {self._longest_bytes:,} bytes, which is "
                    "data.longest_line_bytes (lines end at line feeds)"
                )
        if length:
            yield b"".join(parts)

    def _check_text(self, data: bytes) -> None:
        """Raises EventFileError if the first bytes of the file are not those of a text in UTF-8."""
        if data.startswith(UTF_16):
            raise EventFileError(f"{self.path}: the file is UTF-16: convert it to UTF-8")
        if data.startswith(ZIP):
            raise EventFileError(f"{self.path}: the file is a ZIP archive or a spreadsheet: extract or save it as CSV")
        if b"\0" in data:
            raise EventFileError(f"{self.path}: the file has zero bytes: is it UTF-16, or not a text file?")
        if b"\r" in data and b"\n" not in data and len(data.split(b"\r")) > 2:
            raise EventFileError(f"{self.path}: the lines end in carriage returns: convert them to line feeds")


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        compressed = file.read(2) == GZIP
    return cast(IO[bytes], gzip.open(path)) if compressed else path.open("rb")
