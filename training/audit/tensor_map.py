"""The tensors of a checkpoint: which of Wane's tensors each becomes, and the notes for the report."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray

from wane.training.audit.checkpoint import Checkpoint
from wane.training.errors import ForeignError

Array = NDArray[np.float32]


class TensorMap:
    """`unassigned`: the names that are not yet assigned. `names`: Wane's name of each that was taken, and theirs."""

    def __init__(self, checkpoint: Checkpoint, mapping: dict[str, str], ignore: Sequence[str]) -> None:
        self._path = checkpoint.path
        self._tensors = checkpoint.tensors
        self.mapping = mapping
        self.unassigned = {name for name in self._tensors if not any(fnmatchcase(name, pattern) for pattern in ignore)}
        self.names: dict[str, str] = {}
        self.notes = [f"the tensors are those under {checkpoint.inside}"] if checkpoint.inside else []
        if ignored := sorted(self._tensors.keys() - self.unassigned):
            self.notes.append(f"ignored as asked: {', '.join(ignored)}")
        self._dtypes: set[torch.dtype] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._tensors[name].shape)

    def matrix(self, name: str) -> tuple[int, int]:
        """A matrix's shape. Raises ForeignError where the tensor is none."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise self.error(f"{name} has shape {list(shape)}, expected a matrix")
        return shape[0], shape[1]

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ForeignError unless the tensor has this shape."""
        if self.shape(name) != shape:
            raise self.error(f"{name} has shape {list(self.shape(name))}, expected {list(shape)}")

    def mapped(self, ours: str) -> str | None:
        """The tensor that --map names for `ours`, if it does; it then has its place. Raises ForeignError."""
        theirs = self.mapping.get(ours)
        if theirs is None:
            return None
        if theirs not in self._tensors:
            raise self.error(f"--map {ours}={theirs}: there is no tensor {theirs}; there are: {self.listing()}")
        self.unassigned.discard(theirs)
        return theirs

    def take(self, ours: str, name: str) -> Array:
        """A tensor in float32, as which it becomes `ours`. Raises ForeignError: not dense, not finite numbers."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise self.error(f"{name} is {dtype}, {tensor.layout}; expected dense floating-point numbers")
        self._dtypes.add(tensor.dtype)
        taken: Array = tensor.to(torch.float32).contiguous().numpy()
        if not np.isfinite(taken).all():
            raise self.error(f"{name} holds a value that is not finite in float32")
        self.names[ours] = name
        return taken

    def note_conversions(self) -> None:
        """Notes which tensors were converted."""
        for dtype in sorted(self._dtypes - {torch.float32}, key=str):
            how = "rounded" if dtype == torch.float64 else "converted, exactly,"
            self.notes.append(f"{str(dtype).removeprefix('torch.')} tensors were {how} to float32")

    def listing(self) -> str:
        """The names of the first tensors, for a message."""
        names = sorted(self._tensors)
        return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")

    def describe(self, names: Sequence[str]) -> str:
        """Names with their shapes, for a message."""
        more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
        return "; ".join(f"{name} {list(self.shape(name))}" for name in names[:8]) + more

    def error(self, text: str) -> ForeignError:
        """What is wrong with this file."""
        return ForeignError(f"{self._path}: {text}")
