"""What a bundle says of itself: `manifest.json`, as pydantic models.

The manifest is data that other machines wrote, so every field is checked and an unknown field is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from wane.models.cell_registry import CELLS, Cell

SCHEMA_VERSION = 3

LARGEST_WINDOW = 65_536
"""Tokens: a window is one input of a graph, held whole in memory."""

Role = Literal["step", "window", "advance", "scan", "head"]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

VocabularyKind = Literal["bpe", "words", "events"]

Precision = Literal["float32", "int8"]
"""What graphs multiply weights in. The weights in the file are float32 in any case."""


class Frozen(BaseModel):
    """A record that refuses unknown fields and numbers that are not finite, and cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StateTensor(Frozen):
    """One tensor of a session's state; its initial value is zero."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32"] = "float32"


class Front(Frozen):
    """Causal-convolution blocks between the embedding and the first layer, each

        x = x + feed_forward_out(relu(feed_forward_in(convolution(LayerNorm(x)))))

    with a depthwise convolution over the last `kernel_size` tokens, and `feed_forward` units between.
    Their memory is finite: what they put out depends on the last `reach + 1` tokens and on nothing before.
    """

    blocks: int = Field(ge=1, description="blocks, one above the other")
    kernel_size: int = Field(ge=2, le=64, description="tokens that a convolution sees")
    feed_forward: int = Field(ge=1, description="width of the feed-forward part")

    @property
    def reach(self) -> int:
        """How many tokens before the current one they see."""
        return self.blocks * (self.kernel_size - 1)


class Architecture(Frozen):
    """The function that the weights parametrise, completely: nothing else is needed to run it.

    `block` is "plain" (each cell reads the output of the one below) or "residual":
    `x = x + mix(cell(LayerNorm(x)))`, mix an (H, units) matrix, then, where `feed_forward` is its width and not 0,
    `x = x + feed_forward(LayerNorm(x))`, and a LayerNorm on top.
    `front` and `units` are for residual blocks: what stands below the first layer, and how many units each cell has
    (null: as many as `hidden`).
    `norm_epsilon` is what every LayerNorm adds to the variance: no LayerNorm changes by more than
    `max|gain| / sqrt(norm_epsilon)` times what its input does.
    `gate_caps` (gated only), by layer, are the c of `f = c * sigmoid(...)`, in float32: no forget gate of the layer
    ever exceeds its own. None at all are caps of 1.
    """

    cell: Cell
    vocabulary_size: int = Field(ge=2)
    embedding: int = Field(ge=1)
    hidden: int = Field(ge=1)
    layers: int = Field(ge=1)
    block: Literal["plain", "residual"] = "plain"
    feed_forward: int = Field(default=0, ge=0)
    tied: bool = True
    front: Front | None = None
    units: int | None = Field(default=None, ge=1)
    norm_epsilon: float = Field(default=1e-5, gt=0, le=1)
    gate_caps: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        if self.tied and self.embedding != self.hidden:
            raise ValueError(f"tied weights need embedding == hidden, not {self.embedding} and {self.hidden}")
        if self.block == "residual" and self.embedding != self.hidden:
            raise ValueError(f"residual blocks need embedding == hidden, not {self.embedding} and {self.hidden}")
        if self.block == "plain" and self.feed_forward:
            raise ValueError("feed_forward needs block = 'residual'")
        if self.block == "plain" and self.norm_epsilon != 1e-5:
            raise ValueError("norm_epsilon needs block = 'residual'")
        if self.block == "plain" and (self.front is not None or self.units is not None):
            raise ValueError("front and units need block = 'residual'")
        if self.gate_caps and not CELLS[self.cell].input_gated:
            raise ValueError(f"gate_caps are for gated cells, not for {self.cell}")
        if self.gate_caps and len(self.gate_caps) != self.layers:
            raise ValueError(f"{len(self.gate_caps)} gate_caps for {self.layers} layers")
        return self

    def gate_cap(self, layer: int) -> float:
        """The cap of one layer's forget gates: what multiplies them, which is the manifest's number in float32."""
        return float(np.float32(self.gate_caps[layer])) if self.gate_caps else 1.0

    @property
    def cell_units(self) -> int:
        """How many units each cell has."""
        return self.hidden if self.units is None else self.units

    def cell_inputs(self, layer: int) -> int:
        """How many features the cell of a layer reads."""
        return self.hidden if layer else self.embedding

    def layer_states(self, layer: int) -> tuple[str, ...]:
        """The names of one layer's state tensors: `layers.0.h`, `layers.0.c`."""
        return tuple(f"layers.{layer}.{name}" for name in CELLS[self.cell].states)

    def front_tensors(self) -> tuple[StateTensor, ...]:
        """`front.0.inputs`, ...: the latest inputs of each block's convolution, normalised, the oldest first."""
        if self.front is None:
            return ()
        shape = (self.front.kernel_size - 1, self.hidden)
        return tuple(StateTensor(name=f"front.{block}.inputs", shape=shape) for block in range(self.front.blocks))

    def state_tensors(self) -> tuple[StateTensor, ...]:
        """The state of one session, bottom to top: the front's, then `layers.0.h`, `layers.0.c`, `layers.1.h`, ..."""
        return self.front_tensors() + tuple(
            StateTensor(name=name, shape=(self.cell_units,))
            for layer in range(self.layers)
            for name in self.layer_states(layer)
        )


