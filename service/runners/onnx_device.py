"""Runs a bundle's graphs on onnxruntime with states that stay on the device.

The states of all slots are `OrtValue`s in the device's memory. The graphs read the states from their slots, and an
additional graph writes the results of a run to slots (`models/slot_graphs.py`). Tokens and slot numbers are copied to
the device, and only the outputs that are read are copied to the host. The number of copied bytes of a step therefore
does not depend on the size of a state.

The same code runs on every execution provider of onnxruntime. On the CPU, where nothing needs to be copied between
devices, `OnnxRunner` is faster.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike, NDArray

from wane.models.bundle import Bundle
from wane.models.manifest import Role
from wane.service.runners.onnx import CUDA, CUDA_DEVICE, OnnxRunner, open_session
from wane.service.runners.outputs import FEW, Outputs, TopColumns
from wane.service.runners.runner import (
    EVERY_NORMS,
    HIDDEN,
    HIDDENS,
    KEPT,
    LOG_SUM_EXP,
    RADIUS,
    TOP_IDS,
    TOP_LOGITS,
    Array,
    DeviceError,
    Feeds,
    Shapes,
    Slots,
    StateMemory,
    output_name,
)

logger = logging.getLogger("wane.runner")

IN_SLOTS = "slots."  # prefix of inputs: the array of all slots from which a graph gathers its input
SLOTS = "slots"
CHECK, LENGTH, FEW_LOGITS, FEW_IDS = "check", "length", "few_logits", "few_ids"
ADDED = (CHECK, LENGTH, FEW_LOGITS, FEW_IDS)

COPIED = (*ADDED, LOG_SUM_EXP, RADIUS, "logprobs")
"""Outputs that every run copies to the host. The other outputs are copied when they are read."""

PLACED = ("logprobs", HIDDENS, EVERY_NORMS)
"""Outputs with a value for each token, (B, T, ...)."""

PADDING = {"tokens": 0, "targets": 0, SLOTS: 0, "lengths": 1}
"""The inputs of a run that are padded, and the values of their padding."""

DTYPES: Mapping[str, DTypeLike] = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
"""The element types of the graphs' outputs."""

CAPTURED: tuple[Role, ...] = ("step", "head")
"""Graphs that run in `Buffers` and can be captured as CUDA graphs. The other graphs contain a loop, which a CUDA graph
cannot contain."""

SPARE_BUFFERS = 2
"""The largest number of free buffers for each graph and each size of a batch."""

MOST_CAPTURES = 64
"""The largest number of CUDA graphs of one graph of the bundle: two for each of 15 sizes of a batch, and as many for
other memories of states. Later runs are not captured."""

GRAPH_ID = "gpu_graph_id"
"""The option of a run that names the CUDA graph. The run with a new number is captured, and a run with a known number
repeats that CUDA graph. The number UNCAPTURED does neither."""

UNCAPTURED = -1


def bucket(rows: int) -> int:
    """Returns the size to which a batch of `rows` items is padded: the next power of two."""
    return 1 << (rows - 1).bit_length()


