"""Multiplies out the weights that torch stores as a product: weight norm, spectral norm and pruning.

`torch.nn.utils` stores such a weight under names of its own. With `remove_parametrizations`, a program stores the plain
weight. The formulas are those of a module in evaluation mode.
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
            notes.append(f"{weight} is computed from {' and '.join(names)} ({how})")
    for name in sorted(found):
        if (match := PARAMETRIZED.match(name)) is not None:
            module = match["module"].removesuffix(".") or "model"
            raise UnknownParametrization(
                f"{name}: a parametrisation that Wane cannot multiply out (it knows weight norm, spectral norm and "
                "pruning): before saving, call torch.nn.utils.parametrize.remove_parametrizations("
                f"{module}, {match['weight']!r})"
            )
    return found, notes


def _product(how: str, parts: list[Tensor], name: str) -> Tensor:
    """Returns the plain weight, in float64 until the last rounding. Raises UnknownParametrization if the shapes do not
    fit."""
    first, *others = (part.double() for part in parts)
    if how == "pruning":
        if first.shape != others[0].shape:
            raise UnknownParametrization(f"{name}: the mask has another shape than the weight")
        weight = first * others[0]
    elif how.startswith("spectral"):
        left, right = others
        if first.dim() != 2 or left.shape != first.shape[:1] or right.shape != first.shape[1:]:
            raise UnknownParametrization(f"{name}: only the spectral norm of a matrix along its rows is known")
        weight = first / (left @ first @ right)
    else:
        direction = others[0]
        axes = [axis for axis, size in enumerate(first.shape) if size == 1] if first.dim() else None
        fits = first.dim() in (0, direction.dim()) and all(
            size in (1, other) for size, other in zip(first.shape, direction.shape, strict=False)
        )
        if not fits:
            raise UnknownParametrization(f"{name}: the norms have the shape {list(first.shape)}, which does not fit")
        weight = first * direction / vector_norm(direction, dim=axes, keepdim=axes is not None)
    return weight.to(parts[0].dtype)
