"""Reads JSON values as Python types: the parts of an answer, and the arguments of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class Misfit(ValueError):
    """A value does not have its type. The message begins with its place, such as `predictions[0].logprob`."""


@dataclass(frozen=True)
class Within:
    """The range of a number: at least `least`, over `over`, and at most `most`."""

    least: float = -math.inf
    most: float = math.inf
    over: float = -math.inf

    def __str__(self) -> str:
        rules = (("at least", self.least), ("over", self.over), ("at most", self.most))
        return " and ".join(f"{rule} {value}" for rule, value in rules if math.isfinite(value))


def fit(kind: Any, value: Any, at: str = "") -> Any:
    """Returns `value` as a `kind`: a dataclass, number, text, list, map, or a union of them. Raises Misfit, which names
    the place, from `at` on. Fields that a dataclass lacks are ignored: a newer server may send more."""
    if type(value) is kind or kind is Any or (kind is float and type(value) is int):
        return value
    origin, parts = _parts(kind)
    if origin in (Union, UnionType):
        *others, last = [part for part in parts if part is not NoneType]
        if value is None and NoneType in parts:
            return None
        for part in others:
            with suppress(Misfit):
                return fit(part, value, at)
        return fit(last, value, at)
    if origin is Annotated:
        value, within = fit(parts[0], value, at), parts[1]
        if within.least <= value <= within.most and within.over < value < math.inf:
            return value
        raise _misfit(at, f"must be {within}, not {value}")
    if origin is Literal and value in parts:
        return value
    if origin in (tuple, Sequence) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple([fit(parts[0], item, f"{at}[{index}]") for index, item in enumerate(value)])
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(name): fit(parts[1], item, f"{at}.{name}") for name, item in value.items()}
    if is_dataclass(kind) and isinstance(value, Mapping):
        constructor: Any = kind
        found = {}
        for name, hint, required in _fields(constructor):
            if name in value:
                found[name] = fit(hint, value[name], f"{at}.{name}")
            elif required:
                raise _misfit(f"{at}.{name}", "the field is missing")
        return constructor(**found)
    names = {Literal: f"one of {', '.join(map(str, parts))}", tuple: "a list", Sequence: "a list"}
    raise _misfit(at, f"{NAMES.get(kind) or names.get(origin, 'an object')} is expected, not {value!r:.60}")


def _misfit(at: str, why: str) -> Misfit:
    return Misfit(f"{at.removeprefix('.')}: {why}" if at else why)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@cache
def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Returns the fields of a dataclass: the name, the type, and whether it must be present."""
    hints = get_type_hints(kind, include_extras=True)
    return [(one.name, hints[one.name], one.default is one.default_factory is MISSING) for one in fields(kind)]
