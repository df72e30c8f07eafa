"""Reads JSON values as Python types: the parts of an answer, and the arguments of a call.

A value that does not have its type raises `Misfit`, which names the place. A field of an answer that a dataclass does
not have is ignored, because a newer server may send more fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class Misfit(ValueError):
    """A value does not have its type. The message begins with its path, such as `predictions[0].logprob`."""

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(f"{path.removeprefix('.')}: {why}" if path else why)
        self.why, self.path = why, path


@dataclass(frozen=True, slots=True)
class Within:
    """The range of a number: at least `least`, over `over`, and at most `most`."""

    least: float = -math.inf
    most: float = math.inf
    over: float = -math.inf

    def __str__(self) -> str:
        rules = (("at least", self.least), ("over", self.over), ("at most", self.most))
        return " and ".join(f"{rule} {value}" for rule, value in rules if math.isfinite(value))


def fit(kind: Any, value: Any) -> Any:
    """Returns `value` as a `kind`: a dataclass, number, text, list, map, or a union of them. Raises Misfit."""
    if type(value) is kind or kind is Any:
        return value
    origin, parts = _parts(kind)
    if kind is float and type(value) is int:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        others = [part for part in parts if part is not NoneType]
        fitting = [part for part in others[:-1] if _fits(part, value)]
        return fit((fitting or others)[0 if fitting else -1], value)
    if origin is Annotated:
        value, within = fit(parts[0], value), parts[1]
        if within.least <= value <= within.most and within.over < value < math.inf:
            return value
        raise Misfit(f"must be {within}, not {value}")
    if origin is Literal and value in parts:
        return value
    if origin in (tuple, Sequence) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple([_within(parts[0], item, f"[{index}]") for index, item in enumerate(value)])
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(name): _within(parts[1], item, f".{name}") for name, item in value.items()}
    if is_dataclass(kind) and isinstance(value, Mapping):
        constructor: Any = kind
        found = {
            name: _within(hint, value[name], f".{name}") for name, hint, _ in _fields(constructor) if name in value
        }
        missing = next((name for name, _, required in _fields(constructor) if required and name not in found), None)
        if missing is None:
            return constructor(**found)
        raise Misfit("the field is missing", f".{missing}")
    names = {Literal: f"one of {', '.join(map(str, parts))}", dict: "an object", Mapping: "an object"}
    expected = NAMES.get(kind) or names.get(origin) or ("an object" if is_dataclass(kind) else "a list")
    raise Misfit(f"{expected} is expected, not {value!r:.60}")


def _within(kind: Any, value: Any, part: str) -> Any:
    try:
        return fit(kind, value)
    except Misfit as error:
        raise Misfit(error.why, part + error.path) from None


def _fits(kind: Any, value: Any) -> bool:
    try:
        fit(kind, value)
    except Misfit:
        return False
    return True


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@cache
def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Returns the fields of a dataclass: the name, the type, and whether it must be present."""
    hints = get_type_hints(kind, include_extras=True)
    return [(one.name, hints[one.name], one.default is one.default_factory is MISSING) for one in fields(kind)]
