"""The commands `wane train | evaluate | export | cache | audit`, which run offline."""

from __future__ import annotations

import argparse
import errno
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.markup import escape

from wane.arguments import Parser, bundle_name, bundle_version, printable
from wane.models.bundle_checks import MANIFEST
from wane.models.manifest import LARGEST_CACHE, LARGEST_WINDOW, Precision
from wane.training.audit.audit import audit
from wane.training.audit.subject import MAX_WINDOW, TOKENS, TOLERANCE, AuditOptions
from wane.training.audit.subject import POSITIONS as AUDITED
from wane.training.bundle import export_bundle_again, fit_bundle_cache
from wane.training.config import Experiment, Protocol
from wane.training.errors import LostError, RunError, TrainingError
from wane.training.evaluate import POSITIONS
from wane.training.group import ALONE, Group
from wane.training.run import evaluate_run, evaluate_server, export_run, train
from wane.training.run_folder import RunFolder

REPLACE = "replace a bundle of the same name even if its version is the same or higher"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the commands' arguments. `wane/cli.py` documents the commands."""
    parser = Parser(prog="wane")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("train")
    command.add_argument("experiment", type=Path, help="experiment file (TOML)")
    command.add_argument(
        "--data", type=Path, help="file or folder of training data; overrides the experiment's data.path"
    )
    command.add_argument(
        "--run", type=Path, help="run folder; a run in it is resumed (default: runs/NAME, from NAME.toml)"
    )
    command.add_argument("--tokenizer", type=Path, help="existing tokenizer.json (default: trains a new tokenizer)")

    command.add_argument(
        "--after",
        type=Path,
        metavar="RUN",
        help="events: run folder of the same experiment; trains on the training and the validation split together, for "
        "as many epochs as the best weights of RUN had, and saves the last weights",
    )

    command = commands.add_parser("evaluate")
    command.add_argument("run", type=Path, help="run folder")
    command.add_argument("--data", type=Path, help="file or folder of data; overrides the experiment's data.path")
    command.add_argument(
        "--positions",
        type=_positions,
        default=POSITIONS,
        help="number of positions of each split at which windows and, for events, rankings are evaluated, or all "
        "(default: %(default)s)",
    )
    command.add_argument(
        "--protocol",
        choices=get_args(Protocol),
        help="events: the events that are predicted; overrides the experiment's data.protocol",
    )
    command.add_argument(
        "--transitions",
        action="store_true",
        help="events: mix the model with transition tables of the training split, whose weights are fitted to the "
        "validation split; with --server: the served bundle has them",
    )

    command.add_argument(
        "--server",
        metavar="URL",
        help="events: replay the test sessions through this server, step by step, and print the metrics of its "
        "answers; the key is that of WANE_API_KEY",
    )
    command.add_argument("--model", help="name of the served model (default: the server's default model)")

    command = commands.add_parser("export")
    command.add_argument(
        "run", type=Path, help="run folder, evaluated first if it has no evaluation; or the folder of a bundle"
    )
    command.add_argument(
        "--bundles",
        type=Path,
        required=True,
        help="folder of bundles; writes BUNDLES/NAME, or BUNDLES/NAME/VERSION if the model has such folders",
    )
    command.add_argument(
        "--keep-versions",
        action="store_true",
        help="write BUNDLES/NAME/VERSION, beside the model's other versions, to which `wane rollback` can return",
    )
    command.add_argument("--data", type=Path, help="file or folder of data; overrides the experiment's data.path")
    command.add_argument(
        "--version",
        type=bundle_version,
        help="version number in the manifest (default: 1 for a run, the old version plus 1 for a bundle)",
    )
    command.add_argument(
        "--precision",
        choices=get_args(Precision),
        help="number format of the matrix products; int8 writes NAME-int8, without a certificate (default: float32 "
        "for a run, the bundle's own format for a bundle)",
    )
    command.add_argument("--replace", action="store_true", help=REPLACE)
    command.add_argument(
        "--transitions",
        action="store_true",
        help="events: write a bundle with the transition tables that `wane evaluate --transitions` fitted",
    )

    command = commands.add_parser(
        "cache", description="Fits a cache language model to a bundle and prints the perplexity with and without it."
    )
    command.add_argument("bundle", type=Path, help="folder of a bundle")
    command.add_argument("--data", type=Path, help="file or folder of text or events (default: the training corpus)")
    command.add_argument(
        "--length", type=_cache_length, default=512, help="number of tokens that the cache holds (default: %(default)s)"
    )
    command.add_argument(
        "--bundles", type=Path, help="folder of bundles; writes BUNDLES/NAME with the cache (default: writes nothing)"
    )
    command.add_argument(
        "--version", type=bundle_version, help="version number of the new bundle (default: the bundle's version plus 1)"
    )
    command.add_argument("--replace", action="store_true", help=REPLACE)
    _add_audit(commands)
    return parser


