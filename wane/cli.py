"""The command `wane`. A subcommand's module is imported only when that subcommand runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

FAILED = 2
INTERRUPTED = 130  # the shells' convention: 128 plus the number of SIGINT


class Command(NamedTuple):
    """A subcommand: its line in `wane --help`, the module whose `main` runs it, and the extra that it needs, if any."""

    help: str
    module: str
    extra: str | None = None


COMMANDS = {
    "serve": Command("serve models over HTTP", "wane.service.cli.serve"),
    "compare": Command("compare a running server's two modes: latency and agreement", "wane.service.cli.compare"),
    "report": Command("show the statistics of one server, or of several replicas", "wane.service.cli.report"),
    "key": Command("create an API key", "wane.service.cli.key"),
    "train": Command("train a model, or resume a run", "wane.training.cli", "train"),
    "evaluate": Command("measure a run's perplexity, recurrent and as windows", "wane.training.cli", "train"),
    "export": Command("write a run or a bundle as a bundle that `wane serve` loads", "wane.training.cli", "train"),
    "cache": Command("fit a cache language model to a bundle", "wane.training.cli", "train"),
    "audit": Command("audit a checkpoint, and write it as a bundle", "wane.training.cli", "train"),
}

NEEDED = {"train": ("torch", "onnx", "matplotlib")}
"""The modules that each extra installs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns the exit status: 0, 1 if a training lost another of its processes, 2 with a message if the input was at
    fault, 130 if the command was interrupted.
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
        print(f"wane {metadata.version('wane')}")  # noqa: T201
        return 0
    if name not in COMMANDS:
        nearest = get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
        hint = f"did you mean `wane {nearest[0]}`?" if nearest else "`wane --help` lists the commands"
        return _fail(f"there is no command {name!r}; {hint}")
    command = COMMANDS[name]
    missing = [module for module in NEEDED.get(command.extra or "", ()) if find_spec(module) is None]
    if missing:
        return _fail(f"{name} needs {missing[0]}: pip install 'wane[{command.extra}]'", prefix="wane ")
    module = import_module(command.module)
    try:
        status: int = module.main(given)
    except module.FAILURES as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
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


def _fail(message: str, prefix: str = "error: ") -> int:
    print(f"{prefix}{message}", file=sys.stderr)  # noqa: T201
    return FAILED
