"""Counts the bytes that runs copy between the host and the device."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from unittest import mock

import onnxruntime
from numpy.typing import NDArray


class Copies:
    """Context manager that counts. It stands in for the functions of onnxruntime that copy arrays, and fails if a run
    passes arrays of the host in another way."""

    def __init__(self) -> None:
        self.to_device = self.to_host = 0
        bind, fetch = onnxruntime.IOBinding.bind_cpu_input, onnxruntime.OrtValue.numpy
        update = onnxruntime.OrtValue.update_inplace

        def counted_bind(binding: onnxruntime.IOBinding, name: str, values: NDArray[Any]) -> None:
            self.to_device += values.nbytes
            bind(binding, name, values)

        def counted_update(value: onnxruntime.OrtValue, values: NDArray[Any]) -> None:
            self.to_device += values.nbytes
            update(value, values)

        def counted_fetch(value: onnxruntime.OrtValue) -> NDArray[Any]:
            found: NDArray[Any] = fetch(value)
            self.to_host += found.nbytes
            return found

        def no_run(*_: object) -> None:
            raise AssertionError("the run used no I/O binding, so it copied every input and output")

        self._patches: list[Any] = [
            mock.patch.object(onnxruntime.IOBinding, "bind_cpu_input", counted_bind),
            mock.patch.object(onnxruntime.OrtValue, "update_inplace", counted_update),
            mock.patch.object(onnxruntime.OrtValue, "numpy", counted_fetch),
            mock.patch.object(onnxruntime.InferenceSession, "run", no_run),
        ]

    def __enter__(self) -> Copies:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patch in self._patches:
            patch.stop()

    def take(self) -> tuple[int, int]:
        """Returns the number of bytes that were copied to the device since the last call of this method, and the number
        of bytes that were copied to the host."""
        found = self.to_device, self.to_host
        self.to_device = self.to_host = 0
        return found
