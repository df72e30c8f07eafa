"""The token sequences that `wane compare` measures: those of a text, or of the sessions in a file of events."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from wane.client import Model, Wane
from wane.models.event_files.event_log import read_log
from wane.models.event_files.faults import EventFileError
from wane.models.event_files.format import EventFormat
from wane.service.cli.connect import CommandError

SAMPLE = Path(__file__).with_name("sample.txt")
# An upper bound on the average number of characters per token of a text. For N tokens, the client sends at most N times
# this number of characters to the server.
CHARACTERS_OF_A_TOKEN = 32
NAMES = 5  # the number of unknown events that a message names


@dataclass(frozen=True, slots=True)
class ComparedInput:
    """Token ids of one or more sequences. `unknown`: the number of occurrences of each event that the vocabulary lacks.
    These events are not in the sequences. `notes`: sentences about what was read."""

    sequences: list[list[int]]
    unknown: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of tokens of all sequences."""
        return sum(map(len, self.sequences))

    def describe(self) -> str:
        """Returns the notes, a sentence with the number of events and sessions and, if there are unknown events, a
        sentence with their number and names."""
        known, missed = self.steps, self.unknown.total()
        sentence = "\n".join([*self.notes, f"Compared {known:,} events of {len(self.sequences):,} sessions."])
        if not missed:
            return sentence
        return (
            f"{sentence} Left out {missed:,} events ({missed / (known + missed):.1%}) that the vocabulary lacks: "
            f"{_names(self.unknown)}"
        )


def read_input(
    client: Wane, card: Model, file: Path | None, tokens: int, experiment: Path | None = None
) -> ComparedInput:
    """Reads the first `tokens` tokens of a file for the model with the document `card`. If the model reads events, the
    file has events, and the table `[data]` of the file `experiment` says how it is read. Otherwise the file is text,
    and None stands for the sample text.

    Raises WaneError, OSError and UnicodeError. Raises CommandError if the model reads events and `file` is None, if a
    file of sessions is invalid, and if the vocabulary has none of the events.
    """
    if card.vocabulary.kind != "events":
        text = (file or SAMPLE).read_text(encoding="utf-8")[: tokens * CHARACTERS_OF_A_TOKEN]
        if not text:
            raise CommandError(f"{file} is empty")
        scored = client.score(text, model=card.id)
        return ComparedInput([[token for token in scored.tokens[:tokens] if token is not None]])
    if file is None:
        raise CommandError(
            f"model {card.id} reads events: name a file of sessions with --file sessions.jsonl, or of clicks with "
            "--file clicks.csv"
        )
    try:
        log = read_log([file], EventFormat() if experiment is None else EventFormat.read(experiment))
    except EventFileError as error:
        raise CommandError(str(error)) from error
    found = ComparedInput([], notes=log.notes)
    for begin, end in pairwise(log.begins.tolist()):
        if found.steps == tokens:
            break
        events = [log.names[event] for event in log.events[begin : min(end, begin + tokens - found.steps)]]
        scored = client.score(events, model=card.id, unknown="skip")
        known = [token for token in scored.tokens if token is not None]
        found.unknown.update(scored.unknown)
        if known:
            found.sequences.append(known)
    if not found.sequences:
        raise CommandError(
            f"{file}: the vocabulary of model {card.id} has none of the {found.unknown.total():,} events: "
            f"{_names(found.unknown)}"
        )
    return found


def _names(unknown: Counter[str]) -> str:
    """Returns the names of the most frequent unknown events, and how many more there are."""
    more = len(unknown) - NAMES
    shown = ", ".join(json.dumps(name, ensure_ascii=False) for name, _ in unknown.most_common(NAMES))
    return shown + (f" and {more:,} more" if more > 0 else "")
