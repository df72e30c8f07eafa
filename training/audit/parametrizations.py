"""Multiplies out the weights that torch stores as a product: weight norm, spectral norm and pruning.

`torch.nn.utils` stores such a weight under names of its own. With `remove_parametrizations`, a program stores the plain
weight. The formulas are those of a module in evaluation mode.

A file does not record a formula. Another program may use the same names for another product, so the shapes and values
must also be those that torch stores: one norm for each row, for each column or for the whole weight; unit vectors; a
mask of zeros and ones.
"""

from __future__ import annotations

import re

from torch import Tensor
from torch.linalg import vector_norm

FORMS = {
    "weight norm": ("parametrizations.{}.original0", "parametrizations.{}.original1"),
    "weight norm (weight_g, weight_v)": ("{}_g", "{}_v"),
    "spectral norm": ("parametrizations.{}.original", "parametrizations.{}.0._u", "parametrizations.{}.0._v"),
    "spectral norm (weight_orig)": ("{}_orig", "{}_u", "{}_v"),
    "pruning": ("{}_orig", "{}_mask"),
}
"""The names of a weight's tensors, for each way to store it. Braces stand for the weight's name in its module."""

PARAMETRIZED = re.compile(r"^(?P<module>(?:.*\.)?)parametrizations\.(?P<weight>[^.]+)\.")


UNIT = 1e-3
"""The largest distance from 1 of the length of a unit vector that is stored in float32 or float16."""

ADVICE = "before saving, call torch.nn.utils.parametrize.remove_parametrizations"


class UnknownParametrization(ValueError):
    """Raised for a parametrisation that is not one of FORMS. The message names the tensors."""


def multiply_out(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors with every product replaced by the plain weight, and notes. Raises
    UnknownParametrization."""
    found, notes = dict(tensors), list[str]()
    for how, parts in FORMS.items():
        last = parts[-1]
        suffix = re.escape(last.partition("{}")[2])
        pattern = re.compile(
            r"^(?P<module>(?:.*\.)?)" + re.escape(last.partition("{}")[0]) + r"(?P<weight>[^.]+)" + suffix + "$"
        )
        for name in sorted(found):
            if (match := pattern.match(name)) is None:
                continue
            names = [match["module"] + part.format(match["weight"]) for part in parts]
            if not all(part in found for part in names):
                continue
            weight = match["module"] + match["weight"]
            found[weight] = _product(how, [found.pop(part) for part in names], weight)
            notes.append(f"{weight} is assumed to be computed from {' and '.join(names)} by {how}")
    for name in sorted(found):
        if (match := PARAMETRIZED.match(name)) is not None:
            module = match["module"].removesuffix(".") or "model"
            raise UnknownParametrization(
                f"{name}: a parametrisation that Wane cannot multiply out (it knows weight norm, spectral norm and "
                f"pruning): {ADVICE}({module}, {match['weight']!r})"
            )
    return found, notes


def _product(how: str, parts: list[Tensor], name: str) -> Tensor:
    """Returns the plain weight, in float64 until the last rounding. Raises UnknownParametrization if the shapes or
    values are not those of `how`."""
    first, *others = (part.double() for part in parts)
    if how == "pruning":
        (mask,) = others
        if first.shape != mask.shape or not ((mask == 0) | (mask == 1)).all():
            raise UnknownParametrization(f"{name}: its mask is not one zero or one for each weight: {ADVICE}")
        weight = first * mask
    elif how.startswith("spectral"):
        left, right = others
        if first.dim() != 2 or left.shape != first.shape[:1] or right.shape != first.shape[1:]:
            raise UnknownParametrization(
                f"{name}: only the spectral norm of a matrix along its rows is known: {ADVICE}"
            )
        if max(abs(float(vector_norm(vector)) - 1) for vector in others) > UNIT:
            raise UnknownParametrization(f"{name}: the vectors of its spectral norm are not of length 1: {ADVICE}")
        weight = first / (left @ first @ right)
    else:
        (direction,) = others
        axes = _norm_axes(first, direction)
        if axes == ():
            raise UnknownParametrization(
                f"{name}: the shape {list(first.shape)} is not that of the norms of a weight norm of "
                f"{list(direction.shape)}: {ADVICE}"
            )
        weight = first * direction / vector_norm(direction, dim=axes, keepdim=axes is not None)
    return weight.to(parts[0].dtype)


def _norm_axes(norms: Tensor, direction: Tensor) -> tuple[int, ...] | None:
    """Returns the axes of `direction` over which a weight norm takes its norms: None for one norm of the whole weight,
    an empty tuple if `norms` has not the shape of such norms."""
    if norms.dim() == 0:
        return None
    for kept in range(direction.dim()):
        shape = [size if axis == kept else 1 for axis, size in enumerate(direction.shape)]
        if list(norms.shape) == shape:
            return tuple(axis for axis in range(direction.dim()) if axis != kept)
    return ()