class VocabularyInfo(Frozen):
    """Which tokenizer the model was trained with."""

    kind: VocabularyKind
    size: int = Field(ge=2)
    eos_id: int = Field(ge=0)
    sha256: Sha256


class Perplexity(Frozen):
    """Perplexity of one split in one mode. Per word counts one `<eos>` a line; null for event models."""

    per_token: float = Field(gt=0)
    per_word: float | None = Field(default=None, gt=0)


class WindowPerplexity(Frozen):
    """Perplexity from exactly the last k tokens, at positions spread over a split, beside recurrent at the same."""

    positions: int = Field(ge=0)
    recurrent: Perplexity
    by_k: dict[Positive, Perplexity]


class Quality(Frozen):
    """What training reached, by split: recurrent over all of it, and as a window at sampled positions. A claim.

    `window_within_half_percent`: the smallest evaluated k from which on the validation perplexity per token of the
    window is within 0.5 % of recurrent; null if none is.
    """

    tokens: dict[str, NotNegative]
    words: dict[str, NotNegative]
    recurrent: dict[str, Perplexity]
    window: dict[str, WindowPerplexity]
    window_within_half_percent: Positive | None


class Condition(Frozen):
    """One sufficient condition that was tried on a layer; `factor` is null where it does not apply."""

    rule: str
    norm: str
    factor: float | None = Field(ge=0)


class Contraction(Frozen):
    """One layer's contraction factor in its state, with the rule that bounds it, the best of `conditions`.

    `weights`: what the norm divides each state tensor by, in the state's order (`p` and `q` in the norm's text);
    empty where the state is one tensor, and where the norm weighs each unit by itself: those weights are recomputed.
    `input_gain`: how far the layer's state moves, in the 2-norm, for each unit that its input moves, within one step.
    `reach`: 2-norm bound of what the layer puts out, from the zero state: its error right after a cut.
    Both are null where nothing bounds them.
    """

    layer: NotNegative
    factor: float = Field(ge=0)
    rule: str
    norm: str
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    conditions: tuple[Condition, ...] = ()
    input_gain: float | None = Field(default=None, ge=0)
    reach: float | None = Field(default=None, ge=0)


class StateError(Frozen):
    """A bound of an error of one state tensor: `box`, of its largest unit; `ball`, of its 2-norm."""

    box: float = Field(ge=0)
    ball: float = Field(ge=0)


class Rounding(Frozen):
    """How far a run of the graphs in `dtype` can be from exact arithmetic over the same tokens.

    The error of one step is measured (`step_error`): the `step` graph against the float64 oracle, both from the state
    that the graph left, over `steps` steps. Those steps include every token of the vocabulary, tokens held for
    4 / (1 - factor) steps (at most 4,096) after two different pasts, cycles of two and three tokens, the tokens that
    forget least, and sequences chosen to make the state large.
    `step`: by state tensor of the layers, the largest error of one step, times `safety`. `output`: the same for what
    is read off a state: the 2-norm at `hidden`, and the spread of the logits' errors over `head_diameter`.

    `states`, `carried`: the errors of a whole run, of any length, by state tensor and in the 2-norm at `hidden` (with
    `output` in it). `sequences` says for which token sequences the errors of steps were added up:

    - all: the theorem that bounds a window's error carries one step's error through the recurrence, whatever the
      tokens. Both are recomputed from `step` when a bundle is loaded. This is so in plain networks.
    - probed: the theorem for one request's own tokens carries each step's error along each of the measured sequences;
      the largest result, times `safety`, is kept. This is so in residual networks where the bound for all tokens would
      leave no room for a certificate: the Lipschitz constants of LayerNorms are far above what is ever seen. A sequence
      that was not measured, whose state a LayerNorm shortens to almost nothing, may be further off.

    `worst_case`: what two runs can be apart by rounding at most, a priori, to first order in the unit roundoff and
    given the accuracy of exp and tanh that `models/certificate/rounding.py` states; null over a front.
    """

    dtype: Literal["float32"] = "float32"
    step_error: Literal["measured"] = "measured"
    sequences: Literal["all", "probed"]
    steps: Positive
    safety: float = Field(ge=1)
    step: dict[str, StateError]
    output: float = Field(ge=0)
    states: dict[str, StateError]
    carried: float = Field(ge=0)
    worst_case: float | None = Field(default=None, ge=0)

    @property
    def between_runs(self) -> float:
        """How far `hidden` of two runs over the same tokens can be apart by rounding: each is `carried` from exact."""
        return 2 * self.carried


