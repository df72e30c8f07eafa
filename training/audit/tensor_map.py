"""Maps the tensors of a checkpoint to Wane's tensors, and collects the notes for the report."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray

from wane.training.audit.checkpoint import Checkpoint
from wane.training.audit.foreign_model import Array
from wane.training.errors import ForeignError


class TensorMap:
    """Records which tensor of the file corresponds to which of Wane's tensors. `unassigned`: the names of the file's
    tensors that are not assigned yet, so have no place in the imported model. `names`: for each of Wane's tensors, its
    name in the file. `assumptions`: what the file does not record and no option states."""

    def __init__(self, checkpoint: Checkpoint, mapping: dict[str, str], ignore: Sequence[str]) -> None:
        self._path = checkpoint.path
        self._tensors = checkpoint.tensors
        self.mapping = mapping
        self.unassigned = {name for name in self._tensors if not any(fnmatchcase(name, pattern) for pattern in ignore)}
        self.names: dict[str, str] = {}
        self.notes = [f"the tensors were read from {checkpoint.inside}"] if checkpoint.inside else []
        self.notes += checkpoint.notes
        self.assumptions: list[str] = []
        if ignored := sorted(self._tensors.keys() - self.unassigned):
            self.notes.append(f"ignored because of --ignore: {', '.join(ignored)}")
        self._dtypes: set[torch.dtype] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self._tensors[name].shape)

    def matrix(self, name: str) -> tuple[int, int]:
        """Returns a matrix's shape. Raises ForeignError if the tensor is not a matrix."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise self.error(f"{name} has shape {list(shape)}, expected a matrix")
        return shape[0], shape[1]

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ForeignError unless the tensor `name` has the shape `shape`."""
        if self.shape(name) != shape:
            raise self.error(f"{name} has shape {list(self.shape(name))}, expected {list(shape)}")

    def mapped(self, ours: str) -> str | None:
        """Marks the tensor that --map names for `ours` as assigned, and returns its name. Returns None if --map names
        no tensor for `ours`. Raises ForeignError if the file lacks the named tensor."""
        theirs = self.mapping.get(ours)
        if theirs is None:
            return None
        if theirs not in self._tensors:
            raise self.error(f"--map {ours}={theirs}: there is no tensor {theirs}; known: {self.listing()}")
        self.unassigned.discard(theirs)
        return theirs

    def take(self, ours: str, name: str) -> Array:
        """Returns the file's tensor `name` in float32, and records that it is Wane's tensor `ours`. Raises ForeignError
        unless the tensor is dense and finite."""
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

    def take_complex(self, ours: str, name: str) -> NDArray[np.complex128]:
        """Like `take`, for a complex tensor."""
        tensor = self._tensors[name]
        if not tensor.is_complex() or not bool(torch.isfinite(torch.view_as_real(tensor)).all()):
            raise self.error(f"{name} is {tensor.dtype}; expected finite complex numbers")
        self.names[ours] = name
        taken: NDArray[np.complex128] = tensor.to(torch.complex128).numpy()
        return taken

    def note_conversions(self) -> None:
        """Adds a note for each number format that was converted to float32."""
        for dtype in sorted(self._dtypes - {torch.float32}, key=str):
            how = "rounded" if dtype == torch.float64 else "converted, exactly,"
            self.notes.append(f"{str(dtype).removeprefix('torch.')} tensors were {how} to float32")

    def listing(self) -> str:
        """Lists the names of the file's first tensors, for an error message."""
        names = sorted(self._tensors)
        return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")

    def describe(self, names: Sequence[str]) -> str:
        """Lists the names of tensors with their shapes, for an error message."""
        more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
        return "; ".join(f"{name} {list(self.shape(name))}" for name in names[:8]) + more

    def error(self, text: str) -> ForeignError:
        """Returns a ForeignError that names this file."""
        return ForeignError(f"{self._path}: {text}")
