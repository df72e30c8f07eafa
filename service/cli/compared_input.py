"""The token sequences that `wane compare` measures: those of a text, or of the sessions in a file of events."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wane.service.cli.client import Client, CommandError, Document

SAMPLE = Path(__file__).with_name("sample.txt")
# An upper bound on the average number of characters per token of a text. For N tokens, the client sends at most N times
# this number of characters to the server.
CHARACTERS_OF_A_TOKEN = 32
NAMES = 5  # the number of unknown events that a message names

Event = str | int


@dataclass(frozen=True, slots=True)
class ComparedInput:
    """Token ids of one or more sequences. `unknown`: the number of occurrences of each event that the vocabulary lacks.
    These events are not in the sequences."""

    sequences: list[list[int]]
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> int:
        """The number of tokens of all sequences."""
        return sum(map(len, self.sequences))

    def describe(self) -> str:
        """Returns a sentence with the number of events and sessions and, if there are unknown events, a sentence with
        their number and names."""
        known, missed = self.steps, self.unknown.total()
        sentence = f"Compared {known:,} events of {len(self.sequences):,} sessions."
        if not missed:
            return sentence
        return (
            f"{sentence} Left out {missed:,} events ({missed / (known + missed):.1%}) that the vocabulary lacks: "
            f"{_names(self.unknown)}"
        )


def read_input(client: Client, card: Document, file: Path | None, tokens: int) -> ComparedInput:
    """Reads the first `tokens` tokens of a file for the model with the document `card`. If the model reads events, the
    file has sessions (`read_sessions`). Otherwise the file is text, and None stands for the sample text.

    Raises ClientError, OSError and UnicodeError. Raises CommandError if the model reads events and `file` is None, if a
    file of sessions is invalid, and if the vocabulary has none of the events.
    """
    if card["vocabulary"]["kind"] != "events":
        text = (file or SAMPLE).read_text(encoding="utf-8")[: tokens * CHARACTERS_OF_A_TOKEN]
        scored = client.post("/v1/score", {"model": card["id"], "input": text})
        return ComparedInput([scored["tokens"][:tokens]])
    if file is None:
        raise CommandError(
            f"model {card['id']} reads events: name a file of sessions with --file sessions.jsonl. Each line is a list "
            'of events, or {"session": ..., "events": [...]}'
        )
    found = ComparedInput([])
    for session in read_sessions(file):
        if found.steps == tokens:
            break
        scored = client.post(
            "/v1/score", {"model": card["id"], "events": session[: tokens - found.steps], "unknown": "skip"}
        )
        known = [token for token in scored["tokens"] if token is not None]
        found.unknown.update(scored.get("unknown") or ())
        if known:
            found.sequences.append(known)
    if not found.sequences:
        raise CommandError(
            f"{file}: the vocabulary of model {card['id']} has none of the {found.unknown.total():,} events: "
            f"{_names(found.unknown)}"
        )
    return found


def read_sessions(path: Path) -> list[list[Event]]:
    """Reads a file of JSON lines. Each line is a list of events, or an object whose field `events` is such a list. An
    event is a name or an integer. Skips empty lines and empty sessions. Raises OSError and UnicodeError. Raises
    CommandError for an invalid line and for a file without events.
    """
    sessions = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            events: Any = json.loads(line)
        except ValueError as error:
            raise CommandError(f"{path}, line {number}: not JSON: {error}") from error
        if isinstance(events, dict):
            events = events.get("events")
        if not isinstance(events, list):
            raise CommandError(
                f'{path}, line {number}: expected a list of events, or {{"session": ..., "events": [...]}}'
            )
        for place, event in enumerate(events):
            if not isinstance(event, str) and type(event) is not int:
                raise CommandError(
                    f"{path}, line {number}: event {place} is {json.dumps(event)[:40]}, expected a name or an integer"
                )
        if events:
            sessions.append(events)
    if not sessions:
        raise CommandError(f"{path}: holds no events")
    return sessions


def _names(unknown: Counter[str]) -> str:
    """Returns the names of the most frequent unknown events, and how many more there are."""
    more = len(unknown) - NAMES
    shown = ", ".join(json.dumps(name, ensure_ascii=False) for name, _ in unknown.most_common(NAMES))
    return shown + (f" and {more:,} more" if more > 0 else "")
