"""A bundle's `manifest.json`, as pydantic models.

The manifest is untrusted data, so every field is checked and an unknown field is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from wane.models.cell_registry import CELLS, Cell

SCHEMA_VERSION = 4
"""The schema that this Wane writes."""

OLDEST_SCHEMA = 3
"""The oldest schema that this Wane reads. Schema 4 added `unknown`, `start` and the scan's output `hiddens`."""

LARGEST_WINDOW = 65_536
"""Tokens. A window is one input of a graph and is held in memory."""

REWOUND_TOKENS = 512
"""The tokens by which a session can be rewound without a loss to its cache."""

LARGEST_CACHE = 8_192
"""Tokens of a cache. Each resident session holds them."""

Role = Literal["step", "window", "advance", "scan", "head"]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
NotNegativeShare = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

VocabularyKind = Literal["bpe", "words", "events"]

Unknown = Literal["refuse", "skip", "token"]
"""What the server does with a word or an event that the vocabulary lacks: an error, no step, or a step of `<unk>`."""

Start = Literal["token", "zero"]
"""How a sequence starts: `<eos>` is fed to the zero state, or the first token is."""

Precision = Literal["float32", "int8"]
"""The number format in which graphs multiply by weights. The weights in the file are always float32."""


class Frozen(BaseModel):
    """An immutable record that refuses unknown fields and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StateTensor(Frozen):
    """One tensor of a session's state; its initial value is zero."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32"] = "float32"


class Front(Frozen):
    """Causal-convolution blocks between the embedding and the first layer, each

        x = x + feed_forward_out(relu(feed_forward_in(convolution(LayerNorm(x)))))

    with a depthwise convolution over the last `kernel_size` tokens and `feed_forward` inner units.
    Their memory is finite: their output depends only on the last `reach + 1` tokens.
    """

    blocks: int = Field(ge=1, description="blocks, one above the other")
    kernel_size: int = Field(ge=2, le=64, description="tokens that a convolution sees")
    feed_forward: int = Field(ge=1, description="width of the feed-forward part")

    @property
    def reach(self) -> int:
        """The number of tokens before the current one that the blocks see."""
        return self.blocks * (self.kernel_size - 1)


class Architecture(Frozen):
    """The complete function that the weights parametrise.

    `block` is "plain" (each cell reads the output of the one below) or "residual":
    `x = x + mix(cell(LayerNorm(x)))`, mix an (H, units) matrix, then, if `feed_forward`, its width, is not 0,
    `x = x + feed_forward(LayerNorm(x))`, and a LayerNorm on top.
    `front` and `units` are for residual blocks: the blocks below the first layer, and the number of units of each
    cell (null: `hidden`).
    `norm_epsilon` is added to the variance by every LayerNorm: a change of its input changes its output by at most
    `max|gain| / sqrt(norm_epsilon)` times as much.
    `gate_caps` (gated only), by layer, are the c of `f = c * sigmoid(...)`, in float32: no forget gate of a layer
    exceeds its cap. An empty tuple means caps of 1.
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
        """Returns the cap of one layer's forget gates: the manifest's number in float32, which multiplies them."""
        return float(np.float32(self.gate_caps[layer])) if self.gate_caps else 1.0

    @property
    def cell_units(self) -> int:
        """The number of units of each cell."""
        return self.hidden if self.units is None else self.units

    def cell_inputs(self, layer: int) -> int:
        """Returns the number of input features of a layer's cell."""
        return self.hidden if layer else self.embedding

    def layer_states(self, layer: int) -> tuple[str, ...]:
        """Returns the names of one layer's state tensors: `layers.0.h`, `layers.0.c`."""
        return tuple(f"layers.{layer}.{name}" for name in CELLS[self.cell].states)

    def front_tensors(self) -> tuple[StateTensor, ...]:
        """Returns `front.0.inputs`, ...: the latest normalised inputs of each block's convolution, oldest first."""
        if self.front is None:
            return ()
        shape = (self.front.kernel_size - 1, self.hidden)
        return tuple(StateTensor(name=f"front.{block}.inputs", shape=shape) for block in range(self.front.blocks))

    def state_tensors(self) -> tuple[StateTensor, ...]:
        """Returns a session's state, bottom to top: the front's, then `layers.0.h`, `layers.0.c`, `layers.1.h`, ..."""
        return self.front_tensors() + tuple(
            StateTensor(name=name, shape=(self.cell_units,))
            for layer in range(self.layers)
            for name in self.layer_states(layer)
        )


