"""What is wrong with a body, in our words: the field by its place, and what should be there.

Places are written as the engine's own messages write them, `steps[0].tokens[1]`. Those of pydantic have the names of a
union's branches in them, and its sentences speak of Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import ValidationError

from service.errors import SHOWN_CHARACTERS, InvalidRequest, TooLarge, shown
from service.schemas import AtMost, Body
from service.settings import Settings

# By pydantic's names of errors. Where none of a union's branches would do, what each would take is told.
KINDS = {
    "bool_type": "true or false",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
OTHERS = {
    "missing": "is missing",
    "string_too_long": "has more than {max_length} characters",
    "too_short": "holds {actual_length} values, but must hold at least {min_length}",
}
MENDABLE = frozenset({"missing", "too_short", "value_error"})
"""What pydantic may find in the beginning of a body and not in the whole. `value_error`: which fields go together."""


class Shape(NamedTuple):
    """The names of a body's fields, which of them are bodies, or lists of bodies, and how long lists may be."""

    names: frozenset[str]
    bodies: Mapping[str, type[Body]]
    lists: Mapping[str, type[Body]]
    longest: Mapping[str, AtMost]


@cache
def shape(model: type[Body]) -> Shape:
    """The shape of a body."""
    bodies: dict[str, type[Body]] = {}
    lists: dict[str, type[Body]] = {}
    for name, field in model.model_fields.items():
        if (inner := _body(field.annotation)) is not None:
            bodies[name] = inner
        elif get_origin(field.annotation) is list and (inner := _body(*get_args(field.annotation))) is not None:
            lists[name] = inner
    longest = {
        name: one for name, field in model.model_fields.items() for one in field.metadata if isinstance(one, AtMost)
    }
    return Shape(frozenset(model.model_fields), bodies, lists, longest)


def _body(annotation: Any) -> type[Body] | None:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Body) else None


def too_long_list(document: Mapping[str, Any], model: type[Body], settings: Settings, *, partial: bool = False) -> None:
    """Raises TooLarge or InvalidRequest for the first list in `document` that is longer than it may be. Not left to the
    model, which would look at its items first: there may be a million of them. `partial`: there may be more of it."""
    for name, at_most in shape(model).longest.items():
        found, most = document.get(name), at_most.value(settings)
        if not isinstance(found, list) or most is None or len(found) <= most:
            continue
        count = f"at least {len(found)}" if partial else str(len(found))
        if at_most.of_tokens:
            raise TooLarge(f"the input has {count} tokens, but at most {most} are taken")
        raise InvalidRequest(f"{name} holds {count} values, but must hold at most {most}", name)


def unknown_field(document: Mapping[str, Any], model: type[Body]) -> str | None:
    """The place of the first field of `document`, or of an object in it, that `model` has not.

    Not left to the model: it would build an error for each of them, and tell first of a field that is missing where it
    is one misspelt.
    """
    names, bodies, lists, _ = shape(model)
    if not document.keys() <= names:
        return _spelt(next(name for name in document if name not in names))
    for name, inner in bodies.items():
        found = document.get(name)
        if isinstance(found, dict) and (place := unknown_field(found, inner)) is not None:
            return f"{name}.{place}"
    for name, inner in lists.items():
        found, within = document.get(name), shape(inner)
        flat = not (within.bodies or within.lists)
        for index, one in enumerate(found if isinstance(found, list) else ()):
            if not isinstance(one, dict) or (flat and one.keys() <= within.names):
                continue
            if (place := unknown_field(one, inner)) is not None:
                return f"{name}[{index}].{place}"
    return None


def _spelt(name: str) -> str:
    """A name that a client chose: in quotes where it would not be seen for what it is, and cut."""
    plain = 0 < len(name) <= SHOWN_CHARACTERS and name.isprintable() and name == name.strip()
    return name if plain else shown(name)


def invalid_request(error: ValidationError, model: type[Body]) -> InvalidRequest:
    """pydantic's findings in a body as one failure of ours, which names the first field at fault."""
    return _told(error.errors(include_url=False, include_input=False), model)


def invalid_part(error: ValidationError, model: type[Body]) -> InvalidRequest | None:
    """As `invalid_request`, for the beginning of a body: None where the rest of the body may mend what was found."""
    found = error.errors(include_url=False, include_input=False)
    mendable = {one["loc"][:1] for one in found if one["type"] in MENDABLE}
    certain = [one for one in found if one["loc"][:1] not in mendable]
    return _told(certain, model) if certain else None


def _told(found: Sequence[Any], model: type[Body]) -> InvalidRequest:
    """The first field at fault, by its place."""
    same_field = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    places = [_place(one["loc"], model) for one in same_field]
    deepest = max(places, key=len)  # of a union's branches, the one that got furthest
    here = [one for one, place in zip(same_field, places, strict=True) if place == deepest]
    field, said = "".join(deepest).removeprefix("."), _said(here)
    if field:
        return InvalidRequest(field + said, field)
    return InvalidRequest("the body must be a JSON object" if here[0]["type"] == "model_type" else said[2:])


def _place(loc: Sequence[int | str], model: type[Body]) -> tuple[str, ...]:
    """Where that is in the body: what is in `loc` beside the names of branches."""
    place: list[str] = []
    body: type[Body] | None = model
    for part in loc:
        if isinstance(part, int):
            place.append(f"[{part}]")
        elif body is not None and part in (known := shape(body)).names:
            place.append(f".{part}")
            body = known.bodies.get(part) or known.lists.get(part)
    return tuple(place)


def _said(found: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong at one place, to stand behind its name."""
    first = found[0]
    if first["type"] in KINDS:
        kinds = (KINDS[one["type"]].format_map(one.get("ctx", {})) for one in found if one["type"] in KINDS)
        return f" must be {' or '.join(dict.fromkeys(kinds))}"
    if first["type"] in OTHERS:
        return f" {OTHERS[first['type']].format_map(first.get('ctx', {}))}"
    return f": {first['msg'].removeprefix('Value error, ')}"
