"""Reads a foreign checkpoint as named tensors. Another program wrote it with `torch.save` or safetensors. Code in the
file is never run. Beside tensors and plain containers, only numpy's numbers and arrays are read.

A file may hold the tensors themselves, or dictionaries of tensors, as training scripts write them: `{"state_dict":
...}`, `{"model": ..., "optimizer": ...}`, `{"encoder": ..., "rnn": ..., "decoder": ...}`. The keys of nested
dictionaries are joined with dots.
"""

from __future__ import annotations

import codecs
import hashlib
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from wane.training.audit.parametrizations import UnknownParametrization, multiply_out
from wane.training.audit.tensor_names import PART, PUBLISHED
from wane.training.errors import ForeignError

Tensors = dict[str, Tensor]

PADDING_KEYS = frozenset({"padding_idx", "pad_idx", "pad_id", "pad_token_id", "padding_id"})
"""Names under which programs save the id of the padding token."""

_ALLOWED_FUNCTIONS: dict[str, Any] = {
    "scalar": np.float64(0).__reduce__()[0],
    "_reconstruct": np.zeros(0).__reduce__()[0],
}
ALLOWED: list[Any] = [
    np.dtype,
    np.ndarray,
    *(type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OVMmSU"),
    *(
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, function in _ALLOWED_FUNCTIONS.items()
    ),
    codecs.encode,
]
"""What a file may hold beside tensors and plain containers: numpy's numbers and arrays of numbers, by the names of
numpy 1 and 2, and the function by which pickle writes their bytes. None of them runs code of the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a file, by name. `inside`: the dotted key of the dictionary that holds the tensors, "" for the
    whole file. `notes`: how weights were computed that the file stores as a product. `padding`: the ids of padding
    tokens that the file names."""

    path: Path
    sha256: str
    inside: str
    tensors: Tensors
    notes: tuple[str, ...] = ()
    padding: frozenset[int] = frozenset()


def read_checkpoint(path: Path, inside: str | None = None) -> Checkpoint:
    """Reads a file. `inside`: the dotted key of the dictionary to read, for a file that holds several models; None if
    the file holds only one.

    Raises ForeignError if the file cannot be read, holds code, or does not hold exactly one recurrent model.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error
    if data[8:9] == b"{" and not data.startswith(b"PK"):
        tree: object = _safetensors(path, data)
    else:
        tree = _torch(path)
    if not isinstance(tree, Mapping):
        raise ForeignError(f"{path}: holds a {type(tree).__name__}, expected named tensors: save model.state_dict()")
    found = _model(path, tree) if inside is None else inside
    try:
        tensors, notes = multiply_out(_flat(_at(path, tree, found)))
    except UnknownParametrization as error:
        raise ForeignError(f"{path}: {error}") from error
    if not tensors:
        raise ForeignError(f"{path}: {found or 'the file'} holds no tensors")
    padding = frozenset(_padding(tree))
    return Checkpoint(path, hashlib.sha256(data).hexdigest(), found, tensors, tuple(notes), padding)


def _safetensors(path: Path, data: bytes) -> object:
    try:
        return load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ForeignError(f"{path}: not a safetensors file: {error}") from error


def _torch(path: Path) -> object:
    """Loads a file of `torch.save` with `weights_only`, which rejects a pickle that holds anything other than tensors,
    plain containers and ALLOWED."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive can raise nearly any exception
        if isinstance(error, pickle.UnpicklingError) and (asked := re.search(r"GLOBAL (\S+)", str(error))):
            raise ForeignError(
                f"{path}: holds {asked.group(1)}, which only running code can read; Wane never runs code from a "
                "checkpoint. Save the tensors alone in the program that wrote it: torch.save(model.state_dict(), ...)"
            ) from error
        if "TorchScript" in str(error):
            raise ForeignError(
                f"{path}: a TorchScript archive, which is a program. Save only its tensors: "
                "torch.save(torch.jit.load(...).state_dict(), ...)"
            ) from error
        raise ForeignError(
            f"{path}: neither a torch checkpoint nor a safetensors file, or it is cut off or damaged"
        ) from error


def _flat(tree: Mapping[object, object], prefix: str = "") -> Tensors:
    """Returns every tensor of a tree of dictionaries by its dotted name. Skips all other values."""
    found: Tensors = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            found[name] = value.detach()
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
    return found


def _padding(tree: Mapping[object, object]) -> Iterator[int]:
    """Yields the ids of padding tokens in a tree of dictionaries."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _padding(value)
        elif key in PADDING_KEYS and type(value) is int:
            yield value


def _is_model(tensors: Tensors) -> bool:
    """Whether the tensors include a recurrent layer and another matrix."""
    with suppress(UnknownParametrization):
        tensors, _ = multiply_out(tensors)
    recurrent = [name for name in tensors if PART.match(name) or PUBLISHED.match(name)]
    return bool(recurrent) and any(tensor.dim() == 2 for name, tensor in tensors.items() if name not in recurrent)


def _model(path: Path, tree: Mapping[object, object], prefix: str = "") -> str:
    """Returns the dotted key of the innermost dictionary that holds a whole model, "" for the file itself."""
    inner = [key for key, value in tree.items() if isinstance(value, Mapping) and _is_model(_flat(value))]
    if len(inner) > 1:
        keys = ", ".join(f"{prefix}{key}" for key in inner)
        raise ForeignError(f"{path}: holds several models: {keys}; choose one with --state-dict KEY")
    if inner:
        return _model(path, cast("Mapping[object, object]", tree[inner[0]]), f"{prefix}{inner[0]}.")
    return prefix.removesuffix(".")


def _at(path: Path, tree: Mapping[object, object], inside: str) -> Mapping[object, object]:
    """Returns the dictionary at a dotted key."""
    for key in inside.split(".") if inside else ():
        branch = tree.get(key)
        if not isinstance(branch, Mapping):
            known = ", ".join(str(name) for name, value in tree.items() if isinstance(value, Mapping)) or "none"
            raise ForeignError(f"{path}: --state-dict {inside}: there is no dictionary {key!r}; known: {known}")
        tree = branch
    return tree
