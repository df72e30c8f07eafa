"""Says what is wrong with a body that msgspec rejected.

msgspec's errors name the place of an invalid value, but not the value, and not the path of an unknown field. Therefore
a rejected body is read a second time, as a document without types, and the value is looked up at its place.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import TypeVar, cast

from msgspec import ValidationError, convert, inspect
from pydantic_core import from_json

from wane.service.errors import REPR_MAX_CHARACTERS, InvalidRequest, NotJson, as_json, truncate_repr
from wane.service.types.body import Body

B = TypeVar("B", bound=Body)

TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    inspect.BoolType: ("true or false", (bool,)),
    inspect.IntType: ("an integer", (int,)),
    inspect.FloatType: ("a number", (int, float)),
    inspect.StrType: ("a string", (str,)),
    inspect.VarTupleType: ("a list", (list,)),
    inspect.ListType: ("a list", (list,)),
    inspect.DictType: ("an object", (dict,)),
    inspect.StructType: ("an object", (dict,)),
    inspect.NoneType: ("null", (type(None),)),
}
"""What a value of each type must be, and the types of Python that it has before the decoder converts it."""

STEPS = re.compile(r"\.(\w+)|\[([0-9]+|\.\.\.)\]")
"""The names and indexes in the place of an error of msgspec, such as `$.steps[0].tokens[1]`."""

type_info = cache(inspect.type_info)
"""Returns the description of a type. Makes it once for each type."""


def read_again(raw: bytes | str, model: type[B]) -> B:
    """Reads a body that msgspec rejected. Raises NotJson or InvalidRequest for its first fault. Returns the body if it
    has none, because this parser accepts more: an invalid value of a member that is given again later in the object,
    null for a field that may be absent, and numbers that are not finite, which the engine refuses."""
    try:
        document = from_json(raw, cache_strings="keys")
    except ValueError as failure:
        raise NotJson(f"the body is not JSON: {failure}") from failure
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    drop_nulls(document, type_info(model))
    try:
        return convert(document, model)
    except ValidationError as error:
        complaint, at, place = str(error).rpartition(" - at `$")
        path, fault = _fault(document, type_info(model), complaint or str(error), place if at else "")
    field = path.removeprefix(".")
    raise InvalidRequest(field + fault if field else fault.removeprefix(": "), field or None)


def drop_nulls(value: object, kind: inspect.Type) -> None:
    """Removes the members that are null where the field may be absent, because a null counts as absent. The decoder
    accepts null only for fields whose default is null, so other bodies with a null are rejected and read again."""
    for choice in _choices(kind):
        match choice:
            case inspect.StructType(cls=of) if isinstance(value, dict):
                fields = _fields(of)
                for name in [name for name in value if name in fields]:
                    if value[name] is None and not fields[name].required:
                        del value[name]
                    elif isinstance(value[name], dict | list):
                        drop_nulls(value[name], fields[name].type)
            case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner) if isinstance(value, list):
                # a list may have thousands of items
                objects = [one for one in _choices(inner) if isinstance(one, inspect.StructType)]
                for item in filter(None, value if objects else ()):
                    if isinstance(item, dict):
                        for one in objects:
                            drop_nulls(item, one)


@cache
def _fields(of: Hashable) -> dict[str, inspect.Field]:
    """Returns the fields of a class of objects by name."""
    return {field.name: field for field in cast(inspect.StructType, type_info(of)).fields}


def _fault(document: object, kind: inspect.Type, complaint: str, place: str) -> tuple[str, str]:
    """Returns the path of the invalid value, such as `.steps[0].tokens[1]`, and what is wrong with it. `complaint` and
    `place` are from msgspec's error."""
    whole, value, path = kind, document, ""
    for name, index in STEPS.findall(place):
        match next((choice for choice in _choices(kind) if _fits(value, choice)), None):
            case inspect.StructType(fields=fields) if isinstance(value, dict) and name in value:
                kind = next((field.type for field in fields if field.name == name), whole)
                value, path = value[name], f"{path}.{name}"
            case inspect.DictType(value_type=inner) if isinstance(value, dict):
                kind, fitting = inner, {kind for choice in _choices(inner) for kind in TYPES[type(choice)][1]}
                members = ((key, item) for key, item in value.items() if type(item) not in fitting)
                key, value = next(members, (name, None))
                path = f"{path}.{_member(key)}"
            case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner) if (
                index and isinstance(value, list) and int(index) < len(value)
            ):
                kind, value, path = inner, value[int(index)], f"{path}[{index}]"
            case _:  # what looks like a path is a part of the name of an unknown field
                return _fault(document, whole, complaint, "")
    kinds = [*_choices(kind)]
    match next((choice for choice in kinds if _fits(value, choice)), None):
        case None:
            names = dict.fromkeys(_name(choice) for choice in kinds if not isinstance(choice, inspect.NoneType))
            return path, f" {_shown(value)}must be {_either([*names])}"
        case inspect.IntType(ge=int() as least) if cast(int, value) < least:
            return path, f" must be at least {least}"
        case inspect.IntType(le=int() as most):
            return path, f" must be less than {most + 1}"
        case inspect.StrType(max_length=int() as most):
            return path, f" has more than {most} characters"
        case inspect.VarTupleType(min_length=int() as least, max_length=most):
            count = len(cast(list[object], value))
            limit = f"at least {least}" if count < least else f"at most {most}"
            return path, f" holds {count} values, but must hold {limit}"
        case inspect.StructType(fields=fields):
            names_of_fields = {field.name for field in fields}
            for name in cast(dict[str, object], value):
                if name not in names_of_fields:
                    similar = get_close_matches(name[:REPR_MAX_CHARACTERS], names_of_fields, 1, cutoff=0.8)
                    hint = f"; did you mean `{similar[0]}`?" if similar else ""
                    return f"{path}.{_member(name)}", f": there is no such field{hint}"
            for field in fields:
                if field.required and field.name not in cast(dict[str, object], value):
                    return f"{path}.{field.name}", " is missing"
    if path and complaint.startswith("Object contains unknown field"):  # the path is a part of the field's name
        return _fault(document, whole, complaint, "")
    return path, f": {complaint}"  # a rule about several fields


