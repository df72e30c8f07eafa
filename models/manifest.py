"""The fields of a bundle's `manifest.json`, as pydantic models. The manifest is untrusted data: every field is checked,
and an unknown field is an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from wane.models.architecture import AnyArchitecture, ImportedGraph, StateTensor
from wane.models.layer_registry import Frozen
from wane.models.transitions import LENGTHS, OWN

SCHEMA_VERSION = 6
"""The version of the manifest's schema that this version of Wane writes."""

OLDEST_SCHEMA = 3
"""The oldest version of the schema that this version of Wane reads. Schema 4 added the fields `unknown` and `start`,
and the output `hiddens` of the `scan` graph. Schema 5 added `certificate.readout` and the outputs `norms` and
`every_norms`, and the curve `certificate.error_bound` became free of rounding. Schema 6 describes the network by a list
of layers (`Architecture.layers`)."""

LARGEST_WINDOW = 65_536
"""The largest window, in tokens. A window is one input of a graph and is held in memory."""

REWOUND_TOKENS = 512
"""A session's cache is still full after a rewind by at most this number of tokens."""

INVERSE_UP = 1 + 2.0**-10
"""The factor by which 1 / sqrt(variance + epsilon) from a graph is rounded up."""

LARGEST_CACHE = 8_192
"""The largest cache, in tokens. Each session whose state is in memory also has its cache in memory."""

Role = Literal["step", "window", "advance", "scan", "head"]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
NotNegativeShare = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

VocabularyKind = Literal["bpe", "words", "events"]

Unknown = Literal["refuse", "skip", "token"]
"""What the server does with a word or an event that the vocabulary lacks: it answers with an error, skips it, or reads
it as the token `<unk>`."""

Start = Literal["token", "zero"]
"""What the model reads first, in the zero state. "token": the start token `<eos>`. "zero": the sequence's first token,
with no start token before it."""

Precision = Literal["float32", "int8"]
"""The number format in which the graphs multiply by weights. The weights in the weights file are always float32."""


class VocabularyInfo(Frozen):
    """The tokenizer that the model was trained with."""

    kind: VocabularyKind
    size: int = Field(ge=2)
    eos_id: int = Field(ge=0)
    sha256: Sha256
    reserved: tuple[NotNegative, ...] | None = Field(
        default=None,
        description="the ids of the tokens that are never read, listed or drawn, such as padding and masks; absent: "
        "those with the usual names of such tokens",
    )

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Omits `reserved` if it is absent, so that older versions of Wane read the manifest."""
        found: dict[str, object] = serialize(self)
        if self.reserved is None:
            del found["reserved"]
        return found


class Perplexity(Frozen):
    """The perplexity of one split in one mode."""

    per_token: float = Field(gt=0)
    """the perplexity per token"""
    per_word: float | None = Field(default=None, gt=0)
    """the perplexity per word, where one `<eos>` per line counts as a word. It is null for event models"""


class WindowPerplexity(Frozen):
    """The perplexity of predictions from exactly the last k tokens, at positions spread over a split."""

    positions: int = Field(ge=0)
    """the number of positions"""
    recurrent: Perplexity
    """the uninterrupted run's perplexity at the same positions"""
    by_k: dict[Positive, Perplexity]
    """the perplexity for each evaluated k"""


class Quality(Frozen):
    """The claimed perplexities by split. If there is a cache, they are perplexities of the mixture with the cache,
    except `without_cache`."""

    tokens: dict[str, NotNegative]
    """the number of tokens of each split"""
    words: dict[str, NotNegative]
    """the number of words of each split"""
    recurrent: dict[str, Perplexity]
    """the perplexity of the uninterrupted run over the whole split"""
    window: dict[str, WindowPerplexity]
    """the perplexities of windows at sampled positions"""
    window_within_half_percent: Positive | None
    """the smallest evaluated k such that, for all evaluated windows of at least k tokens, the validation perplexity per
    token is within 0.5 % of the recurrent one. It is null if there is no such k"""
    without_cache: dict[str, Perplexity] | None = None
    """the perplexity of the uninterrupted run over the whole split, for the network alone"""


class Condition(Frozen):
    """One sufficient condition for contraction, as evaluated for a layer."""

    rule: str
    """the condition's name"""
    norm: str
    """the norm in which the condition holds"""
    factor: float | None = Field(ge=0)
    """the contraction factor that the condition proves in this norm. It is null if the condition does not apply to the
    layer"""


