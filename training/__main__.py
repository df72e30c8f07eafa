"""`python -m training train | evaluate | export`: the offline half of Wane."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from training.config import Experiment
from training.errors import TrainingError
from training.evaluate import POSITIONS
from training.run import evaluate_run, export_run, train
from training.run_folder import RunFolder


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train | evaluate | export")

    command = commands.add_parser("train", help="train an experiment, or go on with a run that was stopped")
    command.add_argument("experiment", type=Path, help="experiment file (TOML)")
    command.add_argument("--data", type=Path, help="file or folder with the data; overrides data.path")
    command.add_argument("--run", type=Path, help="run folder (default: runs/NAME)")
    command.add_argument("--tokenizer", type=Path, help="use this tokenizer.json and make none")

    command = commands.add_parser("evaluate", help="perplexity as recurrent and as window, in a table and a plot")
    command.add_argument("run", type=Path, help="run folder")
    command.add_argument("--data", type=Path, help="overrides data.path")
    command.add_argument(
        "--positions", type=_positive, default=POSITIONS, help="window positions a split (default: %(default)s)"
    )

    command = commands.add_parser("export", help="write a bundle that the service can load")
    command.add_argument("run", type=Path, help="run folder; evaluated first where that has not been done")
    command.add_argument("--bundles", type=Path, required=True, help="folder of bundles; the bundle is BUNDLES/NAME")
    command.add_argument("--data", type=Path, help="overrides data.path")
    command.add_argument(
        "--version", type=_version, default="1", help="version number in the manifest (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0, 2 where the input was at fault, 130 where it was interrupted."""
    options = build_parser().parse_args(arguments)
    console = Console()
    try:
        if options.command == "train":
            experiment = Experiment.read(options.experiment)
            train(experiment, options.data, options.run, options.tokenizer, _as_typed(options), console)
        elif options.command == "evaluate":
            evaluate_run(options.run, options.data, options.positions, console)
        else:
            export_run(options.run, options.bundles, options.data, options.version, console)
    except (TrainingError, FloatingPointError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(
            "stopped" + ("; the same command goes on from the last checkpoint" if _can_go_on(options) else "")
        )
        return 130
    return 0


def _as_typed(options: argparse.Namespace) -> str:
    """The command, with the names of files and folders and not where they lay on this machine."""
    words = ["python", "-m", "training", "train", options.experiment.name]
    for option in ("data", "run", "tokenizer"):
        if (path := getattr(options, option)) is not None:
            words += [f"--{option}", path.name]
    return shlex.join(words)


def _can_go_on(options: argparse.Namespace) -> bool:
    if options.command != "train":
        return False
    return RunFolder(options.run or Path("runs") / options.experiment.stem).begun


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _version(text: str) -> str:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version: up to nine digits")
    return text


if __name__ == "__main__":
    sys.exit(main())
