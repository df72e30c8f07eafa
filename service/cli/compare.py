"""`wane compare`: runs both modes of one model over a text, or over sessions of events. Shows the latency of each mode
and the agreement of the two modes. With several models, shows for each model its perplexity in recurrent mode and in
windows, the size of its sessions, its latency and its rate."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from wane.arguments import Parser
from wane.client import Model, Wane, WaneError
from wane.service.cli import render
from wane.service.cli.compared_input import ComparedInput, read_inputs, same_tokens
from wane.service.cli.connect import CommandError, Document, connect, traced
from wane.service.cli.load import Load
from wane.service.cli.measure import choose, measure
from wane.service.cli.render import agreement_table, cost_table, latency_table, quality_table
from wane.service.cli.side_by_side import POSITIONS, WINDOW, Compared, measure_models

FAILURES = (CommandError, WaneError, OSError, UnicodeError)

Result = tuple[Document, list[Table], Callable[[Path], None]]
"""A comparison as a JSON document and as tables, and a function that plots it to a file."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. `arguments[0]` is the command's name."""
    parser = Parser("wane compare", description=__doc__)
    parser.add_argument("url", metavar="URL", help="the server's address, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="UTF-8 text; default: a short sample. For a model of events, a file of events, as `wane train` reads it "
        "(required)",
    )
    parser.add_argument(
        "--experiment",
        type=Path,
        metavar="TOML",
        help="experiment file; its table [data] says how the file of events is read, such as the columns of a CSV file",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="model to compare (default: the server's default model); repeat it to compare several models",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="K",
        help=f"the number of tokens in a window; default: the model's own window, and {WINDOW} for several models",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=256,
        metavar="N",
        help="the number of tokens or events to use from the start of the file (default 256)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the results to this file: .png, .svg or .pdf")
    options = parser.parse_args(arguments[1:])
    for name in ("tokens", "window"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name} is {value}, but must be at least 1")
    if options.plot is not None and options.plot.suffix not in render.FORMATS:
        raise CommandError(f"--plot is {options.plot}, but must end in {', '.join(render.FORMATS)}")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: in the checkout of Wane, run pip install '.[plot]'")
    if twice := [name for name, count in Counter(options.model).items() if count > 1]:
        raise CommandError(f"--model {twice[0]} is given twice")
    screen = Console(stderr=True)
    with (
        traced() as tracing,
        connect(options.url, tracing) as client,
        Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress,
    ):
        cards = [choose(client, name) for name in options.model or (None,)]
        inputs = read_inputs(client, cards, options.file, options.tokens, options.experiment)
        compare = _compare_modes if len(cards) == 1 else _compare_models
        document, tables, save = compare(client, cards, inputs, options, progress)

    console = Console()
    for card, its_input in zip(cards, inputs, strict=True):
        if card.vocabulary.kind == "events":
            of = f"{card.id}: " if len(cards) > 1 else ""
            console.print(of + its_input.describe(), highlight=False, markup=False, soft_wrap=True)
    console.print(*tables)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        save(options.plot)
    return 0


def _compare_modes(
    client: Wane, cards: Sequence[Model], inputs: Sequence[ComparedInput], options: Namespace, progress: Progress
) -> Result:
    (card,), (its_input,) = cards, inputs
    k = card.k if options.window is None else options.window
    compared = measure(client, options.url, card, k, its_input, progress)
    return asdict(compared), [latency_table(compared), agreement_table(compared)], partial(render.save, compared)


def _compare_models(
    client: Wane, cards: Sequence[Model], inputs: Sequence[ComparedInput], options: Namespace, progress: Progress
) -> Result:
    load = Load(options.url)
    same = same_tokens(cards, inputs)
    figures = measure_models(
        [
            Compared(client, load, card, its_input.sequences, options.window, POSITIONS)
            for card, its_input in zip(cards, inputs, strict=True)
        ],
        progress,
    )
    models = [
        {**asdict(figure), "unknown": dict(its_input.unknown)}
        for figure, its_input in zip(figures, inputs, strict=True)
    ]
    shown = sorted(figures, key=lambda figure: figure.perplexity) if same else figures
    return (
        {"url": options.url, "same_tokens": same, "models": models},
        [quality_table(shown, same), cost_table(shown)],
        partial(render.save_models, figures, same_tokens=same),
    )