def _add_audit(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "audit",
        description="Audits a model: a state_dict of torch.nn.RNN, GRU or LSTM, of minGRU or LRU layers between an "
        "embedding and a head (torch.save or safetensors), an ONNX file of an LSTM, GRU or RNN, or the folder of a "
        "bundle or a run.",
    )
    command.add_argument("file", type=Path, help="checkpoint file, ONNX file (.onnx), bundle folder or run folder")
    command.add_argument(
        "--data", type=Path, help="file or folder of text, or of events (.jsonl: one list per line; .csv, .tsv)"
    )
    command.add_argument(
        "--experiment",
        type=Path,
        metavar="FILE",
        help="experiment file; its table [data] says how files of events are read, such as the columns of a CSV file",
    )
    command.add_argument("--tokenizer", type=Path, help="tokenizer.json: byte-level BPE, or WordLevel")
    command.add_argument(
        "--vocabulary",
        type=Path,
        help="file of token names in id order (words, characters or events): JSON, or one name per line",
    )
    command.add_argument(
        "--eos",
        metavar="TOKEN",
        help="token that begins a sequence and encodes a line break (default: found by its usual names); none: the "
        "model starts from the zero state, without a token",
    )
    command.add_argument(
        "--ignore-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="padding or another token that is never read, listed or drawn (default: found by its usual names, or by a "
        "row of zeros in the embedding); none: there is no such token",
    )
    command.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="safetensors file with `tokens`, the ids of a sequence, and `logits`, the model's own logits for them; "
        "exits with an error if the imported model computes others",
    )
    command.add_argument(
        "--tolerance",
        type=_share,
        default=TOLERANCE,
        help="largest total variation between the predictions of the recommended window and of the uninterrupted run "
        "(default: %(default)s)",
    )
    command.add_argument(
        "--positions",
        type=_positive,
        default=AUDITED,
        help="number of positions at which windows are compared with the uninterrupted run (default: %(default)s)",
    )
    command.add_argument(
        "--tokens", type=_positive, default=TOKENS, help="largest number of tokens to read (default: %(default)s)"
    )
    command.add_argument(
        "--max-window",
        type=_window,
        default=MAX_WINDOW,
        help="largest window that is evaluated and served, in tokens (default: %(default)s)",
    )
    command.add_argument(
        "--threads", type=_positive, help="number of torch threads; use 1 on a busy machine (default: chosen by torch)"
    )
    command.add_argument("--report", type=Path, metavar="DIR", help="report folder (default: audits/NAME)")
    command.add_argument("--export", type=Path, metavar="BUNDLES", help="also write the bundle BUNDLES/NAME")
    command.add_argument("--replace", action="store_true", help=REPLACE)
    command.add_argument(
        "--name", type=bundle_name, help="name of the report and the bundle (default: the file's name)"
    )
    command.add_argument(
        "--version", type=bundle_version, default="1", help="version number of the bundle (default: %(default)s)"
    )
    command.add_argument("--attribution", help="owner of the weights and their data, recorded in the bundle")
    unusual = command.add_argument_group("options for unusual files")
    unusual.add_argument(
        "--state-dict", metavar="KEY", help="dotted key of the dictionary of tensors in the file, such as model.best"
    )
    unusual.add_argument(
        "--map",
        dest="mapping",
        action="append",
        default=[],
        metavar="NAME=THEIRS",
        help="a tensor's name in Wane (embedding, head, head.bias, layers.0, layers.0.weight_ih, ...) "
        "and its name in the file",
    )
    unusual.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="pattern for the names of tensors that do not belong to the model",
    )
    unusual.add_argument(
        "--nonlinearity",
        choices=("tanh", "relu", "identity", "positive"),
        help="what files do not record: the nonlinearity of an RNN, tanh (default) or relu; the candidates of a "
        "minGRU, identity or positive (log-space)",
    )


