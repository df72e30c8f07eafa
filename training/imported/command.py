"""The command `wane import`. It needs the package onnx, but not torch."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from wane.arguments import BUNDLE_NAME, Parser, bundle_name, bundle_version
from wane.models.bundle import BundleExistsError, check_place
from wane.models.imported.bundle import Import, import_graph
from wane.models.imported.graph_file import GraphError
from wane.models.manifest import LARGEST_WINDOW
from wane.training.audit.vocabulary import read_names, read_tokenizer, reserve
from wane.training.errors import RunError, TrainingError

FAILURES = (GraphError, TrainingError, OSError)

WINDOW, MAX_WINDOW = 64, 256


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    parser = Parser(
        prog="wane import",
        description="Turns an ONNX graph of one step into a bundle: tokens [B] and states in, logits [B, V] and the "
        "next states out.",
    )
    parser.add_argument("file", type=Path, help="ONNX file of one step")
    parser.add_argument("--vocabulary", type=Path, help="file of token names in id order (words, characters or events)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json: byte-level BPE, or WordLevel")
    parser.add_argument("--events", action="store_true", help="the names are those of events, not words or characters")
    parser.add_argument(
        "--eos",
        metavar="TOKEN",
        help="token that begins a sequence (default: found by its usual names); none: the first token is read from the "
        "zero state",
    )
    parser.add_argument(
        "--ignore-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="padding or another token that is never read, listed or drawn; none: there is no such token",
    )
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="IN=OUT",
        help="the input of a state, and the output that is its next value (default: found by their shapes)",
    )
    parser.add_argument("--tokens", metavar="NAME", help="the input with the tokens (default: found by its type)")
    parser.add_argument("--logits", metavar="NAME", help="the output with the logits (default: found by its shape)")
    parser.add_argument("--name", type=bundle_name, help="name of the bundle (default: the file's name)")
    parser.add_argument("--version", type=bundle_version, default="1", help="version number of the bundle")
    parser.add_argument(
        "--window", type=_window, default=WINDOW, help="tokens of a window, if a request names none (default: 64)"
    )
    parser.add_argument(
        "--max-window",
        type=_window,
        default=MAX_WINDOW,
        help="largest window, and the number of tokens from which a lost state is rebuilt (default: 256)",
    )
    parser.add_argument(
        "--bundles",
        type=Path,
        default=Path("bundles"),
        help="folder of bundles; writes BUNDLES/NAME (default: bundles)",
    )
    parser.add_argument("--replace", action="store_true", help="replace a bundle of the same or a higher version")
    parser.add_argument("--attribution", help="owner of the weights and their data, recorded in the bundle")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status. Raises the exceptions in FAILURES."""
    options = build_parser().parse_args(arguments[1:])
    run(options, ["wane", *arguments], Console())
    return 0


def run(options: argparse.Namespace, command: Sequence[str], console: Console) -> None:
    """Writes the bundle, and prints what the model lacks. Raises the exceptions in FAILURES."""
    if (options.tokenizer is None) == (options.vocabulary is None):
        raise RunError("a graph needs a vocabulary: give either --vocabulary NAMES or --tokenizer tokenizer.json")
    if options.window > options.max_window:
        raise RunError(f"--window {options.window} is larger than --max-window {options.max_window}")
    name = options.name or re.sub("[^A-Za-z0-9._-]", "-", options.file.stem)[:64]
    if not re.fullmatch(BUNDLE_NAME, name):
        raise RunError(f"{options.file.name} gives no name for a bundle: give --name")
    target = options.bundles / name
    path = options.tokenizer or options.vocabulary
    read_vocabulary = read_tokenizer if options.tokenizer else read_names
    read = read_vocabulary(path, "events" if options.events else "text", options.eos)
    read = reserve(read, path, options.ignore_token, (), ())
    asked = Import(
        path=options.file,
        vocabulary=read.vocabulary,
        tokenizer_json=read.tokenizer_json,
        name=name,
        version=options.version,
        window=options.window,
        max_window=options.max_window,
        start=read.start,
        command=_as_typed(command),
        pairs=dict(map(_pair, options.state)),
        tokens=options.tokens,
        logits=options.logits,
        added=read.added,
        attribution=options.attribution,
    )
    try:
        check_place(target, options.version, None, options.replace)
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
            bar.add_task(f"checking and wrapping {options.file.name}", total=None)
            found = import_graph(asked, target, replace=options.replace)
    except BundleExistsError as error:
        way_out = "; use --replace or a higher --version" if error.replaceable else ""
        raise RunError(f"{target} was not written: {error}{way_out}") from error
    manifest = found.manifest
    states = ", ".join(f"{tensor.name.removeprefix('state.')} {list(tensor.shape)}" for tensor in manifest.state)
    lines = [
        f"{target}: version {manifest.version}, {manifest.vocabulary.size:,} tokens, states {states}",
        f"differs from onnxruntime on {options.file.name} by at most {found.difference:.2g} "
        "(step, window and scan, in a batch and alone)",
        *(f"note: {note}" for note in (*read.notes, *found.notes)),
        f"not certified: {manifest.certificate.reason}. Everything else works as for other models",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _pair(text: str) -> tuple[str, str]:
    name, equals, output = text.partition("=")
    if not (name and equals and output):
        raise RunError(f"--state {text}: must be IN=OUT, the names of an input and an output")
    return name, output


def _as_typed(command: Sequence[str]) -> str:
    """Returns the command for the manifest. Paths are replaced by the names of their files."""
    return shlex.join(Path(word).name if "/" in word and "=" not in word else word for word in command)


def _window(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST_WINDOW:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window: use 1 to {LARGEST_WINDOW} tokens")
    return int(text)
