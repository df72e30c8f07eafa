"""The parser of the commands' arguments. Invalid arguments are reported in one line, like every other invalid input."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

FAILED = 2
"""The exit status of a command whose input is invalid."""


BUNDLE_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The pattern of a bundle's name."""


def printable(text: str) -> str:
    """Returns a text for a terminal. Replaces characters that a terminal obeys or cannot show by their escapes, such as
    `\\x1b`, but not line feeds."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


class Parser(argparse.ArgumentParser):
    """Reports an invalid argument in one line: `error: `, what is wrong, and what to do."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with the status 2."""
        words = message.removeprefix("unrecognized arguments: ").split()
        advice = f"`{self.prog} --help` lists the arguments"
        if message.startswith("unrecognized arguments: -"):
            options = [option for action in self._actions for option in action.option_strings]
            nearest = get_close_matches(words[0].partition("=")[0], options, n=1)
            message = f"there is no option {words[0]}"
            advice = f"did you mean {nearest[0]}?" if nearest else advice
        self.exit(FAILED, printable(f"error: {message}; {advice}\n"))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Like `ArgumentParser.parse_args`, but a subcommand's parser reports the arguments that it lacks."""
        found, unknown = self.parse_known_args(sys.argv[1:] if args is None else args, namespace)
        if unknown:
            self._of(found).error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def _of(self, found: argparse.Namespace) -> Parser:
        """Returns the parser of the subcommand in `found`, or this parser if it has no subcommands."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices[getattr(found, action.dest)]
                assert isinstance(chosen, Parser), "a subcommand has a parser of another class: this is a bug"
                return chosen
        return self


def bundle_name(text: str) -> str:
    """Returns an argument that names a bundle. Raises ArgumentTypeError if it is not such a name."""
    if not re.fullmatch(BUNDLE_NAME, text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name: use up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )
    return text


def bundle_version(text: str) -> str:
    """Returns an argument that is a bundle's version. Raises ArgumentTypeError if it is none."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version: use up to nine digits")
    return text
