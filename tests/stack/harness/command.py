"""A command that runs until the test stops it. The test reads its output line by line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from queue import Empty, Queue
from threading import Thread

from deploy.stack.local import ROOT

WAIT_S = 300


class Command:
    """A running program. It runs in the folder of the checkout and in its own process session."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Starts the program with its arguments. `environment` has the program's environment variables, by default
        those of this process."""
        self.process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._printed: Queue[str] = Queue()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._printed.put(line)
        self._printed.put("")

    def until(self, wanted: Callable[[str], object]) -> list[str]:
        """Returns the next lines, up to the first line for which `wanted` is true."""
        lines: list[str] = []
        while not lines or not wanted(lines[-1]):
            try:
                line = self._printed.get(timeout=WAIT_S)
            except Empty:
                raise AssertionError(f"the command printed nothing for {WAIT_S} s after its output {lines}") from None
            assert line, f"the command exited before it printed the expected output; its output is {lines}"
            lines.append(line)
        return lines

    def until_said(self, text: str) -> list[str]:
        """Returns the next lines, up to the first line that contains the text."""
        return self.until(lambda line: text in line)

    def end(self) -> None:
        """Kills the program if it is still running."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
