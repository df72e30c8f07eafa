"""The arguments of the calls. They are checked before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

from .answers import Mode
from .shape import Within, fit

Input = str | int | Sequence[int] | Sequence[str]
"""A text, one token id, token ids, or names of events."""

Positive = Annotated[int, Within(least=1)]
Natural = Annotated[int, Within(least=0)]
Share = Annotated[float, Within(least=0, most=1)]
Penalty = Annotated[float, Within(least=-2, most=2)]
Unknown = Literal["refuse", "skip", "token"]


class ClientOptions(TypedDict, total=False):
    """`key`: the API key; default: WANE_API_KEY. `deadline_s`: limits each call with all its retries; default: 10 s.
    `retry`: if false, each request is sent once."""

    key: str | None
    deadline_s: Annotated[float, Within(over=0)]
    retry: bool


class SessionOptions(TypedDict, total=False):
    """`mode`: the default of the steps. `remember`: if every server has lost the session, it is made again from this
    number of its last tokens (default 512); with 0, UnknownSession is raised. `unknown`: how the server reads events
    that the vocabulary lacks."""

    model: str | None
    mode: Mode | None
    remember: Natural
    unknown: Unknown | None


class Timed(TypedDict, total=False):
    """`deadline_s`: the seconds for this call with all its retries. Default: the client's."""

    deadline_s: Annotated[float, Within(over=0)]


class Ranked(Timed, total=False):
    """Which predictions the answer lists, and whether it looks for a proof. Probabilities do not change."""

    top_k: Positive
    prove: bool
    cache: bool
    exclude: Sequence[str]
    exclude_seen: bool
    candidates: Sequence[str]
    include_end: bool
    include_unknown: bool


class StepOptions(Ranked, total=False):
    mode: Mode


class ContinuationOptions(Timed, total=False):
    top_k: Positive
    cache: bool


class OfModel(Timed, total=False):
    model: str | None
    cache: bool
    unknown: Unknown


class PredictOptions(Ranked, OfModel, total=False):
    mode: Mode
    window: Positive | None
    tolerance: Share | None
    truncated: bool


class CompareOptions(OfModel, total=False):
    models: Sequence[str]
    windows: Sequence[Positive]
    repeat: Positive


class ScoreOptions(OfModel, total=False):
    method: Literal["sequential", "parallel"]
    tolerance: Share | None
    truncated: bool
    top_k: Natural | None
    include_unknown: bool


class GenerateOptions(OfModel, total=False):
    max_tokens: Positive
    temperature: Annotated[float, Within(least=0, most=1e9)]
    top_k: Positive | None
    top_p: Annotated[float, Within(over=0, most=1)] | None
    seed: Natural | None
    stop: str | Sequence[str]
    presence_penalty: Penalty
    frequency_penalty: Penalty
    logit_bias: Mapping[str, float]
    top_logprobs: Natural | None
    mode: Literal["auto", "recurrent", "window"]
    window: Positive | None
    truncated: bool
    include_unknown: bool


def checked(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given options without those that are None. Raises ValueError, or TypeError for an unknown name."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for name, value in options.items():
        if name not in hints:
            raise TypeError(f"there is no argument {name!r}; there are {', '.join(hints)}")
        if value is not None:
            found[name] = fit(hints[name], value, name)
    return found


def sequence(given: Input) -> dict[str, Any]:
    """Returns the field of a request that holds the input. Raises ValueError."""
    items = [given] if isinstance(given, int) else given
    if isinstance(items, bytes | bytearray | Mapping | Set) or not hasattr(items, "__len__"):
        raise ValueError(f"a text, token ids or names of events are expected, not {given!r:.60}")
    if not len(items):
        raise ValueError("the input is empty")
    if isinstance(items, str):
        return {"input": items}
    if all(isinstance(item, str) for item in items):
        return {"events": list(items)}
    try:
        tokens = [operator.index(item) for item in items]  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"token ids or names of events are expected, not {given!r:.60}") from None
    if any(isinstance(item, bool) for item in items) or min(tokens) < 0:
        raise ValueError("a token id is a whole number, 0 or more")
    return {"tokens": tokens}
