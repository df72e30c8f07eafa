"""The protocol of a runner, which runs a model's graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from wane.models.manifest import Role

Array = NDArray[Any]
NEXT = "next."  # a graph's output `next.layers.0.h` is the new value of its input `layers.0.h`
RADIUS = "radius"
HIDDENS = "hiddens"
TOP_LOGITS, TOP_IDS, LOG_SUM_EXP = "top_logits", "top_ids", "log_sum_exp"
STREAM = "stream"
ERROR = "error."  # a graph's output `error.layers.0.s` is the error of the state `layers.0.s`


class DeviceError(Exception):
    """The requested device is not available. The message is for the operator, and the process exits."""


class Runner(Protocol):
    """Runs one model's graphs. Blocks: call it on the event loop's thread only for runs known to be quick.

    Arrays are batch-major; tokens, targets, lengths and top_ids are int64, all others float32. B is the batch, T the
    time, V the vocabulary, H the width of the output layer's input. `<state>` is one array (B, *shape) for every tensor
    of the manifest, `<next>` the next states, named `next.<name>`.

        step     tokens (B), <state>                 -> logits (B, V), <top>, hidden (B, H), <next>
        window   tokens (B, T), lengths (B)          -> logits (B, V), <top>, hidden (B, H), <next>, <bound>
        advance  tokens (B, T), lengths (B), <state> -> hidden (B, H), <next>
        scan     like advance, with targets (B, T)   -> logprobs (B, T), hiddens (B, T, H), hidden (B, H), <next>
        head     hidden (B, H)                       -> logits (B, V), <top>

    `<top>`: `top_logits` (B, K), the largest in falling order, `top_ids` (B, K), the smaller first among equals, and
    `log_sum_exp` (B); graphs of an earlier export do not have it.

    `hiddens` is `hidden` after every token; bundles of version 1 do not have it.

    Positions at or over an item's length are padding and change nothing; 1 <= length <= T. Some models have a
    `<bound>`: `radius` (B) bounds, in exact arithmetic, the 2-norm distance of `hidden` from that of any run that ends
    in the same tokens, from any reachable state; infinite without a bound. Gated models may also have `stream` (B, H),
    the value that the first layer's mixing matrix is added to, and for each layer's state `error.<name>`, how far each
    of its units may be from that run's.
    """

    @property
    def device(self) -> str:
        """`cpu` or `cuda`: the device that the graphs run on."""
        ...

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs one graph and returns its outputs by name."""
        ...

    def outputs(self, role: Role) -> Sequence[str]:
        """Returns the names of a graph's outputs."""
        ...

    def close(self) -> None:
        """Frees the graphs. `run` must not be called afterwards."""
        ...
