"""The command `wane`. A subcommand's module is imported only when that subcommand runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from wane.arguments import FAILED, printable


class Command(NamedTuple):
    """A subcommand: its line in `wane --help`, the module whose `main` runs it, and the extra that it requires, if
    any."""

    help: str
    module: str
    extra: str | None = None


COMMANDS = {
    "serve": Command("serve models over HTTP", "wane.service.cli.serve"),
    "compare": Command("compare a running server's two modes: latency and agreement", "wane.service.cli.compare"),
    "report": Command("show the statistics of one server, or of several replicas", "wane.service.cli.report"),
    "rollback": Command("serve a model's earlier version again", "wane.service.cli.rollback"),
    "key": Command("create an API key", "wane.service.cli.key"),
    "train": Command("train a model, or resume a run", "wane.training.cli", "train"),
    "evaluate": Command(
        "measure the perplexity of a training run, recurrent and in windows", "wane.training.cli", "train"
    ),
    "export": Command("convert a run to a bundle, or a bundle to its next version", "wane.training.cli", "train"),
    "cache": Command("fit a cache language model to a bundle", "wane.training.cli", "train"),
    "import": Command("convert an ONNX graph of one step to a bundle", "wane.training.imported.command", "onnx"),
    "audit": Command("audit a checkpoint, and convert it to a bundle", "wane.training.cli", "train"),
}

NEEDED = {"train": ("torch", "onnx", "matplotlib"), "onnx": ("onnx",)}
"""The Python modules that each extra installs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status. The status is 0 for success, 1 if another process of a distributed
    training run ended, 2 with a message if the input was invalid, and 130 if training was interrupted. Another command
    that is interrupted raises KeyboardInterrupt, which `wane/__main__.py` handles.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(usage(), file=sys.stderr)  # noqa: T201
        return FAILED
    name = given[0]
    if name in ("-h", "--help"):
        print(usage())  # noqa: T201
        return 0
    if name == "--version":
        from importlib import metadata

        print(f"wane {metadata.version('wane')}")  # noqa: T201
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        nearest = get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
        hint = f"did you mean `wane {nearest[0]}`?" if nearest else "`wane --help` lists the commands"
        return _fail(f"there is no command {name!r}; {hint}")
    command = COMMANDS[name]
    missing = [module for module in NEEDED.get(command.extra or "", ()) if find_spec(module) is None]
    if missing:
        return _fail(f"wane {name} needs {missing[0]}: in the checkout of Wane, run pip install '.[{command.extra}]'")
    module = import_module(command.module)
    try:
        status: int = module.main(given)
    except module.FAILURES as error:
        return _fail(str(error))
    return status


def usage() -> str:
    """Returns the text that `wane --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: wane COMMAND [ARGUMENTS]",
            "",
            "Serves recurrent next-token models whose memory provably fades.",
            "",
            *lines,
            "",
            "`wane COMMAND --help` lists a command's arguments, `wane --version` prints the version.",
        ]
    )


def _fail(message: str) -> int:
    print(printable(f"error: {message}"), file=sys.stderr)  # noqa: T201
    return FAILED
