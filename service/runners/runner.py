"""What the engine asks of whatever runs a model's graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from wane.models.manifest import Role

Array = NDArray[Any]
NEXT = "next."  # a graph's output `next.layers.0.h` is the new value of its input `layers.0.h`
RADIUS = "radius"
TOP_LOGITS, TOP_IDS, LOG_SUM_EXP = "top_logits", "top_ids", "log_sum_exp"
STREAM = "stream"
ERROR = "error."  # a graph's output `error.layers.0.s` is of the state `layers.0.s`


class DeviceError(Exception):
    """The device asked for is not there; the message is for the operator, and the process ends."""


class Runner(Protocol):
    """Runs one model's graphs. Blocks; on the event loop's thread only what is known to be quick.

    Arrays are batch-major; tokens, targets, lengths and top_ids are int64, everything else float32. B is the batch, T
    the time, V the vocabulary, H the width of the output layer's input. `<state>` is one array (B, *shape) for every
    tensor of the manifest, `<next>` the same under the names `next.<name>`.

        step     tokens (B), <state>                 -> logits (B, V), <top>, hidden (B, H), <next>
        window   tokens (B, T), lengths (B)          -> logits (B, V), <top>, hidden (B, H), <next>, <bound>
        advance  tokens (B, T), lengths (B), <state> -> hidden (B, H), <next>
        scan     as advance, and targets (B, T)      -> logprobs (B, T), hidden (B, H), <next>
        head     hidden (B, H)                       -> logits (B, V), <top>

    `<top>`: `top_logits` (B, K), the largest in falling order, `top_ids` (B, K), the smaller first among equals, and
    `log_sum_exp` (B); graphs of an earlier export do not have it.

    Positions at or over an item's length are padding and change nothing; 1 <= length <= T. Not every model has a
    `<bound>`: `radius` (B) bounds, in exact arithmetic, the 2-norm distance of `hidden` from that of any run, from
    whatever state a sequence can lead to, that ends in the same tokens; infinite where it knows none. Gated models may
    have beside it `stream` (B, H), what the first layer's mixing matrix is added to, and for each layer's state
    `error.<name>`, how far each of its units may be from that run's.
    """

    @property
    def device(self) -> str:
        """`cpu` or `cuda`: where the graphs really run."""
        ...

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs of one graph, by name."""
        ...

    def outputs(self, role: Role) -> Sequence[str]:
        """The names of a graph's outputs."""
        ...

    def close(self) -> None:
        """Gives back what the graphs take: there are no runs any more."""
        ...