class VocabularyInfo(Frozen):
    """The tokenizer that the model was trained with."""

    kind: VocabularyKind
    size: int = Field(ge=2)
    eos_id: int = Field(ge=0)
    sha256: Sha256


class Perplexity(Frozen):
    """Perplexity of one split in one mode. `per_word` counts one `<eos>` per line; null for event models."""

    per_token: float = Field(gt=0)
    per_word: float | None = Field(default=None, gt=0)


class WindowPerplexity(Frozen):
    """Perplexity from exactly the last k tokens, at positions spread over a split; `recurrent`: at the same ones."""

    positions: int = Field(ge=0)
    recurrent: Perplexity
    by_k: dict[Positive, Perplexity]


class Quality(Frozen):
    """The claimed perplexity by split: recurrent over the whole split, and as a window at sampled positions.

    `window_within_half_percent`: the smallest evaluated k from which on the validation perplexity per token of the
    window is within 0.5 % of recurrent; null if none is. All are of the mixture with the cache, if there is one;
    `without_cache`: those of the network alone, recurrent over the whole split.
    """

    tokens: dict[str, NotNegative]
    words: dict[str, NotNegative]
    recurrent: dict[str, Perplexity]
    window: dict[str, WindowPerplexity]
    window_within_half_percent: Positive | None
    without_cache: dict[str, Perplexity] | None = None


class Condition(Frozen):
    """One sufficient condition that was tried on a layer; `factor` is null if it does not apply."""

    rule: str
    norm: str
    factor: float | None = Field(ge=0)


class Contraction(Frozen):
    """One layer's contraction factor in its state, with the rule that bounds it, the best of `conditions`.

    `weights`: the divisors of the state tensors in the norm, in the state's order (`p` and `q` in the norm's text);
    empty if the state is one tensor or if the norm has a weight for each unit: those weights are recomputed.
    `input_gain`: bound of the change of the layer's state in one step, in the 2-norm, per unit change of its input.
    `reach`: 2-norm bound of the layer's output from the zero state, which is its error right after a cut.
    Both are null if unbounded.
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
    """A bound of the error of one state tensor: `box` bounds its largest unit, `ball` its 2-norm."""

    box: float = Field(ge=0)
    ball: float = Field(ge=0)


class Rounding(Frozen):
    """Bounds of the distance between a run of the graphs in `dtype` and exact arithmetic over the same tokens.

    The error of one step is measured (`step_error`): the `step` graph against the float64 oracle, both from the
    graph's last state, over `steps` steps. Those steps include every token of the vocabulary, tokens repeated for
    4 / (1 - factor) steps (at most 4,096) after two different pasts, cycles of two and three tokens, the tokens that
    forget least, and sequences chosen to make the state large.
    `step`: by state tensor of the layers, the largest error of one step, times `safety`. `output`: the same for the
    output: the 2-norm at `hidden`, and the spread of the logits' errors over `head_diameter`.

    `states`, `carried`: the errors of a whole run of any length, by state tensor and in the 2-norm at `hidden`
    (`output` included). `sequences`: the token sequences for which the errors of steps were accumulated:

    - all: the theorem that bounds a window's error carries one step's error through the recurrence, for any tokens.
      Both are recomputed from `step` when a bundle is loaded. Plain networks use this.
    - probed: the theorem for one request's tokens carries each step's error along each of the measured sequences;
      the largest result, times `safety`, is kept. Residual networks use this if the bound for all tokens is too large
      for a certificate: the Lipschitz constants of LayerNorms are far above any observed change. The error of an
      unmeasured sequence whose state a LayerNorm shortens to almost nothing may be larger.

    `worst_case`: an a priori bound of the distance of two runs by rounding, to first order in the unit roundoff and
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
        """Bound of the rounding distance of `hidden` in two runs over the same tokens; each is `carried` from exact."""
        return 2 * self.carried