class Certificate(Frozen):
    """How far an answer from the last k tokens can be from the never-interrupted one, whatever the tokens.

    `contractive`: every layer has a factor < 1, by which its states come closer at every token. Then there is a curve,
    for k = 1 to the largest window: `state_error` (e_k) bounds the 2-norm distance of `hidden` in exact arithmetic,
    `error_bound` (epsilon(k)) the total variation at temperature 1, with the rounding of two runs added to e_k. Both
    hold for k and for every longer window, so they never rise. `head_diameter` is D, the largest 2-norm distance of
    two rows of the output matrix: epsilon = tanh(D (e_k + rounding) / 4).
    `certified`: epsilon falls to 1e-3 within the largest window; if not, `reason` says why, for people.

    It is recomputed from the float32 weights when the bundle is loaded, never believed, but for what was measured of
    `rounding` (`step`, `output`; if `sequences` is probed, `states` and `carried`), of which a sample is measured
    again. `rounding` is null unless the model is contractive. `bit_identical` is not in a manifest: it is found on this
    machine when the bundle is loaded, and says whether the graphs give the same bits for the same tokens, step by step,
    as a window, in pieces, alone and in the largest batch.
    """

    contractive: bool
    certified: bool = False
    reason: str | None = None
    layers: tuple[Contraction, ...]
    state_error: tuple[Annotated[float, Field(ge=0)], ...] = ()
    error_bound: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    head_diameter: float = Field(default=0.0, ge=0)
    rounding: Rounding | None = None
    bit_identical: bool = Field(default=True, exclude=True)

    def state_error_at(self, k: int) -> float | None:
        """e_k; beyond the curve its last value, which holds for every longer window. None without a curve."""
        return self._at(self.state_error, k)

    def error_bound_at(self, k: int) -> float | None:
        """epsilon(k); beyond the curve its last value. None without a curve."""
        return self._at(self.error_bound, k)

    def smallest_window(self, epsilon: float) -> int | None:
        """k(epsilon): the smallest k with epsilon(j) <= epsilon for all j >= k. None if no window reaches it."""
        return next((k for k, bound in enumerate(self.error_bound, start=1) if bound <= epsilon), None)

    @staticmethod
    def _at(curve: tuple[float, ...], k: int) -> float | None:
        if k < 1:
            raise ValueError(f"a window has at least one token, not {k}")
        return curve[min(k, len(curve)) - 1] if curve else None


class Provenance(Frozen):
    """Where the weights came from, as claimed by those who trained them; nothing here can be checked at load."""

    created: str
    command: str
    config: dict[str, object]
    seed: int
    steps: NotNegative
    best_step: NotNegative
    git_commit: str | None
    data: dict[str, str]
    versions: dict[str, str]
    hardware: str
    train_wall_s: float = Field(ge=0)
    attribution: str | None = None


class Manifest(Frozen):
    """The whole of `manifest.json`."""

    schema_version: int = Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    version: str = Field(pattern=r"^[0-9]{1,9}$")
    description: str = ""
    architecture: Architecture
    vocabulary: VocabularyInfo
    state: tuple[StateTensor, ...]
    window: int = Field(ge=1, description="the model's own k: what window mode runs when none is asked for")
    max_window: int = Field(ge=1, le=LARGEST_WINDOW, description="the largest k that may be asked for")
    opset: Positive
    precision: Precision = "float32"
    graphs: dict[Role, str]
    weights: str
    tokenizer: str
    files: dict[str, Sha256] = Field(description="SHA-256 of every file of the bundle but the manifest")
    certificate: Certificate
    quality: Quality | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if self.state != self.architecture.state_tensors():
            raise ValueError("state does not match architecture")
        if self.window > self.max_window:
            raise ValueError(f"window {self.window} is larger than max_window {self.max_window}")
        if (rounding := self.certificate.rounding) is not None:
            names = {tensor.name for tensor in self.state if tensor.name.startswith("layers.")}
            for field in ("step", "states"):
                if set(getattr(rounding, field)) != names:
                    raise ValueError(f"certificate.rounding.{field} must have one entry for each of {sorted(names)}")
        if self.vocabulary.size != self.architecture.vocabulary_size:
            raise ValueError(
                f"vocabulary.size {self.vocabulary.size} is not architecture.vocabulary_size "
                f"{self.architecture.vocabulary_size}"
            )
        return self