class Contraction(Frozen):
    """One layer's contraction factor."""

    layer: NotNegative
    """the layer's index"""
    factor: float = Field(ge=0)
    """one step multiplies the difference of two states by at most this number, in the norm `norm`"""
    rule: str
    """the rule that proves this, the best of `conditions`"""
    norm: str
    """the norm of the factor"""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """the numbers by which the state tensors are divided in the norm, in the state's order (`p` and `q` in the norm's
    text). The list is empty if the state is one tensor, or if the norm has a weight for each unit. Weights for each
    unit are not stored, but recomputed"""
    conditions: tuple[Condition, ...] = ()
    """all conditions that were evaluated"""
    input_gain: float | None = Field(default=None, ge=0)
    """the bound of the change of the layer's state in one step, in the 2-norm, per unit change of its input. It is null
    if there is no bound"""
    reach: float | None = Field(default=None, ge=0)
    """the 2-norm bound of the layer's output over all states that are reached from zero. It is also the bound of the
    output's error at the start of a window. It is null if there is no bound"""


class StateError(Frozen):
    """The bound of the error of one state tensor."""

    box: float = Field(ge=0)
    """the bound of the error of every unit"""
    ball: float = Field(ge=0)
    """the bound of the 2-norm of all units' errors"""


class Rounding(Frozen):
    """Bounds of the distance between a run of the graphs in `dtype` and exact arithmetic over the same tokens.

    The error of one step is measured (`step_error`): the `step` graph is compared with the float64 oracle in `steps`
    steps. In each step, both start from the state that the graph returned last. These steps include every token of the
    vocabulary, tokens repeated for 4 / (1 - factor) steps (at most 4,096) after two different sequences, cycles of two
    and three tokens, and sequences chosen to make the state large. The repeated tokens include those that reduce the
    difference of two states least.
    """

    dtype: Literal["float32"] = "float32"
    """the number format of the graphs"""
    step_error: Literal["measured"] = "measured"
    """how the error of one step is known"""
    sequences: Literal["all", "probed"]
    """the token sequences for which the errors of steps were accumulated. "all": by the theorem that bounds a window's
    error for any tokens. `states` and `carried` are recomputed from `step` when a bundle is loaded. "probed", along the
    measured sequences only, occurs in bundles up to schema 4, which are served as uncertified"""
    steps: Positive
    """the number of measured steps"""
    safety: float = Field(ge=1)
    """the factor of the largest measured error"""
    step: dict[str, StateError]
    """the largest error of one step, times `safety`, by state tensor of the layers"""
    output: float = Field(ge=0)
    """the largest error of the output, times a safety factor. This error is the sum of two numbers: the 2-norm error of
    `hidden` (0 in a plain network, where `hidden` is a state), and the greatest minus the least error of the logits,
    divided by `head_diameter`"""
    states: dict[str, StateError]
    """the errors of a whole run of any length, by state tensor"""
    carried: float = Field(ge=0)
    """the 2-norm error of `hidden` in a whole run of any length, including `output`. In residual networks, in which a
    LayerNorm may amplify rounding without limit, it is the largest possible distance"""
    worst_case: float | None = Field(default=None, ge=0)
    """a bound of the distance between the `hidden` of two runs that differ only in rounding. No measurement enters it.
    It is to first order in the unit roundoff, and assumes the accuracy of exp and tanh that
    `models/certificate/rounding.py` states. It is null if the architecture has layers with finite memory"""

    @property
    def between_runs(self) -> float:
        """The bound of the distance between the `hidden` of two runs over the same tokens. Rounding moves each run by
        at most `carried` from exact arithmetic."""
        return 2 * self.carried