def _choices(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yields the types of a union, or the only type."""
    if isinstance(kind, inspect.Metadata):
        yield from _choices(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for choice in kind.types:
            yield from _choices(choice)
    else:
        yield kind


def _fits(value: object, kind: inspect.Type) -> bool:
    """Returns whether a JSON value has the type of a field. true and false are no numbers."""
    if isinstance(kind, inspect.AnyType):
        return True
    if isinstance(kind, inspect.EnumType | inspect.LiteralType):
        return isinstance(value, str) and value in _values(kind)
    if isinstance(value, bool):
        return isinstance(kind, inspect.BoolType)
    return isinstance(value, TYPES[type(kind)][1])


def _values(kind: inspect.EnumType | inspect.LiteralType) -> list[str]:
    return [member.value for member in kind.cls] if isinstance(kind, inspect.EnumType) else [*map(str, kind.values)]


def _name(kind: inspect.Type) -> str:
    """Returns what a value of a type must be."""
    if isinstance(kind, inspect.EnumType | inspect.LiteralType):
        return _either([repr(value) for value in _values(kind)])
    return TYPES[type(kind)][0]


def _member(name: str) -> str:
    """Returns the name of a member for a path."""
    plain = 0 < len(name) <= REPR_MAX_CHARACTERS and name.isprintable() and name == name.strip()
    return name if plain else truncate_repr(name)


def _either(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _shown(value: object) -> str:
    """Returns a scalar value for a message, such as `is "x", but `. Lists and objects are not shown."""
    if isinstance(value, list | dict):
        return ""
    text = as_json(value)
    return f"is {text if len(text) <= REPR_MAX_CHARACTERS else text[:REPR_MAX_CHARACTERS] + '...'}, but "
