"""`python -m training train | evaluate | export`: the offline half of Wane."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from training.config import Experiment
from training.errors import TrainingError
from training.evaluate import POSITIONS
from training.run import evaluate_run, export_run, train


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
        "--positions", type=int, default=POSITIONS, help="window positions a split (default: %(default)s)"
    )

    command = commands.add_parser("export", help="write a bundle that the service can load")
    command.add_argument("run", type=Path, help="run folder; evaluated first where that has not been done")
    command.add_argument("--bundles", type=Path, required=True, help="folder of bundles; the bundle is BUNDLES/NAME")
    command.add_argument("--data", type=Path, help="overrides data.path")
    command.add_argument("--version", default="1", help="version number in the manifest (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0, or 2 where the input was at fault."""
    options = build_parser().parse_args(arguments)
    console = Console()
    try:
        if options.command == "train":
            train(Experiment.read(options.experiment), options.data, options.run, options.tokenizer, console)
        elif options.command == "evaluate":
            evaluate_run(options.run, options.data, options.positions, console)
        else:
            export_run(options.run, options.bundles, options.data, options.version, console)
    except (TrainingError, FloatingPointError) as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last checkpoint")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