class Readout(Frozen):
    """Bounds the effect of float32 rounding on the answers of a residual network with one layer of an input-gated cell.
    `models/certificate/readout.py` has the theorem and its assumptions. No number here is measured.

    It holds under the assumptions about float32 sums, LayerNorms and functions that are named there.

    Two runs over the same tokens read the same bits in their gates and candidates, so their states differ only by the
    rounding of the recurrence. Above the cell, each run adds the rounding of its own sums. LayerNorms amplify these
    differences. `between` reads the amplification from the answer's own LayerNorms.

    The argument `norms` is an output of the graphs in float32. Its columns are the mean of the input of the first
    LayerNorm above the cell, and 1 / sqrt(variance + epsilon) of the input of each LayerNorm above the cell.
    """

    width: Positive
    """H, the width of `hidden`"""
    epsilon: float = Field(gt=0)
    """the number that every LayerNorm adds to the variance"""
    gate: float = Field(ge=0)
    """the largest relative excess of a computed gate over the certificate's bound of it"""
    name: str
    """the name of the state tensor"""
    states: StateError
    """the bound of the difference of the states of two runs, by unit and in the 2-norm"""
    state: float = Field(ge=0)
    """the bound of this difference after the mixing matrix, in the 2-norm"""
    mixed: float = Field(ge=0)
    """the error that one evaluation adds at the sum after the mixing matrix, in the 2-norm"""
    relative: float = Field(ge=0)
    """the further error of the sums of `mixed` and `fed`, per unit of the 2-norm of the sum after the mixing matrix"""
    slope: float | None = Field(default=None, ge=0)
    """the Lipschitz constant of the feed-forward part behind its LayerNorm. It is null without such a part"""
    fed: float = Field(ge=0)
    """the error that one evaluation adds at the sum after the feed-forward part, in the 2-norm"""
    gain: float = Field(ge=0)
    """the largest absolute gain of the last LayerNorm"""
    top: float = Field(ge=0)
    """the error that one evaluation adds at `hidden`, in the 2-norm, including the error of the logits"""

    @property
    def furthest(self) -> float:
        """The largest possible 2-norm distance between the `hidden` of two runs."""
        return 2 * self.gain * float(np.sqrt(self.width)) + 2 * self.top

    def of_one(self, norms: Sequence[float]) -> tuple[float, float]:
        """Bounds the errors that one evaluation adds at the sum after the mixing matrix, and at the sum after the
        feed-forward part, in the 2-norm. norms: of one answer."""
        mean, inverse = norms[0], norms[1]
        off: float = self.relative * (self.width * (mean * mean + 1 / (inverse * inverse))) ** 0.5 * INVERSE_UP
        return self.mixed + off, 0.0 if self.slope is None else self.fed + off

    def between(self, norms: Sequence[float], runs: int = 2) -> float:
        """Bounds the 2-norm distance between the `hidden` of two runs over the same tokens. With `runs=1`, bounds the
        error of one evaluation of `hidden` from the computed state and the computed input of the first layer. norms: of
        one answer."""
        mixed, fed = self.of_one(norms)
        r = runs * mixed + (self.state if runs == 2 else 0.0)
        if self.slope is not None:
            r += self.slope * self._normalised(r, norms[1]) + runs * fed
        return self.gain * self._normalised(r, norms[-1]) + runs * self.top

    def between_all(self, norms: NDArray[np.float32], joints: float = 0.0) -> NDArray[np.float64]:
        """Like `between`, for two runs of B answers: (B, columns) -> (B). joints: a bound of the further difference of
        the two runs at the sum after the mixing matrix, in the 2-norm."""
        mean, *inverse = norms.astype(np.float64).T
        off = self.relative * np.sqrt(self.width * (mean * mean + 1 / (inverse[0] * inverse[0]))) * INVERSE_UP
        r = self.state + joints + 2 * (self.mixed + off)
        if self.slope is not None:
            r = r + self.slope * self._normalised_all(r, inverse[0]) + 2 * (self.fed + off)
        result: NDArray[np.float64] = self.gain * self._normalised_all(r, inverse[-1]) + 2 * self.top
        return result

    def _normalised(self, r: float, inverse: float) -> float:
        """Bounds the change of a LayerNorm's normalised vector if its input changes by at most r (see
        `models/export/radius.py`)."""
        q = r * inverse * INVERSE_UP
        return min(q + q * q * q / self.width, r / math.sqrt(self.epsilon), 2 * math.sqrt(self.width))

    def _normalised_all(self, r: NDArray[np.float64], inverse: NDArray[np.float64]) -> NDArray[np.float64]:
        q = r * inverse * INVERSE_UP
        most = np.minimum(r / self.epsilon**0.5, 2 * self.width**0.5)
        result: NDArray[np.float64] = np.minimum(q + q * q * q / self.width, most)
        return result


