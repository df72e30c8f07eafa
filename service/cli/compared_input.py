"""The token sequences that `wane compare` measures: those of a text, or of the sessions in a file of events."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from wane.client import Model, Wane
from wane.models.event_files.event_log import read_log
from wane.models.event_files.faults import EventFileError
from wane.models.event_files.format import EventFormat
from wane.service.cli.connect import CommandError
from wane.service.errors import as_json

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


def read_inputs(
    client: Wane, cards: Sequence[Model], file: Path | None, tokens: int, experiment: Path | None = None
) -> list[ComparedInput]:
    """Reads the beginning of a file for each of the models with the documents `cards`. If the models read events, the
    file has events, and the table `[data]` of the file `experiment` says how it is read: all models get its first
    `tokens` events. Otherwise the file is text, and None stands for the sample text: all models get the same text, of
    which none reads more than `tokens` tokens.

    Raises WaneError, OSError and UnicodeError. Raises CommandError if the models read events and `file` is None, if
    some models read events and others text, if a file is invalid, and if a vocabulary has none of the events.
    """
    kinds = {card.vocabulary.kind == "events": card.id for card in cards}
    if len(kinds) > 1:
        raise CommandError(f"model {kinds[True]} reads events, but model {kinds[False]} reads text")
    if True not in kinds:
        return _read_text(client, cards, file, tokens)
    if file is None:
        raise CommandError(
            f"model {kinds[True]} reads events: name a file of sessions with --file sessions.jsonl, or of clicks with "
            "--file clicks.csv"
        )
    try:
        log = read_log([file], EventFormat() if experiment is None else EventFormat.read(experiment))
    except EventFileError as error:
        raise CommandError(str(error)) from error
    sessions = [
        [log.names[event] for event in log.events[begin : min(end, tokens)]]
        for begin, end in pairwise(log.begins.tolist())
        if begin < tokens
    ]
    return [_read_events(client, card, file, sessions, log.notes) for card in cards]


def same_tokens(cards: Sequence[Model], inputs: Sequence[ComparedInput]) -> bool:
    """Whether all models predict the same tokens, so that their perplexities compare. The same events may have other
    token ids in another vocabulary."""
    if cards[0].vocabulary.kind == "events":
        return all(each.unknown == inputs[0].unknown for each in inputs)
    return all(each.sequences == inputs[0].sequences for each in inputs)


def _read_text(client: Wane, cards: Sequence[Model], file: Path | None, tokens: int) -> list[ComparedInput]:
    text = (file or SAMPLE).read_text(encoding="utf-8")[: tokens * CHARACTERS_OF_A_TOKEN]
    if not text:
        raise CommandError(f"{file} is empty")

    def read(text: str) -> list[ComparedInput]:
        scores = [client.score(text, model=card.id) for card in cards]
        return [ComparedInput([[token for token in score.tokens if token is not None]]) for score in scores]

    def most(inputs: Sequence[ComparedInput]) -> int:
        return max(each.steps for each in inputs)

    whole = read(text)
    first = [ComparedInput([each.sequences[0][:tokens]]) for each in whole]
    if same_tokens(cards, first):
        return first
    if most(whole) <= tokens:
        return whole
    # the longest beginning of whole words in which no model has more than `tokens` tokens
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    fitting = bisect_right(ends, tokens, key=lambda end: most(read(text[:end])))
    if not fitting:
        raise CommandError(f"the first word of {file or SAMPLE} has more than {tokens} tokens for one of the models")
    return read(text[: ends[fitting - 1]])


def _read_events(
    client: Wane, card: Model, file: Path, sessions: Sequence[list[str]], notes: tuple[str, ...]
) -> ComparedInput:
    result = ComparedInput([], notes=notes)
    for events in sessions:
        scored = client.score(events, model=card.id, unknown="skip")
        known = [token for token in scored.tokens if token is not None]
        result.unknown.update(scored.unknown)
        if known:
            result.sequences.append(known)
    if not result.sequences:
        raise CommandError(
            f"{file}: the vocabulary of model {card.id} has none of the {result.unknown.total():,} events: "
            f"{_names(result.unknown)}"
        )
    return result


def _names(unknown: Counter[str]) -> str:
    """Returns the names of the most frequent unknown events, and how many more there are."""
    more = len(unknown) - NAMES
    shown = ", ".join(as_json(name) for name, _ in unknown.most_common(NAMES))
    return shown + (f" and {more:,} more" if more > 0 else "")
