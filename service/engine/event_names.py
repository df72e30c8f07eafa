"""Converts the names of events in a request to tokens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from wane.models.manifest import Manifest, Unknown
from wane.models.vocabulary import UNK, Vocabulary
from wane.service.batching.turns import HEAVY_TOKENS
from wane.service.errors import InvalidRequest, as_json, truncate_repr
from wane.service.settings import Settings
from wane.service.types.body import RankedBody
from wane.service.types.request import Filter

EXAMPLES = 2
"""The number of event names that an error message shows as examples."""

Event = str | int
"""An event as a request gives it: its name, or an integer. An integer stands for the name that consists of its decimal
digits."""


class EventTokens(NamedTuple):
    """The tokens of a request's events.

    `unknown` are the names that the vocabulary lacks, in the request's order. `skipped` are the indexes of the skipped
    events in the request's list, ascending. A skipped event has no token.
    """

    tokens: Sequence[int]
    unknown: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()


class EventNames:
    """Converts the events in the requests for one model to tokens."""

    def __init__(self, manifest: Manifest, vocabulary: Vocabulary, settings: Settings) -> None:
        self._model = manifest.name
        self._unknown = manifest.unknown
        self._vocabulary = vocabulary
        self._most = settings.max_filter_events

    def check_text(self) -> None:
        """Raises InvalidRequest if the model reads events and not text. The message shows how to write events."""
        vocabulary = self._vocabulary
        if vocabulary.kind != "events":
            return
        unlisted = vocabulary.unlisted
        names = [
            name for index, name in enumerate(vocabulary.texts[: EXAMPLES + len(unlisted)]) if index not in unlisted
        ]
        example = as_json(names[:EXAMPLES])
        raise InvalidRequest(
            f'input is text, but model {self._model} reads events: write "events": {example} instead', "input"
        )

    def check_events(self, field: str) -> None:
        """Raises InvalidRequest if `field`, which is only for models of events, is given for a model that reads
        text."""
        if self._vocabulary.kind != "events":
            raise InvalidRequest(
                f"{field} is only for models whose vocabulary has events; {self._model} has a text vocabulary", field
            )

    def tokens(
        self, events: Sequence[Event], unknown: Unknown | None = None, field: str = "events", *, is_input: bool = True
    ) -> EventTokens:
        """Returns the tokens of events. `unknown` says how to treat a name that the vocabulary lacks (see `Unknown`).
        If it is None, the manifest's `unknown` applies. `is_input`: see `_find`.

        Raises InvalidRequest for an empty input, for a refused name, and if the model reads text. The message names
        `field`.
        """
        self.check_events(field)
        if is_input and not events:
            raise InvalidRequest("the input is empty: give at least one event", field)
        return self._find(events, unknown or self._unknown, field, is_input=is_input)

    async def read(self, events: Sequence[Event], unknown: Unknown | None = None, field: str = "events") -> EventTokens:
        """Like `tokens`, but converts a long list on another thread."""
        if len(events) < HEAVY_TOKENS:
            return self.tokens(events, unknown, field)
        return await asyncio.to_thread(self.tokens, events, unknown, field)

    def lines(self, text: str, unknown: Unknown | None = None) -> EventTokens:
        """Like `tokens`, for a text with one event name in each line. Ignores empty lines, and white space around a
        name. Also raises InvalidRequest if no line is an event of the vocabulary and `unknown` is "skip"."""
        read = self.tokens([name for line in text.split("\n") if (name := line.strip())], unknown, "prompt")
        if not read.tokens:
            raise InvalidRequest(
                f"the vocabulary of {self._model} has no event of prompt: write one event name in each line", "prompt"
            )
        return read

    def filter(self, body: RankedBody) -> Filter:
        """Returns the filter of a request. If the vocabulary lacks a name in `candidates`, this method raises
        InvalidRequest if the request's `unknown`, or else the manifest's, is "refuse". Otherwise it leaves the name
        out. A name in `exclude` that the vocabulary lacks is refused only if the request itself has "refuse". The names
        that are left out are in the filter's `unknown`.

        Raises InvalidRequest like `tokens`, and if a list is too long.
        """
        lists = {"exclude": body.exclude, "candidates": body.candidates}
        flags = {"exclude_seen": body.exclude_seen or None, "include_end": body.include_end or None}
        first = next((name for name, value in (lists | flags).items() if value is not None), None)
        if first is None:
            return Filter(include_unknown=body.include_unknown)
        self.check_events(first)
        for name, events in lists.items():
            if events is not None and len(events) > self._most:
                raise InvalidRequest(f"{name} holds {len(events)} values, but must hold at most {self._most}", name)
        policy: Unknown = "refuse" if body.unknown == "refuse" else "skip"
        excluded = self._find(body.exclude or (), policy, "exclude", is_input=False)
        allowed: EventTokens | None = None
        if body.candidates is not None:
            policy = "refuse" if (body.unknown or self._unknown) == "refuse" else "skip"
            allowed = self._find(body.candidates, policy, "candidates", is_input=False)
        return Filter(
            tuple(excluded.tokens),
            body.exclude_seen,
            None if allowed is None else tuple(allowed.tokens),
            body.include_end,
            excluded.unknown + (() if allowed is None else allowed.unknown),
            body.include_unknown,
        )

    def _find(self, events: Sequence[Event], unknown: Unknown, field: str, *, is_input: bool = True) -> EventTokens:
        """Returns the tokens of events. `field` is the name of the request's list that contains these events. Error
        messages name it. If `is_input` is true, the events are a sequence for the model, in which <eos> is not the name
        of an event."""
        find, unk_id = self._vocabulary.event_id, self._vocabulary.unk_id
        end = self._vocabulary.eos_id if is_input else None
        if unknown == "token" and unk_id is None:
            raise InvalidRequest(f"unknown is 'token', but the vocabulary of {self._model} has no {UNK}", "unknown")
        tokens = array("q")
        names: list[str] = []
        skipped: list[int] = []
        for place, event in enumerate(events):
            if isinstance(event, str):
                name = event
            elif -(2**63) <= event < 2**64:
                name = str(event)
            else:  # the decimal digits of a longer integer take long, or are refused by Python
                where = f"{field}[{place}]"
                raise InvalidRequest(f"{where} is an integer of over 64 bits; give the event as a text", where)
            token = find(name)
            if token is not None and token != end:
                tokens.append(token)
                continue
            is_reserved = self._vocabulary.is_reserved(name)
            if unknown == "refuse" or (is_reserved and unknown == "token"):  # padding is not an unknown event
                # the routes with a `prompt` have no field `unknown`
                advice = "" if field == "prompt" else '; with "unknown": "skip" such events are skipped'
                verb = "reserves" if is_reserved else "lacks"
                raise InvalidRequest(
                    f"{field}[{place}] is {truncate_repr(name)}, which the vocabulary of {self._model} {verb}{advice}",
                    f"{field}[{place}]",
                )
            names.append(name)
            if unknown == "token" and unk_id is not None:
                tokens.append(unk_id)
            else:
                skipped.append(place)
        return EventTokens(tokens, tuple(names), tuple(skipped))
