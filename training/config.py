"""Experiments as typed TOML files. Every key is checked; an unknown key is an error."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from wane.models.cell_registry import CELLS, Cell
from wane.models.manifest import Architecture, Front, Frozen
from wane.training.errors import ConfigError

LEAST_VOCABULARY = 258
"""The 256 bytes, `<eos>` and `<unk>`."""

Whole = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ModelConfig(Frozen):
    """The network.

    `contraction`: the lambda that `stable` cells are constrained to, one for all layers or one per layer, bottom to
    top; absent: unconstrained. `spectral_limit` (residual blocks): the largest spectral norm of `mix`, of the
    feed-forward matrices and of each gate's input matrix, with their LayerNorm's gain folded in; absent: unlimited.
    """

    cell: Cell
    hidden: Whole
    layers: Whole = 1
    embedding: Whole | None = Field(default=None, description="default: hidden")
    block: Literal["plain", "residual"] = "plain"
    feed_forward: int = Field(default=0, ge=0, strict=True)
    tied: bool = True
    front: Front | None = None
    units: Whole | None = Field(default=None, description="default: hidden")
    dropout: float = Field(default=0.0, ge=0, lt=1)
    contraction: Share | tuple[Share, ...] | None = None
    norm_epsilon: float = Field(default=1e-5, gt=0, le=1)
    spectral_limit: Finite | None = Field(default=None, gt=0)

    def architecture(self, vocabulary_size: int) -> Architecture:
        """Returns the architecture for a vocabulary."""
        return Architecture(
            cell=self.cell,
            vocabulary_size=vocabulary_size,
            embedding=self.embedding or self.hidden,
            hidden=self.hidden,
            layers=self.layers,
            block=self.block,
            feed_forward=self.feed_forward,
            tied=self.tied,
            front=self.front,
            units=self.units,
            norm_epsilon=self.norm_epsilon,
            gate_caps=(self.contractions or ()) if CELLS[self.cell].input_gated else (),
        )

    @property
    def contractions(self) -> tuple[float, ...] | None:
        """The lambda of each layer, bottom to top."""
        if isinstance(self.contraction, float):
            return (self.contraction,) * self.layers
        return self.contraction

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if isinstance(self.contraction, tuple) and len(self.contraction) != self.layers:
            raise ValueError(f"{len(self.contraction)} contractions for {self.layers} layers")
        if self.spectral_limit is not None and self.block != "residual":
            raise ValueError("spectral_limit needs block = 'residual'")
        return self


class DataConfig(Frozen):
    """The corpus. `path` is a file or folder (for `wikitext-2`: the folder that holds its three files)."""

    kind: Literal["wikitext-2", "text", "events"]
    path: Path | None = Field(default=None, description="default: --data, or a downloaded copy of WikiText-2")
    vocabulary: Literal["bpe", "words"] = "bpe"
    vocabulary_size: int = Field(
        default=2048, ge=LEAST_VOCABULARY, strict=True, description="upper limit, special tokens included"
    )
    valid_share: float = Field(default=0.05, gt=0, lt=0.5)
    test_share: float = Field(default=0.05, gt=0, lt=0.5)


class ProofConfig(Frozen):
    """A loss term that rewards predictions that a window can prove (`training/proof.py`).

    window: its length in tokens; default: one chunk. In a longer window the gates are assumed to continue as in the
    chunk. weight: nats of loss for a prediction that is a factor e from provable, reached after `ramp` steps.
    rivals: the number of runners-up that the first token is compared with. slack: the margin beyond provable, in log
    units, at which the loss reaches zero. ceiling: the excess, in log units, above which the loss stays constant.
    """

    window: Whole | None = None
    weight: Finite = Field(gt=0)
    rivals: Whole = 5
    slack: Finite = Field(default=0.2, ge=0)
    ceiling: Finite = Field(default=2.0, gt=0)
    ramp: Whole = 1000


class TrainingConfig(Frozen):
    """Optimisation of the weights.

    regime `recurrent`: truncated back-propagation; the state is carried from one chunk of `chunk` tokens to the next.
    regime `truncated`: trains the window model itself: each chunk of `chunk` = k tokens starts from the zero state.

    Schedules, after `warmup` steps: `constant`; `cosine` to zero; `inverse_time`, learning_rate / t (the theory's);
    `plateau`: constant until validation has not improved for `patience` evaluations (0: never) or `decay_steps` are
    left, then linear to zero over `decay_steps`, then stop.
    """

    regime: Literal["recurrent", "truncated"] = "recurrent"
    steps: Whole
    batch: Whole = 32
    chunk: Whole = 64
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Finite = Field(default=2e-3, gt=0)
    schedule: Literal["constant", "cosine", "inverse_time", "plateau"] = "cosine"
    warmup: int = Field(default=100, ge=0, strict=True)
    decay_steps: int = Field(default=0, ge=0, strict=True)
    patience: int = Field(default=0, ge=0, strict=True)
    weight_decay: Finite = Field(default=0.0, ge=0)
    clip_norm: Finite = Field(default=1.0, gt=0)
    project_every: Whole = Field(default=1, description="steps between projections of constrained weights")
    evaluate_every: Whole = 500
    checkpoint_every: Whole = 500
    keep_every: int = Field(default=0, ge=0, strict=True, description="steps between weights kept permanently; 0: none")
    seed: int = Field(default=1, ge=0, strict=True)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bf16"] = "float32"
    threads: Whole | None = None
    proof: ProofConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.schedule == "plateau" and not 0 < self.decay_steps <= self.steps:
            raise ValueError("schedule = 'plateau' needs 0 < decay_steps <= steps")
        if self.schedule != "plateau" and (self.decay_steps or self.patience):
            raise ValueError("decay_steps and patience belong to schedule = 'plateau'")
        return self


class ExportConfig(Frozen):
    """Fields of the bundle's manifest that training does not set."""

    description: str = ""
    window: Whole = 64
    max_window: Whole = 256
    attribution: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ExportConfig:
        if self.window > self.max_window:
            raise ValueError(f"window {self.window} is larger than max_window {self.max_window}")
        return self


class Experiment(Frozen):
    """One experiment file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _can_be_built(self) -> Experiment:
        architecture = self.model.architecture(LEAST_VOCABULARY)
        if self.training.proof is not None:
            if (architecture.cell, architecture.block, architecture.layers) != ("gated", "residual", 1):
                raise ValueError("training.proof needs cell = 'gated', block = 'residual' and one layer")
            reach = 0 if architecture.front is None else architecture.front.reach
            if reach >= min(self.training.chunk, self.training.proof.window or self.training.chunk):
                raise ValueError(f"training.proof needs chunks and windows longer than the front's reach, {reach}")
        return self

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """Reads a TOML file. Raises ConfigError, which names each invalid key."""
        try:
            return cls.parse(path, tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error

    @classmethod
    def parse(cls, path: Path, record: object) -> Experiment:
        """Returns the experiment in `record`, read from `path`. Raises ConfigError, which names each invalid key."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'file'}: {fault['msg']}" for fault in error.errors()
            )
            raise ConfigError(f"{path}: {faults}") from error