class Certificate(Frozen):
    """Bounds, for all tokens, of the distance between a window's prediction and the never-interrupted run's.

    `contractive`: every layer has a factor < 1, by which its states come closer at every token. Then there is a curve,
    for k = 1 to the largest window: `state_error` (e_k) bounds the 2-norm distance of `hidden` in exact arithmetic,
    `error_bound` (epsilon(k)) the total variation at temperature 1, with two runs' rounding added to e_k. Both
    hold for k and for every longer window, so they never rise. `head_diameter` is D, the largest 2-norm distance of
    two rows of the output matrix: epsilon = tanh(D (e_k + rounding) / 4).
    `certified`: epsilon falls to 1e-3 within the largest window; if not, `reason` explains why.

    The certificate is recomputed from the float32 weights when the bundle is loaded. Only the measured part of
    `rounding` (`step`, `output`; if `sequences` is probed, `states` and `carried`) is not recomputed; a sample of it is
    measured again. `rounding` is null unless the model is contractive. `bit_identical` is not in a manifest: it is
    measured when the bundle is loaded. It is true if the graphs give the same bits for the same tokens, step by step,
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
        """Returns e_k; beyond the curve its last value, which holds for every longer window. None without a curve."""
        return self._at(self.state_error, k)

    def error_bound_at(self, k: int) -> float | None:
        """Returns epsilon(k), or beyond the curve its last value. None without a curve."""
        return self._at(self.error_bound, k)

    def smallest_window(self, epsilon: float) -> int | None:
        """Returns the smallest k with epsilon(j) <= epsilon for all j >= k. None if no window reaches it."""
        return next((k for k, bound in enumerate(self.error_bound, start=1) if bound <= epsilon), None)

    @staticmethod
    def _at(curve: tuple[float, ...], k: int) -> float | None:
        if k < 1:
            raise ValueError(f"a window has at least one token, not {k}")
        return curve[min(k, len(curve)) - 1] if curve else None


CACHE_BINS = (1, 2, 3, 5, 9)
"""The least numbers of occurrences of the bins of a cache's table after the first, which is for none."""


class CacheModel(Frozen):
    """A cache language model that is mixed with the network (`models/cache_mixture.py`).

    `length`: N, the tokens that it holds. `weights`: by row, those of the network, the count of a token, its share
    after the last token, and its share after the last two. The row is 6 times the bin of the number of earlier
    occurrences of the last token in the cache, plus the bin of that of the last two tokens. The bins: 0, 1, 2, 3 to
    4, 5 to 8, and more. The weights of a row sum to 1; a component without an occurrence has the weight 0.
    """

    length: int = Field(ge=2, le=LARGEST_CACHE)
    weights: tuple[tuple[NotNegativeShare, NotNegativeShare, NotNegativeShare, NotNegativeShare], ...]

    @model_validator(mode="after")
    def _consistent(self) -> CacheModel:
        bins = len(CACHE_BINS) + 1
        if len(self.weights) != bins**2:
            raise ValueError(f"cache.weights has {len(self.weights)} rows, but must have {bins**2}")
        for row, weights in enumerate(self.weights):
            if abs(sum(weights) - 1) > 1e-6:
                raise ValueError(f"cache.weights[{row}] sums to {sum(weights)}, but must sum to 1")
            if not weights[0]:
                raise ValueError(f"cache.weights[{row}][0], the network's weight, must be above 0")
            if (row < bins and weights[2]) or (row % bins == 0 and weights[3]):
                raise ValueError(f"cache.weights[{row}] gives a weight to a component that has no occurrence")
        return self


class Provenance(Frozen):
    """The claimed origin of the weights; it cannot be checked at load."""

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
    """The content of `manifest.json`."""

    schema_version: int = Field(strict=True, ge=OLDEST_SCHEMA, le=SCHEMA_VERSION)
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    version: str = Field(pattern=r"^[0-9]{1,9}$")
    description: str = ""
    architecture: Architecture
    vocabulary: VocabularyInfo
    unknown: Unknown = "refuse"
    start: Start = "token"
    state: tuple[StateTensor, ...]
    window: int = Field(ge=1, description="default k of window mode")
    max_window: int = Field(ge=1, le=LARGEST_WINDOW, description="the largest k that a request may set")
    opset: Positive
    precision: Precision = "float32"
    graphs: dict[Role, str]
    weights: str
    tokenizer: str
    files: dict[str, Sha256] = Field(description="SHA-256 of every file of the bundle except the manifest")
    certificate: Certificate
    cache: CacheModel | None = None
    quality: Quality | None = None
    provenance: Provenance

    @property
    def history_tokens(self) -> int:
        """The latest tokens of a session that its answers may need: those of the largest window, and those of the
        cache, which is to be full after a rewind too."""
        return max(self.max_window, 0 if self.cache is None else self.cache.length + REWOUND_TOKENS)

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
