"""Says what is wrong with a body that msgspec rejected.

msgspec's errors lack the value, and the path of an unknown field. Therefore a rejected body is read a second time, as a
document without types, and compared with the types of the body's fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, filterfalse
from typing import Any, TypeVar, cast

from msgspec import ValidationError, convert, inspect
from msgspec.json import schema_components
from pydantic_core import from_json

from wane.service.api.schemas.common import AT_MOST, OF_TOKENS, Body
from wane.service.errors import REPR_MAX_CHARACTERS, InvalidRequest, NotJson, TooLarge, truncate_repr
from wane.service.settings import Settings

B = TypeVar("B", bound=Body)

KINDS: dict[type, str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.VarTupleType: "a list",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
}
"""What a value of each type must be."""

PYTHON: dict[type, tuple[type, ...]] = {
    inspect.BoolType: (bool,),
    inspect.IntType: (int,),
    inspect.FloatType: (int, float),
    inspect.StrType: (str,),
    inspect.VarTupleType: (list,),
    inspect.ListType: (list,),
    inspect.DictType: (dict,),
    inspect.StructType: (dict,),
    inspect.NoneType: (type(None),),
    inspect.EnumType: (str,),
    inspect.LiteralType: (str,),
}
"""The types of Python that a JSON value of each type has before the decoder converts it."""

type_info = cache(inspect.type_info)
"""Returns the description of a type. Makes it once for each type."""

Fault = tuple[str, str]
"""The path of an invalid value, such as `.steps[0].tokens[1]`, and what is wrong with it."""


def limit_of(limit: int | str, settings: Settings) -> int | None:
    """Returns the limit that `at_most` describes, or None if the setting has no limit."""
    most: int | None = getattr(settings, limit) if isinstance(limit, str) else limit
    return most


@cache
def long_fields(model: type[Body]) -> Mapping[str, tuple[int | str, bool]]:
    """Returns the limit of each list in a body, and whether the list holds the tokens of an input."""
    _, schemas = schema_components([model])
    return {
        name: (schema[AT_MOST], OF_TOKENS in schema)
        for name, schema in schemas[model.__name__]["properties"].items()
        if AT_MOST in schema and schema.get("type") != "integer"
    }


def shortest_limit(model: type[Body], settings: Settings) -> int:
    """Returns the smallest limit of a list in a body, or 0 if no list has a limit."""
    limits = [limit_of(limit, settings) for limit, _ in long_fields(model).values()]
    return min([limit for limit in limits if limit is not None], default=0)


def check_lengths(
    value_of: Callable[[str], Any], model: type[Body], settings: Settings, *, partial: bool = False
) -> None:
    """Raises TooLarge or InvalidRequest for the first list that exceeds its limit. `value_of` returns the value of a
    field. If `partial` is true, the last list may be incomplete."""
    for name, (limit, of_tokens) in long_fields(model).items():
        value = value_of(name)
        if not isinstance(value, list | tuple):
            continue
        most = limit_of(limit, settings)
        if most is None or len(value) <= most:
            continue
        count = f"at least {len(value)}" if partial else str(len(value))
        if of_tokens:
            raise TooLarge(f"the input has {count} tokens, but at most {most} are accepted")
        raise InvalidRequest(f"{name} holds {count} values, but must hold at most {most}", name)


def read_again(raw: bytes | str, model: type[B], settings: Settings) -> B:
    """Reads a body that msgspec rejected. Raises NotJson, TooLarge or InvalidRequest for the first fault. Returns the
    body if it has none, because this parser accepts more: NaN as a value of any type, and an invalid value of a member
    that is given again later in the object."""
    document = check(raw, model, settings)
    try:
        return convert(document, model)
    except ValidationError as error:  # a rule about several fields
        complaint, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").removeprefix(".")
        raise InvalidRequest(f"{field}: {complaint}" if field else complaint, field or None) from error


def check(raw: bytes | str, model: type[Body], settings: Settings, *, partial: bool = False) -> object:
    """Parses a body, and raises NotJson, TooLarge or InvalidRequest for its first fault. If `partial` is true, `raw` is
    the beginning of a body, and a fault that the rest of the body may mend is ignored."""
    try:
        document = from_json(raw, allow_partial=partial, cache_strings="keys")
    except ValueError as failure:
        raise NotJson(f"the body is not JSON: {failure}") from failure
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    check_lengths(document.get, model, settings, partial=partial)
    drop_nulls(document, type_info(model))
    fault = next(faults(document, type_info(model), "", partial=partial), None)
    if fault is not None:
        field = fault[0].removeprefix(".")
        raise InvalidRequest(field + fault[1], field)
    return document


def drop_nulls(value: object, kind: inspect.Type) -> None:
    """Removes the members that are null where the field may be absent, because a null counts as absent. The decoder
    accepts null only for fields whose default is null, so other bodies with a null are rejected and read again."""
    for one in _choices(kind):
        match one:
            case inspect.StructType(fields=fields) if isinstance(value, dict):
                for field in fields:
                    if value.get(field.name, field) is None and not field.required:
                        del value[field.name]
                    elif isinstance(value.get(field.name), dict | list):
                        drop_nulls(value[field.name], field.type)
            case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner) if isinstance(value, list):
                if any(isinstance(choice, inspect.StructType) for choice in _choices(inner)):
                    for item in value:
                        drop_nulls(item, inner)


def faults(value: object, kind: inspect.Type, path: str, *, partial: bool) -> Iterator[Fault]:
    """Yields what is wrong with a value and with the values in it. Describes only the first invalid value in a list.
    Without `partial`, a missing field and a list that is too short are wrong, too."""
    kinds = [*_choices(kind)]
    fitting = next((one for one in kinds if _fits(value, one)), None)
    match fitting:
        case None:
            names = " or ".join(dict.fromkeys(_name(one) for one in kinds if not isinstance(one, inspect.NoneType)))
            yield path, f" {_shown(value)}must be {names}"
        case inspect.FloatType() if not math.isfinite(_float(value)):
            yield path, " must be a finite number"
        case inspect.IntType(ge=int() as least) if cast(int, value) < least:
            yield path, f" must be at least {least}"
        case inspect.IntType(le=int() as most) if cast(int, value) > most:
            yield path, f" must be less than {most + 1}"
        case inspect.StrType(max_length=int() as most) if len(cast(str, value)) > most:
            yield path, f" has more than {most} characters"
        case inspect.VarTupleType(min_length=int() as least) if len(cast(list[object], value)) < least and not partial:
            yield path, f" holds {len(cast(list[object], value))} values, but must hold at least {least}"
        case inspect.VarTupleType() | inspect.ListType():
            items = cast(list[object], value)
            index = _first_invalid(items, fitting.item_type, partial=partial)
            if index is not None:
                yield from faults(items[index], fitting.item_type, f"{path}[{index}]", partial=partial)
        case inspect.DictType():
            items = [*cast(dict[str, object], value).values()]
            index = _first_invalid(items, fitting.value_type, partial=partial)
            if index is not None:
                yield from faults(items[index], fitting.value_type, path, partial=partial)
        case inspect.StructType():
            yield from _object_faults(cast(dict[str, object], value), fitting, path, partial=partial)


def _first_invalid(items: list[object], kind: inspect.Type, *, partial: bool) -> int | None:
    """Returns the index of the first item that has a fault, or None. Halves the list repeatedly, so that no item is
    checked on its own before the invalid one is found."""
    if _all_valid(items, kind, partial=partial):
        return None
    first, end = 0, len(items)
    while end - first > 1:
        middle = (first + end) // 2
        if _all_valid(items[first:middle], kind, partial=partial):
            first = middle
        else:
            end = middle
    return first


def _all_valid(values: list[object], kind: inspect.Type, *, partial: bool) -> bool:
    """Returns whether `faults` finds nothing in any of the values. Checks the lists among them as one list, and each
    field of the objects as one list, because a call for each value of a large body takes too long."""
    kinds = [*_choices(kind)]
    found = set(map(type, values))
    for one in found:
        same: list[Any] = values if len(found) == 1 else [value for value in values if type(value) is one]
        if one not in (list, dict):
            if any(next(faults(value, kind, "", partial=partial), None) for value in _extremes(one, same, kinds)):
                return False
            continue
        match next((fitting for fitting in kinds if _fits(same[0], fitting)), None):
            case None:
                return False
            case inspect.VarTupleType(min_length=int() as least) if min(map(len, same)) < least and not partial:
                return False
            case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner):
                columns = [([*chain.from_iterable(same)], inner)]
            case inspect.DictType(value_type=inner):
                columns = [([*chain.from_iterable(value.values() for value in same)], inner)]
            case inspect.StructType(fields=fields):
                if not {field.name for field in fields}.issuperset(chain.from_iterable(same)):
                    return False
                columns = [
                    ([value[field.name] for value in same if field.name in value], field.type) for field in fields
                ]
                if not partial and any(
                    field.required and len(given) < len(same) for field, (given, _) in zip(fields, columns, strict=True)
                ):
                    return False
            case _:  # a field that holds any value
                continue
        if not all(_all_valid(column, inner, partial=partial) for column, inner in columns):
            return False
    return True


def _extremes(one: type, values: list[Any], kinds: list[inspect.Type]) -> Iterable[object]:
    """Returns those of the scalar values of the type `one` that are invalid if any of the values is invalid."""
    if one is int:
        return min(values), max(values)
    if one is float:
        return (next(filterfalse(math.isfinite, values), values[0]),)
    if one is str and any(isinstance(kind, inspect.EnumType | inspect.LiteralType) for kind in kinds):
        return set(values)
    if one is str and any(getattr(kind, "max_length", None) is not None for kind in kinds):
        return (max(values, key=len),)
    return values[:1]


def _choices(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yields the types of a union, or the only type."""
    if isinstance(kind, inspect.Metadata):
        yield from _choices(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _choices(one)
    else:
        yield kind


def _object_faults(value: dict[str, Any], kind: inspect.StructType, path: str, *, partial: bool) -> Iterator[Fault]:
    known = {field.name: field for field in kind.fields}
    for name in value:
        if name not in known:
            plain = 0 < len(name) <= REPR_MAX_CHARACTERS and name.isprintable() and name == name.strip()
            yield f"{path}.{name if plain else truncate_repr(name)}", ": there is no such field"
    for name, field in known.items():
        if name in value:
            yield from faults(value[name], field.type, f"{path}.{name}", partial=partial)
        elif field.required and not partial:
            yield f"{path}.{name}", " is missing"


def _fits(value: object, kind: inspect.Type) -> bool:
    """Returns whether a JSON value has the type of a field. true and false are no numbers."""
    if isinstance(kind, inspect.AnyType):
        return True
    if isinstance(kind, inspect.EnumType | inspect.LiteralType):
        return isinstance(value, str) and value in _values(kind)
    if isinstance(value, bool):
        return isinstance(kind, inspect.BoolType)
    return isinstance(value, PYTHON[type(kind)])


def _values(kind: inspect.EnumType | inspect.LiteralType) -> list[str]:
    return [member.value for member in kind.cls] if isinstance(kind, inspect.EnumType) else [*map(str, kind.values)]


def _name(kind: inspect.Type) -> str:
    """Returns what a value of a type must be."""
    if isinstance(kind, inspect.EnumType | inspect.LiteralType):
        *others, last = [repr(value) for value in _values(kind)]
        return f"{', '.join(others)} or {last}" if others else last
    return KINDS[type(kind)]


def _shown(value: object) -> str:
    """Returns a scalar value for a message, such as `is "x", but `. Lists and objects are not shown."""
    if isinstance(value, list | dict):
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return f"is {text if len(text) <= REPR_MAX_CHARACTERS else text[:REPR_MAX_CHARACTERS] + '...'}, but "


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