def length_bucket(tokens: int) -> int:
    """Returns the length to which sequences of `tokens` tokens are padded: the next multiple of an eighth of the next
    power of two. A loop over the tokens becomes at most a quarter longer."""
    part = max(1, bucket(tokens) // 8)
    return -(-tokens // part) * part


class Device(NamedTuple):
    """A device of onnxruntime. name: `cpu` or `cuda`. threads: the number of CPU threads that one run uses."""

    name: str
    threads: int

    def open(self, graph: bytes) -> onnxruntime.InferenceSession:
        """Opens a session for a graph without weights."""
        return open_session(graph, self.name == "cuda", self.threads)

    def zeros(self, shape: Sequence[int]) -> onnxruntime.OrtValue:
        """Returns float32 zeros on the device. On the CPU, the operating system commits their memory when it is first
        written."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32), self.name, CUDA_DEVICE)

    def empty(self, shape: Sequence[int], dtype: DTypeLike = np.float32) -> onnxruntime.OrtValue:
        """Returns a tensor on the device. Its values are undefined."""
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, dtype, self.name, CUDA_DEVICE)


def bind_input(binding: onnxruntime.IOBinding, name: str, value: Any) -> None:
    """Binds a value on the device, or an array of the host, as an input of a run. onnxruntime copies the array to the
    device if the graph reads it there."""
    if isinstance(value, onnxruntime.OrtValue):
        binding.bind_ortvalue_input(name, value)
    else:
        binding.bind_cpu_input(name, np.ascontiguousarray(value))


def run_to_host(
    session: onnxruntime.InferenceSession, inputs: Mapping[str, Any], outputs: Sequence[str]
) -> list[Array]:
    """Runs a graph and copies these outputs to the host. inputs: see `bind_input`."""
    binding = session.io_binding()
    for name, value in inputs.items():
        bind_input(binding, name, value)
    for name in outputs:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    return [value.numpy() for value in binding.get_outputs()]


class Buffers:
    """The inputs and outputs of one run of a padded batch, in memory on the device that later runs reuse.

    Their addresses do not change, so a run can be captured as a CUDA graph. This graph also has the addresses of the
    states that the run reads. Each memory of states therefore has a CUDA graph of its own.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, size: int, device: Device, numbers: Iterator[int]
    ) -> None:
        """`session` runs a graph of CAPTURED from slots. size: the padded number of items. numbers: the numbers of the
        session's next CUDA graphs."""
        self._size = size
        self._numbers = numbers
        self._captures: dict[tuple[object, ...], onnxruntime.RunOptions] = {}
        self._inputs = {
            value.name: device.empty((size,), np.int64)
            for value in session.get_inputs()
            if not value.name.startswith(IN_SLOTS)
        }
        self.outputs: dict[str, onnxruntime.OrtValue] = {}
        for value in session.get_outputs():
            shape = [size if isinstance(count, str) else count for count in value.shape]
            self.outputs[value.name] = device.empty(shape, DTYPES[value.type])

    def run(self, session: onnxruntime.InferenceSession, inputs: Mapping[str, Any]) -> None:
        """Runs the graph and overwrites `outputs`. inputs: states on the device, and int64 arrays (B) of the host."""
        binding = session.io_binding()
        states = []
        for name, value in inputs.items():
            if name in self._inputs:
                self._inputs[name].update_inplace(padded(value, self._size))
                binding.bind_ortvalue_input(name, self._inputs[name])
            else:
                binding.bind_ortvalue_input(name, value)
                states.append(value)
        for name, value in self.outputs.items():
            binding.bind_ortvalue_output(name, value)
        session.run_with_iobinding(binding, self._capture(states))

    def _capture(self, states: Sequence[onnxruntime.OrtValue]) -> onnxruntime.RunOptions:
        """Returns the options of a run that reads the arrays `states`. A graph of arrays that were freed is never
        repeated for others, unless these have the same addresses and shapes."""
        key = tuple((value.data_ptr(), *value.shape()) for value in states)
        if key not in self._captures:
            number = next(self._numbers)
            options = onnxruntime.RunOptions()
            options.add_run_config_entry(GRAPH_ID, str(number))
            if number == UNCAPTURED:
                return options
            self._captures[key] = options
        return self._captures[key]


def padded(values: NDArray[np.int64], size: int, fill: int = 0) -> NDArray[np.int64]:
    """Returns an input of a run, int64 (B) or (B, T), padded with `fill` to `size` items, and to a `length_bucket` of
    tokens. The padding reads slot 0, and its outputs are never read."""
    padded = np.full((size, *map(length_bucket, values.shape[1:])), fill, np.int64)
    padded[tuple(map(slice, values.shape))] = values
    return padded


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The use of buffers by the outputs of one run. When the last of these outputs is freed, another run may use the
    buffers. free: the free buffers of the same graph and padded size. At most SPARE_BUFFERS of them are kept."""

    buffers: Buffers
    free: list[Buffers]

    def __del__(self) -> None:
        if len(self.free) < SPARE_BUFFERS:
            self.free.append(self.buffers)


class TakeSessions(NamedTuple):
    """The sessions of the graphs that take a part of the outputs of a run: see `rows_graph` and `top_graph`."""

    rows: onnxruntime.InferenceSession
    top: onnxruntime.InferenceSession


class DeviceOutputs(Outputs):
    """The outputs of one run on a device. The names are those of the bundle's graph. Reading an output that is not in
    COPIED copies it to the host: all rows of the batch's items with `outputs[name]`, and one row with `row`."""

    def __init__(
        self,
        on_device: Mapping[str, onnxruntime.OrtValue],
        copied: Mapping[str, Array],
        rows: NDArray[np.int64],
        take: TakeSessions,
        lease: Lease | None = None,
        places: int | None = None,
    ) -> None:
        """on_device and copied: the outputs on the device and on the host, with padding. rows: int64 (B), the rows of
        the batch's items. lease: the lease of the outputs' memory; None if each run allocates its own memory. places:
        the number T of tokens without padding, for the outputs (B, T, ...)."""
        super().__init__({}, [*on_device, *(name for name in copied if name not in ADDED)])
        self._lease = lease
        self._places = places
        self.on_device = on_device
        self.rows = rows
        self._copied = copied
        self._take = take

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            if name not in self.on_device:
                values = self._unpadded(name, self._copied[name][self.rows])
            elif name == TOP_IDS:
                values = self._taken_top(self.most)[0]
            else:
                values = self._taken(name, self.rows)
            self._arrays = {**self._arrays, name: values}
        return self._arrays[name]

    def row(self, name: str, row: int) -> Array:
        """See `Outputs`. Copies only this row to the host."""
        if name in self._arrays or name not in self.on_device or name == TOP_IDS:
            value: Array = self[name][row]
            return value
        taken: Array = self._taken(name, self.rows[row : row + 1])[0]
        return taken

    def _taken(self, name: str, rows: NDArray[np.int64]) -> Array:
        """Copies rows of a float32 output to the host."""
        (values,) = run_to_host(self._take.rows, {"values": self.on_device[name], "rows": rows}, ["found"])
        return self._unpadded(name, values)

    def _unpadded(self, name: str, values: Array) -> Array:
        """Returns rows of an output without the places that are padding."""
        return values[:, : self._places] if name in PLACED else values

    def _taken_top(self, count: int) -> tuple[Array, Array]:
        """Copies the ids and the logits of the `count` largest logits of every row to the host."""
        inputs = {name: self.on_device[name] for name in (TOP_IDS, TOP_LOGITS)}
        inputs |= {"rows": self.rows, "count": np.array([count])}
        ids, logits = run_to_host(self._take.top, inputs, ["ids", "logits"])
        return ids, logits

    def part(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Outputs:
        return DeviceOutputs(self.on_device, self._copied, self.rows[rows], self._take, self._lease, self._places)

    def only(self, names: Collection[str]) -> Outputs:
        values = {name: value for name, value in self.on_device.items() if name in names}
        copied = {name: value for name, value in self._copied.items() if name in names or name in ADDED}
        return DeviceOutputs(values, copied, self.rows, self._take, self._lease, self._places)

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        finite: NDArray[np.bool_] = np.isfinite(self._copied[CHECK][self.rows])
        return finite

    @cached_property
    def lengths(self) -> NDArray[np.float64]:
        lengths: NDArray[np.float64] = self._copied[LENGTH][self.rows]
        return lengths

    @property
    def most(self) -> int:
        return int(self.on_device[TOP_IDS].shape()[1]) if TOP_IDS in self.on_device else 0

    def top(self, count: int) -> TopColumns:
        """See `Outputs`. If `count` exceeds FEW, copies the `count` largest logits of every row to the host."""
        sums = self[LOG_SUM_EXP].astype(np.float64).reshape(-1, 1)
        if count <= FEW:
            ids, logits = (self._copied[name][self.rows, :count] for name in (FEW_IDS, FEW_LOGITS))
        else:
            ids, logits = self._taken_top(count)
        return TopColumns(ids, logits.astype(np.float64), sums)


class DeviceMemory(StateMemory):
    """States on a device. The graphs gather and write them there, so only what `read` returns is copied to the host."""

    def __init__(self, shapes: Shapes, capacity: int, device: Device) -> None:
        from wane.models.slot_graphs import read_graph, write_graph

        self._values = {name: device.zeros((capacity, *shape)) for name, shape in shapes.items()}
        self._write, self._read = device.open(write_graph(shapes)), device.open(read_graph(shapes))

    def room(self, rows: int) -> Mapping[str, Array]:  # noqa: ARG002
        return {}

    def gather(self, slots: Slots, room: Mapping[str, Array] | None = None) -> Feeds:  # noqa: ARG002
        return self._feeds(slots, [name for name in self._values if name not in KEPT])

    def gather_hidden(self, slots: Slots) -> Feeds:
        return self._feeds(slots, [HIDDEN])

    def _feeds(self, slots: Slots, names: Sequence[str]) -> Feeds:
        return {SLOTS: np.asarray(slots, np.int64), **{IN_SLOTS + name: self._values[name] for name in names}}

    def read(self, slots: Slots) -> dict[str, Array]:
        names = [*self._values]
        return dict(zip(names, run_to_host(self._read, self._feeds(slots, names), names), strict=True))

    def write(self, slots: NDArray[np.intp], outputs: Mapping[str, Array], rows: Sequence[int] | None = None) -> None:
        chosen = np.arange(len(slots)) if rows is None else np.array(rows)
        results: Mapping[str, Any] = outputs
        if isinstance(outputs, DeviceOutputs):
            results, chosen = outputs.on_device, outputs.rows[chosen]
        self._write_rows(slots, {name: results[output_name(name)] for name in self._values}, chosen)

    def copy(self, slot: int, to: int) -> None:
        self._write_rows(np.array([to]), self._values, np.array([slot]))

    def _write_rows(self, slots: NDArray[np.intp], values: Mapping[str, Any], rows: NDArray[np.intp]) -> None:
        """Writes rows of `values` to slots. The values are arrays of the host or values on the device."""
        binding = self._write.io_binding()
        bind_input(binding, "rows", rows.astype(np.int64))
        bind_input(binding, "to", slots.astype(np.int64).reshape(-1, 1))
        for name, value in self._values.items():
            binding.bind_ortvalue_input(IN_SLOTS + name, value)
            binding.bind_ortvalue_output(f"written.{name}", value)
            source = values[name]
            is_on_device = isinstance(source, onnxruntime.OrtValue)
            bind_input(binding, f"next.{name}", source if is_on_device else np.asarray(source, np.float32))
        self._write.run_with_iobinding(binding)

    def close(self) -> None:
        self._values.clear()


class DeviceRunner(OnnxRunner):
    """Runs a bundle's graphs from states that stay on the device."""

    cuda_options: Mapping[str, str] = MappingProxyType({})
    """Options of onnxruntime's CUDA provider, in addition to those of `open_session`."""

    captures = True
    """Whether the runs of the graphs of CAPTURED are captured as CUDA graphs, one for each padded size of a batch. The
    CPU never captures a run."""

    def __init__(self, bundle: Bundle, device: Literal["auto", "cpu", "cuda"], threads: int) -> None:
        """See `OnnxRunner`."""
        from wane.models.slot_graphs import rows_graph, top_graph

        self._states = [tensor.name for tensor in bundle.manifest.state]
        self._numbers: dict[Role, Iterator[int]] = defaultdict(lambda: repeat(UNCAPTURED))
        super().__init__(bundle, device, threads)
        self._on = Device(self.device, threads)
        self._take = TakeSessions(self._on.open(rows_graph()), self._on.open(top_graph()))
        # the buffers that no result uses, by graph and padded size; runs of one graph do not overlap
        self._free = defaultdict[tuple[Role, int], list[Buffers]](list)

    def _open(self, bundle: Bundle, role: Role, cuda: bool, threads: int) -> onnxruntime.InferenceSession:
        graph = self._graph(bundle, role)
        # An imported graph may contain a loop, or a shape that depends on a value.
        if self.captures and role in CAPTURED and not bundle.manifest.imported:
            session = open_session(graph, cuda, threads, bundle.path, {**self.cuda_options, "enable_cuda_graph": "1"})
            if not cuda or session.get_providers()[0] == CUDA:
                self._numbers[role] = chain(range(1, MOST_CAPTURES + 1), repeat(UNCAPTURED))
                return session
            # onnxruntime refuses to capture a graph if a part of it would run on the CPU.
            logger.warning("the graph %s of %s runs without CUDA graphs", role, bundle.manifest.name)
        return open_session(graph, cuda, threads, bundle.path, self.cuda_options)

    def _graph(self, bundle: Bundle, role: Role) -> bytes:
        from wane.models.slot_graphs import from_slots

        return from_slots(bundle.graph_path(role), self._inputs(role))

    def _inputs(self, role: Role) -> Sequence[str]:
        """Returns the names of the inputs that a graph gathers from slots."""
        if role == "window":
            return []
        return [HIDDEN] if role == "head" else self._states

    def outputs(self, role: Role) -> Sequence[str]:
        return [name for name in super().outputs(role) if name not in ADDED]

    def memory(self, shapes: Shapes, capacity: int) -> StateMemory:
        return DeviceMemory(shapes, capacity, self._on)

    def run(self, role: Role, feeds: Feeds) -> Outputs:
        """See `Runner`. The state is either arrays of the host, or the result of `DeviceMemory.gather`. Batches are
        padded to a `bucket` of items, and sequences to a `length_bucket` of tokens."""
        inputs = dict(feeds)
        for name in self._inputs(role):
            if name in inputs:  # a graph reads row i of an array of the host as slot i
                inputs[IN_SLOTS + name] = inputs.pop(name)
                inputs.setdefault(SLOTS, np.arange(len(inputs[IN_SLOTS + name])))
        count = len(inputs[SLOTS] if role == "head" else inputs["tokens"])
        places = None if role in CAPTURED else inputs["tokens"].shape[1]
        for name in {"tokens", SLOTS} & inputs.keys():
            if len(inputs[name]) != count:
                raise ValueError(f"{name} has {len(inputs[name])} items, but the batch has {count}")
        # The states are arrays of the host in the checks of a bundle, and for the most probable tokens at each place of
        # a text.
        if role in CAPTURED and isinstance(inputs[IN_SLOTS + self._inputs(role)[0]], onnxruntime.OrtValue):
            return self._run_in_buffers(role, inputs, count)
        inputs |= {name: padded(inputs[name], bucket(count), fill) for name, fill in PADDING.items() if name in inputs}
        session = self._sessions[role]
        binding = session.io_binding()
        for name, value in inputs.items():
            bind_input(binding, name, value)
        names = self._outputs[role]
        for name in names:
            binding.bind_output(name, "cpu" if name in COPIED else self.device, CUDA_DEVICE)
        session.run_with_iobinding(binding)
        results = dict(zip(names, binding.get_outputs(), strict=True))
        copied = {name: results.pop(name).numpy() for name in names if name in COPIED}
        return DeviceOutputs(results, copied, np.arange(count), self._take, places=places)

    def _run_in_buffers(self, role: Role, inputs: Mapping[str, Any], count: int) -> Outputs:
        """Runs a graph of CAPTURED with padded inputs, in buffers that no earlier result uses."""
        size, session = bucket(count), self._sessions[role]
        free = self._free[role, size]
        buffers = free.pop() if free else Buffers(session, size, self._on, self._numbers[role])
        buffers.run(session, inputs)
        outputs = buffers.outputs
        copied = {name: value.numpy() for name, value in outputs.items() if name in COPIED}
        on_device = {name: value for name, value in outputs.items() if name not in COPIED}
        return DeviceOutputs(on_device, copied, np.arange(count), self._take, Lease(buffers, free))

    def close(self) -> None:
        super().close()
        self._free.clear()  # buffers that are in use are freed with their results


def open_runner(bundle: Bundle, device: Literal["auto", "cpu", "cuda"], threads: int) -> OnnxRunner:
    """Returns the fastest runner of a bundle: on CUDA a `DeviceRunner`, and on the CPU an `OnnxRunner`.

    See `OnnxRunner` for the arguments. Raises DeviceError.
    """
    if device != "cpu" and CUDA in onnxruntime.get_available_providers():
        if find_spec("onnx") is None:
            raise DeviceError("states on a GPU need the package onnx: install it, or choose cpu")
        runner = DeviceRunner(bundle, device, threads)
        if runner.device == "cuda":
            return runner
        runner.close()
        device = "cpu"
    return OnnxRunner(bundle, device, threads)
