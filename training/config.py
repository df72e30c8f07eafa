"""Experiments as typed TOML files. Every key is checked; one that is not known is an error, never ignored."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from models.manifest import Architecture, Cell, Frozen
from training.errors import ConfigError


class ModelConfig(Frozen):
    """The network. `contraction` is the lambda that `stable` cells are held to; absent: unconstrained."""

    cell: Cell
    hidden: int = Field(ge=1)
    layers: int = Field(default=1, ge=1)
    embedding: int | None = Field(default=None, ge=1, description="absent: as wide as hidden")
    block: Literal["plain", "residual"] = "plain"
    feed_forward: int = Field(default=0, ge=0)
    tied: bool = True
    dropout: float = Field(default=0.0, ge=0, lt=1)
    contraction: float | None = Field(default=None, gt=0, lt=1)

    def architecture(self, vocabulary_size: int) -> Architecture:
        """The architecture over a vocabulary."""
        return Architecture(
            cell=self.cell,
            vocabulary_size=vocabulary_size,
            embedding=self.embedding or self.hidden,
            hidden=self.hidden,
            layers=self.layers,
            block=self.block,
            feed_forward=self.feed_forward,
            tied=self.tied,
            gate_cap=self.contraction if self.cell == "gated" and self.contraction else 1.0,
        )


class DataConfig(Frozen):
    """The corpus. `path` is a file or folder (for `wikitext-2`: the folder that holds its three files)."""

    kind: Literal["wikitext-2", "text", "events"]
    path: Path | None = Field(default=None, description="absent: --data, or a copy that is fetched")
    vocabulary: Literal["bpe", "words"] = "bpe"
    vocabulary_size: int = Field(default=2048, ge=258, description="upper limit, specials included")
    valid_share: float = Field(default=0.05, gt=0, lt=0.5)
    test_share: float = Field(default=0.05, gt=0, lt=0.5)


class TrainingConfig(Frozen):
    """How the weights are found.

    regime `recurrent`: truncated back-propagation, the state carried from one chunk of `chunk` tokens to the next.
    regime `truncated`: the window model itself is trained: each chunk of `chunk` = k tokens starts from zero state.

    Schedules, after `warmup` steps: `constant`; `cosine` to zero; `inverse_time`, learning_rate / t (the theory's);
    `plateau`: constant until validation has not improved for `patience` evaluations (0: never) or `decay_steps` are
    left, then linear to zero over `decay_steps`, then stop.
    """

    regime: Literal["recurrent", "truncated"] = "recurrent"
    steps: int = Field(ge=1)
    batch: int = Field(default=32, ge=1)
    chunk: int = Field(default=64, ge=1)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=2e-3, gt=0)
    schedule: Literal["constant", "cosine", "inverse_time", "plateau"] = "cosine"
    warmup: int = Field(default=100, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    patience: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    project_every: int = Field(default=1, ge=1, description="steps between projections of a stable cell")
    evaluate_every: int = Field(default=500, ge=1)
    checkpoint_every: int = Field(default=500, ge=1)
    seed: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bf16"] = "float32"
    threads: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.schedule == "plateau" and not 0 < self.decay_steps <= self.steps:
            raise ValueError("schedule = 'plateau' needs 0 < decay_steps <= steps")
        if self.schedule != "plateau" and (self.decay_steps or self.patience):
            raise ValueError("decay_steps and patience belong to schedule = 'plateau'")
        return self


class ExportConfig(Frozen):
    """What the bundle says of itself beyond what training knows."""

    description: str = ""
    window: int = Field(default=64, ge=1)
    max_window: int = Field(default=256, ge=1)
    attribution: str | None = None


class Experiment(Frozen):
    """One experiment file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    export: ExportConfig = ExportConfig()

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """Reads a TOML file. Raises ConfigError naming each key at fault."""
        try:
            text = path.read_text(encoding="utf-8")
            return cls.model_validate(tomllib.loads(text))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'file'}: {fault['msg']}" for fault in error.errors()
            )
            raise ConfigError(f"{path}: {faults}") from error
