"""Runs the commands of a Markdown file, and compares their output with the document.

A fenced block whose first word is `console` is run line by line in the root folder of the checkout:

    ```console
    $ curl -s localhost:8000/readyz
    {"ready":true,...}
    ```

The lines after a `$ ` line are the command's output on stdout and stderr together. Within a line, `...` matches any
text. Alone in a line, it matches any number of lines. Decimal numbers may differ by a thousandth of their value.
Milliseconds (`..._ms` in JSON, `... ms` in text) need not agree. A line that ends in a backslash continues in the next
line.

A `console background` block starts a server on a terminal. The server must print the block's output, and then runs
until the end of the file. A `console NAME` block needs another server, with the model NAME. `parse` returns its
commands only for this name. Blocks with any other first word are ignored. Other tests run the `bash` blocks, which
`scripts` returns.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

TIMEOUT_S = 300
TOLERANCE = 1e-3

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
MILLISECONDS = r'(?:(?<=_ms":)|(?<=_ms": ))\d+(?:\.\d+)?(?:e[-+]?\d+)?|\d+(?:\.\d+)?(?= ms\b)'
DECIMAL = r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+e[-+]?\d+"
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
SPECIAL = re.compile(
    rf"(?P<lines>^\.\.\.\n)|(?P<dots>\.\.\.)|(?P<milliseconds>{MILLISECONDS})|(?P<decimal>{DECIMAL})", re.MULTILINE
)


class TranscriptError(AssertionError):
    """A command's output differs from the document, or a `console` block does not begin with a command."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a document: its line number in the document, its text, and its output according to the document."""

    line: int
    text: str
    expected: str
    background: bool = False


def parse(markdown: str, name: str | None = None) -> list[Command]:
    """Returns the commands of a document's `console` blocks, in order. If `name` is not None, returns those of the
    `console NAME` blocks."""
    commands: list[Command] = []
    for block in FENCE.finditer(markdown):
        words = block["info"].split()
        if not words or words[0] != "console":
            continue
        if next((word for word in words[1:] if word != "background"), None) != name:
            continue
        first = markdown.count("\n", 0, block.start("body")) + 1
        commands += _commands(block["body"], first, background="background" in words)
    return commands


def scripts(markdown: str) -> list[list[str]]:
    """Returns a list of commands for each `bash` block of a document. A command may have several lines."""
    return [
        block["body"].replace("\\\n", " ").splitlines()
        for block in FENCE.finditer(markdown)
        if block["info"].split()[:1] == ["bash"]
    ]


def _commands(body: str, first: int, *, background: bool) -> Iterator[Command]:
    lines = body.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    if not starts or starts[0] != 0:
        raise TranscriptError(f"line {first}: a console block must start with a line `$ command`")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        after = start + 1
        while lines[after - 1].endswith("\\\n"):
            after += 1
        text = "".join(lines[start:after]).removeprefix("$ ").rstrip("\n")
        yield Command(first + start, text, "".join(lines[after:end]), background)


def compare(command: Command, printed: str) -> None:
    """Raises TranscriptError unless `printed` matches the document."""
    found = re.fullmatch(_pattern(command.expected), _tidy(printed))
    if found is None:
        raise TranscriptError(
            f"line {command.line}: $ {command.text}\n--- the document says\n{command.expected}"
            f"--- the command printed\n{printed}"
        )
    _compare_decimals(command, found)


def _compare_decimals(command: Command, found: re.Match[str]) -> None:
    written = [one["decimal"] for one in SPECIAL.finditer(_tidy(command.expected)) if one["decimal"]]
    for says, is_now in zip(written, found.groups(), strict=True):
        if not math.isclose(float(says), float(is_now), rel_tol=TOLERANCE):
            raise TranscriptError(
                f"line {command.line}: $ {command.text}\nthe document says {says}, the command printed {is_now}"
            )


def _tidy(text: str) -> str:
    """Returns the text without spaces at the ends of its lines, and with a line break after its last line."""
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def _pattern(expected: str) -> str:
    """Returns a regular expression for the expected output, with a group for each decimal number."""
    text = _tidy(expected)
    parts: list[str] = []
    end = 0
    for special in SPECIAL.finditer(text):
        parts.append(re.escape(text[end : special.start()]))
        end = special.end()
        if special["lines"]:
            parts.append(r"(?:[^\n]*\n)*?")
        elif special["dots"]:
            parts.append(r"[^\n]*?")
        elif special["milliseconds"]:
            parts.append(NUMBER)
        else:
            parts.append(f"({NUMBER})")
    return "".join([*parts, re.escape(text[end:])])


def run(
    commands: Sequence[Command],
    directory: Path,
    environment: Mapping[str, str],
    spell: Callable[[str], str] = lambda text: text,
) -> None:
    """Runs the commands in order, and compares their output. Raises TranscriptError at the first difference.

    `spell` is applied to the commands and to the expected output; it replaces addresses.
    """
    with ExitStack() as running:
        for written in commands:
            command = Command(written.line, spell(written.text), spell(written.expected), written.background)
            if command.background:
                running.enter_context(_background(command, directory, environment))
            else:
                compare(command, bash(command.text, directory, environment).stdout)


def bash(command: str, directory: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. Its output has its errors, too."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def _background(command: Command, directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Starts a command on a terminal, waits until it has printed the expected output, and stops it at the end of the
    `with` block."""
    terminal, output = os.openpty()
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command.text}"],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    os.close(output)
    lines: Queue[str | None] = Queue()

    def read() -> None:
        # A read from a terminal fails after every writer has closed it.
        with os.fdopen(terminal, encoding="utf-8") as screen, suppress(OSError):
            for line in screen:
                lines.put(line)
        lines.put(None)

    reader = Thread(target=read)
    reader.start()
    try:
        _await(command, lines)
        yield
        process.terminate()
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        reader.join()


def _await(command: Command, lines: Queue[str | None]) -> None:
    pattern = re.compile(_pattern(command.expected) if command.expected else "")
    printed = ""
    while (found := pattern.match(_tidy(printed))) is None:
        try:
            line = lines.get(timeout=TIMEOUT_S)
        except Empty:
            raise TranscriptError(
                f"line {command.line}: $ {command.text}\nprinted nothing more for {TIMEOUT_S} s after\n{printed}"
            ) from None
        if line is None:
            compare(command, printed)
            return
        printed += line
    _compare_decimals(command, found)
