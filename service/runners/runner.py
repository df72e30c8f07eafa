"""The protocol of a runner, which runs a model's graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from wane.models.manifest import Role

Array = NDArray[Any]
NEXT = "next."  # prefix of outputs: a graph's output `next.layers.0.h` is the new value of its input `layers.0.h`
RADIUS = "radius"
HIDDENS = "hiddens"
TOP_LOGITS, TOP_IDS, LOG_SUM_EXP = "top_logits", "top_ids", "log_sum_exp"
STREAM = "stream"
ERROR = "error."  # prefix of outputs: a graph's output `error.layers.0.s` is the error bound of the state `layers.0.s`


class DeviceError(Exception):
    """The requested device is not available. The message is for the operator. The process exits after this error."""


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

    `hiddens` is `hidden` after every token. Bundles of schema 3 do not have it.

    Lengths are 1 <= length <= T. Positions from an item's length on are padding and have no effect. `<bound>` stands
    for outputs of some models. `radius` (B) is a bound of the 2-norm distance between `hidden` and the hidden state of
    any run that starts in a reachable state and ends in the same tokens, in exact arithmetic. `radius` is infinite if
    there is no bound. Gated models may also have `stream` (B, H), the value to which the output of the first layer's
    mixing matrix is added, and one `error.<name>` per state. `error.<name>` is a bound, for each unit, of the distance
    between `next.<name>` and the state of such a run.
    """

    @property
    def device(self) -> str:
        """The device that the graphs run on, `cpu` or `cuda`."""
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