FAILURES = ()  # the exceptions that `wane/cli.py` must report: none, because `main` reports all errors


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit status.

    0: success. 1: another process of the group was lost. 2: invalid input, or a number that is not finite in training.
    130: interrupted.
    """
    options = build_parser().parse_args(arguments)
    console, errors, group = Console(), Console(stderr=True), ALONE
    try:
        group = Group.join()
        with group.heard():
            _run(options, console if group.first else Console(quiet=True), group)
        group.leave()
    except LostError as error:
        _print_error(errors, error)
        group.wait_for_end()
        return 1
    except (TrainingError, FloatingPointError, OSError) as error:
        # In a group of processes, every process raises the same error. Only the first process prints it.
        if group.first:
            _print_error(errors, error, _advice(error, options))
        else:
            group.wait_for_end()
        return 2
    except KeyboardInterrupt:
        if group.first:
            errors.print(
                "stopped"
                + ("; run the same command again to resume from the last checkpoint" if _can_resume(options) else "")
            )
        return 130
    return 0


def _run(options: argparse.Namespace, console: Console, group: Group) -> None:
    if options.command == "train":
        experiment = group.from_first(lambda: Experiment.read(options.experiment))
        command = _as_typed(options, group)
        train(experiment, options.data, options.run, options.tokenizer, command, console, group, options.after)
        return
    if not group.alone:
        raise RunError(f"`{options.command}` runs in one process, not {group.size}; only `train` runs in several")
    if options.command == "evaluate":
        judged = (options.run, options.data, options.positions, console, options.protocol)
        if options.server is None and options.model is not None:
            raise RunError("--model needs --server")
        if options.server is None:
            evaluate_run(*judged, options.transitions)
        else:
            evaluate_server(*judged, options.server, options.model, options.transitions)
    elif options.command == "audit":
        given = {name: value for name, value in vars(options).items() if name != "command"}
        audit(AuditOptions(command=_audit_as_typed(options), **given), console)
    elif options.command == "cache":
        fit_bundle_cache(
            options.bundle,
            options.data,
            options.bundles,
            options.length,
            options.version,
            console,
            replace=options.replace,
        )
    elif (options.run / MANIFEST).exists():
        if options.data is not None:
            raise RunError(f"{options.run} is a bundle, which is exported without an evaluation: omit --data")
        if options.transitions:
            raise RunError(f"{options.run} is a bundle, whose tables are kept: --transitions needs a run folder")
        export_bundle_again(
            options.run,
            options.bundles,
            options.version,
            console,
            options.precision,
            options.replace,
            options.keep_versions,
        )
    else:
        export_run(
            options.run,
            options.bundles,
            options.data,
            options.version or "1",
            console,
            options.precision or "float32",
            options.replace,
            options.keep_versions,
            options.transitions,
        )


def _print_error(console: Console, error: Exception, advice: str = "") -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    console.print(f"[bold red]error:[/] {escape(printable(text + advice))}", highlight=False, soft_wrap=True)


def _advice(error: Exception, options: argparse.Namespace) -> str:
    """Returns what to do about an error that is not about the input: a full disk."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    resumed = "; the run goes on from its last checkpoint" if _can_resume(options) else ""
    return f": free space, and run the same command again{resumed}"


def _as_typed(options: argparse.Namespace, group: Group) -> str:
    """Returns the `train` command that is recorded in the run's origin. Paths are replaced by the names of their files
    and folders."""
    words = [*group.launcher, "train", options.experiment.name]
    for option in ("data", "run", "tokenizer", "after"):
        if (path := getattr(options, option)) is not None:
            words += [f"--{option}", path.name]
    return shlex.join(words)


def _audit_as_typed(options: argparse.Namespace) -> str:
    """Returns the `audit` command with the options that affect the result. Paths are replaced by the names of their
    files."""
    words = ["wane", "audit", options.file.name]
    for option in ("data", "experiment", "tokenizer", "vocabulary", "check", "export"):
        if (path := getattr(options, option)) is not None:
            words += [f"--{option}", path.name]
    words += [word for pair in options.mapping for word in ("--map", pair)]
    words += [word for pattern in options.ignore for word in ("--ignore", pattern)]
    words += [word for token in options.ignore_token for word in ("--ignore-token", token)]
    for option in ("eos", "state_dict", "nonlinearity"):
        if (value := getattr(options, option)) is not None:
            words += [f"--{option.replace('_', '-')}", value]
    words += ["--tolerance", f"{options.tolerance:g}", "--positions", str(options.positions)]
    words += ["--tokens", str(options.tokens), "--max-window", str(options.max_window)]
    return shlex.join(words)


def _can_resume(options: argparse.Namespace) -> bool:
    if options.command != "train":
        return False
    return RunFolder(options.run or Path("runs") / options.experiment.stem).begun


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _positions(text: str) -> int:
    return sys.maxsize if text == "all" else _positive(text)


def _window(text: str) -> int:
    if (window := _positive(text)) > LARGEST_WINDOW:
        raise argparse.ArgumentTypeError(f"{text} is more than {LARGEST_WINDOW}, the largest window")
    return window


def _cache_length(text: str) -> int:
    if not 2 <= (length := _positive(text)) <= LARGEST_CACHE:
        raise argparse.ArgumentTypeError(f"{text} is not between 2 and {LARGEST_CACHE}, the largest cache")
    return length


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value
