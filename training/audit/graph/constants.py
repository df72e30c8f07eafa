"""Nodes of an ONNX graph whose inputs are constants: weights in another layout, and sizes of tensors.

A size that is known only when the graph runs is an object of `axes.Size` in an array of objects. Selecting, joining and
multiplying sizes are therefore the operations of numpy that also apply to weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

Array = NDArray[Any]

LARGEST = 1 << 30
"""The greatest number of bytes of a folded constant."""

MOST_SIZES = 1 << 12
"""The greatest number of elements of an array of objects."""


class NotFolded(ValueError):
    """Raised if the result of a node is not computed. The message says why."""


def fold(operator: str, attributes: Mapping[str, Any], inputs: Sequence[Array | None]) -> Array:
    """Returns the output of a node with one output. Raises NotFolded."""
    if operator not in OPERATORS:
        raise NotFolded("Wane does not compute it")
    try:
        result = np.asarray(OPERATORS[operator](attributes, list(inputs)))
    except NotFolded:
        raise
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise NotFolded(f"its inputs do not fit: {error}") from error
    return plain(result)


def plain(array: Array) -> Array:
    """Returns an array of objects as int64, if all of them are integers."""
    if array.dtype == object and all(isinstance(one, int | np.integer) for one in array.flat):
        return array.astype(np.int64)
    return array


def axes_of(attributes: Mapping[str, Any], inputs: Sequence[Array | None], name: str = "axes") -> list[int] | None:
    """Returns the axes of a node, which are an attribute or, since opset 13, its second input; None if it has none."""
    if name in attributes:
        return [int(axis) for axis in attributes[name]]
    if len(inputs) > 1 and inputs[1] is not None:
        return [int(axis) for axis in inputs[1].reshape(-1)]
    return None


def slices(attributes: Mapping[str, Any], inputs: Sequence[Array | None], rank: int) -> dict[int, slice]:
    """Returns the slice of each axis that a Slice node names. An end of about 2^31 or more is None."""
    given = dict(zip(("starts", "ends", "axes", "steps"), inputs[1:5], strict=False))
    found = {name: [*array.reshape(-1)] for name, array in given.items() if array is not None}
    found = {name: attributes[name] for name in ("starts", "ends", "axes") if name in attributes} | found
    if "starts" not in found or "ends" not in found:
        raise NotFolded("it has no starts or ends")
    places, steps = found.get("axes", range(len(found["starts"]))), found.get("steps", [1])
    if any(step != 1 for step in steps):
        raise NotFolded("its step is not 1")
    return {
        int(place) % rank: slice(int(start), None if int(end) >= 2**31 - 1 else int(end))
        for place, start, end in zip(places, found["starts"], found["ends"], strict=True)
    }


def _limited(count: int, *types: np.dtype[Any]) -> None:
    """Raises NotFolded if `count` elements of the largest of `types` are too many."""
    if object in types and count > MOST_SIZES:
        raise NotFolded(f"its output has {count:,} sizes, more than {MOST_SIZES:,}")
    if (size := count * max(each.itemsize for each in types)) > LARGEST:
        raise NotFolded(f"its output has {size:,} bytes, more than {LARGEST:,}")


def _slice(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    data = _first(inputs)
    found = slices(attributes, inputs, data.ndim)
    return data[tuple(found.get(axis, slice(None)) for axis in range(data.ndim))]


def _gather(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    data, places = _first(inputs), _given(inputs, 1)
    axis = attributes.get("axis", 0)
    _limited(data.size // max(1, data.shape[axis]) * max(1, places.size), data.dtype)
    result: Array = np.take(data, places.astype(np.int64), axis=axis)
    return result


def _concat(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    arrays = [_given(inputs, place) for place in range(len(inputs))]
    _limited(sum(array.size for array in arrays), *(array.dtype for array in arrays))
    if any(array.dtype == object for array in arrays):
        arrays = [array.astype(object) for array in arrays]
    return np.concatenate(arrays, axis=attributes["axis"])


def _reshape(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    data, shape = _first(inputs), [int(one) for one in _given(inputs, 1).reshape(-1)]
    if not attributes.get("allowzero", 0):
        shape = [data.shape[place] if one == 0 else one for place, one in enumerate(shape)]
    return data.reshape(shape)


def _squeeze(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    places = axes_of(attributes, inputs)
    return np.squeeze(_first(inputs), None if places is None else tuple(places))


def _unsqueeze(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    return np.expand_dims(_first(inputs), tuple(axes_of(attributes, inputs) or ()))


def _cast(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    data = _first(inputs)
    if data.dtype == object:
        if attributes["to"] not in (TensorProto.INT64, TensorProto.INT32):
            raise NotFolded("it casts a size to another type than an integer")
        return data
    to = np.dtype(tensor_dtype_to_np_dtype(attributes["to"]))
    _limited(data.size, to)
    return data.astype(to)


def _transpose(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    return np.transpose(_first(inputs), attributes.get("perm"))


def _product(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
    data, places = _first(inputs), axes_of(attributes, inputs)
    keep = bool(attributes.get("keepdims", 1))
    return np.asarray(np.prod(data, axis=None if places is None else tuple(places), keepdims=keep))


def _both(function: Callable[[Any, Any], Any]) -> Callable[[Mapping[str, Any], list[Array | None]], Array]:
    def apply(attributes: Mapping[str, Any], inputs: list[Array | None]) -> Array:
        del attributes
        one, other = _first(inputs), _given(inputs, 1)
        _limited(math.prod(np.broadcast_shapes(one.shape, other.shape)), one.dtype, other.dtype)
        return np.asarray(function(one, other))

    return apply


def _first(inputs: Sequence[Array | None]) -> Array:
    return _given(inputs, 0)


def _given(inputs: Sequence[Array | None], place: int) -> Array:
    array = inputs[place]
    if array is None:
        raise NotFolded(f"its input {place} is missing")
    return array


OPERATORS: Mapping[str, Callable[[Mapping[str, Any], list[Array | None]], Any]] = {
    "Add": _both(np.add),
    "Cast": _cast,
    "Concat": _concat,
    "Gather": _gather,
    "Identity": lambda _, inputs: _first(inputs),
    "Mul": _both(np.multiply),
    "Neg": lambda _, inputs: -_first(inputs),
    "ReduceProd": _product,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _both(np.subtract),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