class Certificate(Frozen):
    """Bounds, for all tokens, of the distance between a window's prediction and the uninterrupted run's.

    Only contractive models have the curves `state_error` and `error_bound`. Both values at k hold for every window of
    at least k tokens, so the curves never rise. The certificate is recomputed from the float32 weights when the bundle
    is loaded. The measured part of `rounding` (`step` and `output`) is the exception: only a sample of it is measured
    again.
    """

    contractive: bool
    """whether every layer with fading memory has a factor < 1. Each token multiplies the difference of two of a layer's
    states by at most the layer's factor"""
    certified: bool = False
    """whether epsilon(k) is at most 1e-3 for the largest window k"""
    reason: str | None = None
    """why the model is not certified"""
    layers: tuple[Contraction, ...]
    """the contraction of each layer with fading memory. Layers with finite memory have none: beyond their reach,
    nothing is left"""
    state_error: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """the curve e_k for k = 1 to the largest window. e_k bounds the 2-norm distance of `hidden` in exact arithmetic"""
    error_bound: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """the curve epsilon(k) for the same k. epsilon(k) bounds the total variation at temperature 1 in exact arithmetic:
    epsilon(k) = tanh(D e_k / 4). Each answer adds its own rounding"""
    head_diameter: float = Field(default=0.0, ge=0)
    """D, the largest 2-norm distance of two rows of the output matrix, or an upper bound of this distance if the
    vocabulary is large"""
    rounding: Rounding | None = None
    """the rounding of the graphs, from measured errors of one step"""
    readout: Readout | None = None
    """the rounding of the graphs by a theorem, for residual networks with one layer of an input-gated cell. A model
    that is contractive may have one of the two. Without both, nothing bounds the rounding"""
    bit_identical: bool = Field(default=True, exclude=True)
    """whether the graphs give the same bits for the same tokens, step by step, as a window, in pieces, alone and in the
    largest batch. It is not in a manifest, but measured when the bundle is loaded"""
    of_finite: float | None = Field(default=None, ge=0, exclude=True)
    """the largest distance of a computed `hidden` from exact arithmetic, for a model of layers with finite memory alone
    (`models/certificate/rounding.py`). It is computed when the bundle is loaded, if bits differ"""

    @property
    def has_rounding(self) -> bool:
        """Whether the rounding of the graphs is bounded. A `readout` bounds it only if equal tokens give equal bits. In
        a model of layers with finite memory alone, equal bits mean that there is none."""
        by_bits = self.readout is not None or not self.layers
        bounded = self.rounding is not None or self.of_finite is not None
        return self.contractive and (bounded or (by_bits and self.bit_identical))

    @property
    def states_apart(self) -> dict[str, StateError]:
        """The bounds of the difference of the states of two runs over the same tokens, by state tensor."""
        if self.readout is not None:
            return {self.readout.name: self.readout.states}
        if not self.layers:
            return {}
        assert self.rounding is not None, "nothing bounds the rounding: this is a bug"
        return {
            name: StateError(box=2 * error.box, ball=2 * error.ball) for name, error in self.rounding.states.items()
        }

    def between_runs(self, norms: Sequence[float] | None = None) -> float | None:
        """Bounds the 2-norm distance between the `hidden` of two runs over the same tokens. Returns None if nothing
        bounds it. norms: see `Readout`. None means that they are unknown, which gives the largest distance."""
        if not self.has_rounding:
            return None
        if self.readout is not None:
            return self.readout.furthest if norms is None else self.readout.between(norms)
        if self.rounding is None:
            return 2 * (self.of_finite or 0.0)
        return self.rounding.between_runs

    def state_error_at(self, k: int) -> float | None:
        """Returns e_k. For a window longer than the curve, returns the curve's last value, which holds for it, too.
        Returns None without a curve."""
        return self._at(self.state_error, k)

    def error_bound_at(self, k: int) -> float | None:
        """Returns epsilon(k). For a window longer than the curve, returns the curve's last value. Returns None without
        a curve."""
        return self._at(self.error_bound, k)

    def smallest_window(self, epsilon: float) -> int | None:
        """Returns the smallest k for which epsilon(j) <= `epsilon` for all j >= k, or None if there is no such k."""
        return next((k for k, bound in enumerate(self.error_bound, start=1) if bound <= epsilon), None)

    @staticmethod
    def _at(curve: tuple[float, ...], k: int) -> float | None:
        if k < 1:
            raise ValueError(f"a window has at least one token, not {k}")
        return curve[min(k, len(curve)) - 1] if curve else None


CACHE_BINS = (1, 2, 3, 5, 9)
"""The smallest number of occurrences of each bin except bin 0. Bin 0 is for 0 occurrences. The bins select a row of a
cache's table of weights."""


class TransitionModel(Frozen):
    """Transition tables that are mixed with network and cache (`models/transitions.py`)."""

    file: str
    """the file of the tables"""
    weights: tuple[tuple[NotNegativeShare, NotNegativeShare, NotNegativeShare, NotNegativeShare, NotNegativeShare], ...]
    """the weights of the parts, for sessions of 1, 2, 3, and 4 or more events"""

    @model_validator(mode="after")
    def _consistent(self) -> TransitionModel:
        if len(self.weights) != LENGTHS:
            raise ValueError(f"cache.transitions.weights has {len(self.weights)} rows, but must have {LENGTHS}")
        for row, weights in enumerate(self.weights):
            if abs(sum(weights) - 1) > 1e-5 or not weights[0]:
                raise ValueError(
                    f"cache.transitions.weights[{row}] must sum to 1, and its first, the model's weight, be above 0"
                )
        return self


