"""The protocol of a runner, which runs a model's graphs, and the memory of the states that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wane.models.manifest import Role

Array = NDArray[Any]

Feeds = Mapping[str, Any]
"""The inputs of a run by name. A value is an array, or a value on the runner's device from `StateMemory.gather`."""

HIDDEN = "hidden"
NEXT = "next."  # prefix of outputs: a graph's output `next.layers.0.h` is the new value of its input `layers.0.h`
RADIUS = "radius"
NORMS = "norms"
HIDDENS = "hiddens"
EVERY_NORMS = "every_norms"
TOP_LOGITS, TOP_IDS, LOG_SUM_EXP = "top_logits", "top_ids", "log_sum_exp"
STREAM = "stream"
ERROR = "error."  # prefix of outputs: a graph's output `error.layers.0.s` is the error bound of the state `layers.0.s`


Slots = Sequence[int] | range | NDArray[np.intp]
Shapes = Mapping[str, tuple[int, ...]]
"""The shape of one state by tensor name. The last entries are `norms`, if the graphs output it, and `hidden`, the
output layer's input."""

KEPT = (NORMS, HIDDEN)
"""Outputs that are stored with every state. They are not inputs of a run from this state."""


class DeviceError(Exception):
    """The requested device is not available. The message is for the operator. The process exits after this error."""


def output_name(name: str) -> str:
    """Returns the name of the output of a run that is written to the array `name`."""
    return name if name in KEPT else NEXT + name


class StateMemory:
    """The values of all slots, in numpy arrays: for each state tensor an array with a row for each state. A run copies
    the states to buffers and back. All values are float32, and initially zero.

    The methods may run on two threads at the same time, for different slots. `DeviceMemory` has the same methods.
    """

    def __init__(self, shapes: Shapes, capacity: int) -> None:
        # The operating system commits zeroed memory only when it is first written. A server with few states therefore
        # uses only a small part of its memory budget.
        self.arrays: dict[str, Array] = {
            name: np.zeros((capacity, *shape), np.float32) for name, shape in shapes.items()
        }
        self._names = [name for name in shapes if name not in KEPT]
        self._outputs = {output_name(name): name for name in shapes}

    def room(self, rows: int) -> Mapping[str, Array]:
        """Returns buffers for `rows` states, for `gather`."""
        return {name: np.empty((rows, *self.arrays[name].shape[1:]), np.float32) for name in self._names}

    def gather(self, slots: Slots, room: Mapping[str, Array] | None = None) -> Feeds:
        """Returns the inputs of a run that starts from the states in B slots. The inputs are valid until the next use
        of `room`. Copying into `room` is faster, because allocating memory takes longer than copying."""
        if room is None:
            return self._take(slots, self._names)
        rows = np.asarray(slots, np.intp)
        states = {name: room[name][: len(rows)] for name in self._names}
        for name, values in states.items():
            # `take` with `out` makes an additional copy in all modes except "clip" and "wrap".
            self.arrays[name].take(rows, 0, values, "clip")
        return states

    def gather_hidden(self, slots: Slots) -> Feeds:
        """Returns the inputs of a run of the output layer for the states in B slots."""
        return self._take(slots, [name for name in KEPT if name in self.arrays])

    def read(self, slots: Slots) -> dict[str, Array]:
        """Returns copies of the values in B slots on the host: for each tensor's name and `hidden`, (B, *shape)."""
        return self._take(slots, self.arrays)

    def _take(self, slots: Slots, names: Iterable[str]) -> dict[str, Array]:
        rows = np.asarray(slots, np.intp)
        return {name: self.arrays[name].take(rows, 0) for name in names}

    def write(self, slots: NDArray[np.intp], outputs: Mapping[str, Array], rows: Sequence[int] | None = None) -> None:
        """Writes the outputs `next.<name>` and `hidden` of a run to slots. rows: the rows of the outputs, one for each
        slot. None: all rows."""
        for output, name in self._outputs.items():
            self.arrays[name][slots] = outputs[output] if rows is None else outputs[output][rows]

    def copy(self, slot: int, to: int) -> None:
        for values in self.arrays.values():
            values[to] = values[slot]

    def close(self) -> None:
        self.arrays.clear()


MakeMemory = Callable[[Shapes, int], StateMemory]
"""Returns the memory of states with these shapes. The second argument is the number of slots."""


class Runner(Protocol):
    """Runs one model's graphs. `run` blocks its thread, so only short runs may be executed on the event loop's thread.

    Arrays are batch-major. tokens, targets, lengths and top_ids are int64, and all other arrays are float32. B is the
    batch size, T the padded length, V the vocabulary's size and H the width of the output layer's input. `<state>`
    stands for one array (B, *shape) per state tensor of the manifest, and `<next>` for the next states, named
    `next.<name>`.

        step     tokens (B), <state>                 -> logits (B, V), <top>, hidden (B, H), <next>
        window   tokens (B, T), lengths (B)          -> logits (B, V), <top>, hidden (B, H), <next>, <bound>
        advance  tokens (B, T), lengths (B), <state> -> hidden (B, H), <next>
        scan     like advance, with targets (B, T)   -> logprobs (B, T), hiddens (B, T, H), hidden (B, H), <next>
        head     hidden (B, H)                       -> logits (B, V), <top>

    `<top>` stands for `top_logits` (B, K), the largest logits in descending order, `top_ids` (B, K), their token ids,
    and `log_sum_exp` (B). Equal logits are ordered by ascending id. Graphs of earlier exports do not have these
    outputs.

    `every_norms` (B, T, columns) is `norms` after every token: only `scan` outputs it, and only beside `norms`.
    `hiddens` is `hidden` after every token. The graphs of bundles with the manifest's schema 3 do not output it.

    Lengths are 1 <= length <= T. Positions from an item's length on are padding and have no effect. `<bound>` stands
    for outputs that only some models have. `radius` (B) is a bound of the 2-norm distance between `hidden` and the
    `hidden` of any run that starts in a reachable state and ends in the same tokens: of a float32 run if the graphs
    output `norms`, otherwise in exact arithmetic. `norms` (B, columns) is an output of all graphs except `head`: see
    `Readout` in `models/manifest.py`. `radius` is infinite if there is no bound. Gated models may also have `stream`
    (B, H), the value to which the output of the first layer's mixing matrix is added, and one `error.<name>` per state.
    `error.<name>` is a bound, for each unit, of the distance between `next.<name>` and the state of such a run.
    """

    device: str
    """The device that the graphs run on, `cpu` or `cuda`."""

    def run(self, role: Role, feeds: Feeds) -> Mapping[str, Array]:
        """Runs one graph and returns its outputs by name. If the outputs are on a device, reading an output copies it
        to the host. `feeds` may contain the result of `StateMemory.gather` of this runner's memory."""
        ...

    def memory(self, shapes: Shapes, capacity: int) -> StateMemory:
        """See `MakeMemory`. The memory is on the runner's device."""
        ...

    def outputs(self, role: Role) -> Sequence[str]:
        """Returns the names of a graph's outputs."""
        ...

    @property
    def top(self) -> int:
        """The number K of largest logits that `step` outputs for each row; 0 if it does not output them."""
        ...

    def close(self) -> None:
        """Frees the graphs. `run` must not be called afterwards."""
        ...