class CacheModel(Frozen):
    """A cache language model that is mixed with the network (`models/cache_mixture.py`).

    The row's index is 6 times the bin of the number of earlier occurrences of the last token in the cache, plus the bin
    of the number of earlier occurrences of the last two tokens. The bins are 0, 1, 2, 3 to 4, 5 to 8, and more.
    """

    length: int = Field(ge=2, le=LARGEST_CACHE)
    """N, the number of tokens that the cache holds"""
    weights: tuple[tuple[NotNegativeShare, NotNegativeShare, NotNegativeShare, NotNegativeShare], ...]
    """a table of weights. Each row has four weights, which sum to 1. They multiply the network's probability of a
    token, the token's share in the cache, its share after the last token, and its share after the last two tokens. If
    the last token has no earlier occurrence in the cache, the third weight is 0. If the last two tokens have none, the
    fourth weight is 0"""
    transitions: TransitionModel | None = None
    """tables that are mixed with the network and this cache; None for none"""

    @classmethod
    def none(cls, length: int) -> CacheModel:
        """Returns a cache that adds nothing. It only keeps a session's last `length` tokens."""
        return cls(length=length, weights=((1.0, 0.0, 0.0, 0.0),) * (len(CACHE_BINS) + 1) ** 2)

    @model_validator(mode="after")
    def _consistent(self) -> CacheModel:
        if self.transitions is not None and self.length < OWN:
            raise ValueError(f"cache.length is {self.length}, but transitions read the last {OWN} events")
        bins = len(CACHE_BINS) + 1
        if len(self.weights) != bins**2:
            raise ValueError(f"cache.weights has {len(self.weights)} rows, but must have {bins**2}")
        for row, weights in enumerate(self.weights):
            if abs(sum(weights) - 1) > 1e-6:
                raise ValueError(f"cache.weights[{row}] sums to {sum(weights)}, but must sum to 1")
            if not weights[0]:
                raise ValueError(f"cache.weights[{row}][0], the network's weight, must be above 0")
            if (row < bins and weights[2]) or (row % bins == 0 and weights[3]):
                raise ValueError(
                    f"cache.weights[{row}] must have the weight 0 for a share that is based on 0 occurrences"
                )
        tables = self.transitions
        if tables is not None and not min(row[0] for row in self.weights) * min(row[0] for row in tables.weights):
            raise ValueError("the network's weight, cache.weights times cache.transitions.weights, rounds to 0")
        return self


class Provenance(Frozen):
    """The claimed origin of the weights. It cannot be checked at load."""

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
    """The content of `manifest.json`. `architecture` has the layers of the network, or describes an imported graph
    (`ImportedGraph`), of which no layer is known."""

    schema_version: int = Field(strict=True, ge=OLDEST_SCHEMA, le=SCHEMA_VERSION)
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    version: str = Field(pattern=r"^[0-9]{1,9}$")
    description: str = ""
    architecture: AnyArchitecture
    vocabulary: VocabularyInfo
    unknown: Unknown = "refuse"
    start: Start = "token"
    state: tuple[StateTensor, ...]
    window: int = Field(ge=1, description="default number of tokens of a window")
    max_window: int = Field(ge=1, le=LARGEST_WINDOW, description="largest window, in tokens, of a request")
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
    def imported(self) -> bool:
        """Whether the graphs are those of a user (`models/imported/`), of which no layer and no weight is known."""
        return isinstance(self.architecture, ImportedGraph)

    @property
    def start_tokens(self) -> tuple[int, ...]:
        """The tokens that the model reads before the first token of a sequence: `<eos>` if `start` is "token", none if
        `start` is "zero"."""
        return (self.vocabulary.eos_id,) if self.start == "token" else ()

    @property
    def history_tokens(self) -> int:
        """The number of latest tokens of a session that its answers may need. It covers the largest window, and a cache
        that is full even after a rewind."""
        return max(self.max_window, 0 if self.cache is None else self.cache.length + REWOUND_TOKENS)

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if self.state != self.architecture.state_tensors():
            raise ValueError("'state' does not list the state tensors of 'architecture'")
        if self.imported and (self.cache is not None or self.precision != "float32"):
            raise ValueError("an imported graph has neither a cache nor another precision than 'float32'")
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
