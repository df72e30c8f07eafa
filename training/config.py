"""Reads experiments from TOML files. Every key has a type that is checked. An unknown key is an error."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from wane.models.architecture import SMALLEST_NORMAL, Architecture, Front
from wane.models.event_files.format import EventFormat
from wane.models.layer_registry import KINDS, AnyLayer, Convolution, Frozen, Gated, Kind, read_layer
from wane.models.manifest import LARGEST_CACHE, Start
from wane.training.errors import ConfigError

LEAST_VOCABULARY = 258
"""The number of tokens of the smallest byte-level vocabulary: every byte, `<eos>` and `<unk>`."""

TEXT_VOCABULARY = 2048
"""The largest size of a text's vocabulary, if `data.vocabulary_size` is absent."""

Whole = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Protocol = Literal["next", "next_other", "leave_one_out"]
File = Annotated[str, Field(min_length=1)]
Files = File | Annotated[tuple[File, ...], Field(min_length=1)]
EVENT_KEYS = ("min_count", "unknown", "start", "split", "train", "valid", "test", "whole", "train_on", "protocol")
"""The keys of the table `[data]` that need events, besides those of `EventFormat`."""


class ModelConfig(Frozen):
    """The keys of the table `[model]`: the network."""

    layers: Whole | tuple[AnyLayer, ...] = Field(
        default=1,
        description="the layers, bottom to top, as tables `[[model.layers]]`; or the number of recurrent layers, which "
        "are then all as `cell`, `hidden`, `units`, `block` and `feed_forward` say",
    )
    cell: Kind | None = Field(
        default=None,
        description="recurrent cell; the gates of `gated` read only the input; absent if `layers` is a list",
    )
    hidden: Whole | None = Field(default=None, description="width of each layer's output; absent if `layers` is a list")
    embedding: Whole | None = Field(
        default=None, description="width of the token embedding; absent: `hidden`, or the `units` of the last layer"
    )
    block: Literal["plain", "residual"] = Field(
        default="plain",
        description="`residual` adds LayerNorm, skip connection and feed-forward part to each layer",
    )
    feed_forward: int = Field(
        default=0, ge=0, strict=True, description="width of the feed-forward part of a residual block; 0: none"
    )
    tied: bool = Field(default=True, description="whether the output layer uses the embedding's matrix")
    front: Front | None = Field(
        default=None, description="causal convolutions below the first layer, for `residual` only; absent: none"
    )
    units: Whole | None = Field(
        default=None, description="number of units of a cell in a residual block; absent: `hidden`"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout probability in training")
    embedding_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="probability that a training step reads every occurrence of a token as zeros",
    )
    weight_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="`lstm` only: probability that a training step drops an entry of a layer's recurrent matrix",
    )
    locked: bool = Field(
        default=False, description="whether the mask of `dropout` is the same for all tokens of a sequence in a step"
    )
    contraction: Share | tuple[Share, ...] | None = Field(
        default=None,
        description="contraction factor that training enforces: one number, or one for each layer, bottom to top; "
        "absent: unconstrained, and not certified",
    )
    norm_epsilon: float = Field(default=1e-5, ge=SMALLEST_NORMAL, le=1, description="epsilon of the LayerNorms")
    spectral_limit: Finite | None = Field(
        default=None,
        gt=0,
        description="largest spectral norm of a residual block's matrices, including the LayerNorm's gain; "
        "absent: no limit",
    )
    cache: int | None = Field(
        default=None,
        ge=2,
        le=LARGEST_CACHE,
        strict=True,
        description="size, in tokens, of a cache language model that is mixed with the network, also in the training "
        "loss (`cache_in_loss`); absent: no cache",
    )
    cache_in_loss: bool = Field(
        default=True,
        description="whether the training loss is that of the mixture with the cache; `false` trains the network alone "
        "and fits the cache at each validation",
    )

    def architecture(self, vocabulary_size: int) -> Architecture:
        """Returns the architecture for a vocabulary of `vocabulary_size` tokens."""
        layers = self.stack
        factors = iter(self.contractions or ())
        for index, layer in enumerate(layers):
            factor = None if layer.finite else next(factors, None)
            if factor is not None and layer.input_gated:
                layers[index] = layer.model_copy(update={"gate_cap": factor})
        return Architecture(
            vocabulary_size=vocabulary_size,
            embedding=self.embedding or self.hidden or layers[-1].units,
            layers=tuple(layers),
            tied=self.tied,
            norm_epsilon=self.norm_epsilon,
        )

    @property
    def stack(self) -> list[AnyLayer]:
        """The layers, bottom to top."""
        if isinstance(self.layers, tuple):
            return list(self.layers)
        fields: dict[str, object] = {"kind": self.cell, "block": self.block, "feed_forward": self.feed_forward}
        layers = [read_layer(fields | {"units": self.units or self.hidden})] * self.layers
        if self.front is None:
            return layers
        kept = {"kernel_size": self.front.kernel_size, "feed_forward": self.front.feed_forward}
        front = Convolution.model_validate({"units": self.hidden, "block": "front"} | kept)
        return [front] * self.front.blocks + layers

    @property
    def contractions(self) -> tuple[float, ...] | None:
        """The contraction factor (lambda) that training enforces for each layer with fading memory, bottom to top."""
        if isinstance(self.contraction, float):
            return (self.contraction,) * sum(not layer.finite for layer in self.stack)
        return self.contraction

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.feed_forward and self.block == "plain":
            raise ValueError("feed_forward needs block = 'residual'")
        if isinstance(self.layers, int) and (self.cell is None or self.hidden is None):
            raise ValueError("the layers are missing: give `cell` and `hidden`, or a list of tables [[model.layers]]")
        if self.cell is not None and KINDS[self.cell].finite:
            raise ValueError(f"a layer of the kind {self.cell!r} needs its own table [[model.layers]]")
        if isinstance(self.layers, tuple):
            for key in ("cell", "hidden", "block", "feed_forward", "front", "units"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is a key of each layer if `layers` is a list")
        fading = [layer for layer in self.stack if not layer.finite]
        if isinstance(self.contraction, tuple) and len(self.contraction) != len(fading):
            raise ValueError(
                f"contraction has {len(self.contraction)} numbers, but the network has {len(fading)} recurrent layers"
            )
        if self.contraction is not None and any(layer.cap != 1 for layer in fading):
            raise ValueError("contraction is the gates' cap: give either `contraction` or `gate_cap`")
        if self.weight_dropout and {layer.kind for layer in fading} != {"lstm"}:
            raise ValueError("weight_dropout needs cell = 'lstm'")
        if self.front is not None and self.block != "residual":
            raise ValueError("front needs block = 'residual'")
        if self.spectral_limit is not None and any(layer.block != "residual" for layer in fading):
            raise ValueError("spectral_limit needs block = 'residual'")
        return self


class DataConfig(EventFormat):
    """The keys of the table `[data]`: the corpus. Those of `EventFormat` say how files of events are read."""

    kind: Literal["wikitext-2", "text", "events"] = Field(
        description="`text`: UTF-8 files; `events`: JSON lines (`.jsonl`, `.ndjson`), tables (`.csv`, `.tsv`, "
        "`.inter`, `.dat`, `.data`, `.txt`), both also compressed (`.gz`), or Parquet files (`.parquet`, `.pq`)"
    )
    path: Path | None = Field(
        default=None,
        description="file or folder, relative to the experiment file; for `wikitext-2`, the folder of its three files; "
        "for events, a folder may hold the splits as `train.jsonl`, `valid.jsonl` and `test.jsonl`; absent: the value "
        "of `--data`, or a download",
    )
    train: Files | None = Field(
        default=None,
        description="events: file, or list of files, of the training split, in the folder `path`; needs `valid` and "
        "`test`; absent: the data is split by `split`",
    )
    valid: Files | None = Field(default=None, description="events: file, or list of files, of the validation split")
    test: Files | None = Field(default=None, description="events: file, or list of files, of the test split")
    whole: Files | None = Field(
        default=None,
        description="events: file, or list of files, of the training split of `train_on = 'train_and_valid'`; absent: "
        "those of `train` and `valid`",
    )
    train_on: Literal["train", "train_and_valid"] = Field(
        default="train",
        description="events: `train_and_valid` trains on the validation split, too, and saves the last weights; "
        "`wane train --after` sets it",
    )
    protocol: Protocol | None = Field(
        default=None,
        description="events that validation and test predict: `next`: every event after the first of a session, ranked "
        "among all events; `next_other`: the same, ranked among all events but the session's latest, for data in which "
        "no event follows itself; `leave_one_out`: the last event of a session, ranked among all events that the "
        "session did not have before; absent: that of `layout`",
    )
    vocabulary: Literal["bpe", "words"] = Field(
        default="bpe",
        description="vocabulary of a text: `bpe`: byte-level BPE; `words`: one token per word; ignored for events",
    )
    vocabulary_size: int | None = Field(
        default=None,
        ge=3,
        strict=True,
        description=f"largest size of the vocabulary, including special tokens; absent: {TEXT_VOCABULARY} for text, "
        "every event for events",
    )
    min_count: Whole = Field(
        default=1,
        description="events: the vocabulary has only events that occur at least this many times in the training split",
    )
    unknown: Literal["skip", "token"] = Field(
        default="skip",
        description="events that the vocabulary lacks: `skip` leaves them out in training and in serving; `token` "
        "reads them as `<unk>`",
    )
    start: Start = Field(
        default="token",
        description="what the model reads first in a sequence of events: `token`: `<eos>`; `zero`: the first event, "
        "which is then not predicted",
    )
    split: Literal["time", "session"] = Field(
        default="time",
        description="events: `time`: the test has the sessions that end last; `session`: the sessions of each "
        "split are drawn at random",
    )
    valid_share: float = Field(
        default=0.05, gt=0, lt=0.5, description="share of the data for validation, if the data is not split already"
    )
    test_share: float = Field(
        default=0.05, gt=0, lt=0.5, description="share of the data for the test, if the data is not split already"
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        size = self.vocabulary_size
        if self.kind != "events" and self.vocabulary == "bpe" and size is not None and size < LEAST_VOCABULARY:
            raise ValueError(
                f"vocabulary_size {size} is below {LEAST_VOCABULARY}, the number of tokens for every byte, <eos> and "
                "<unk>"
            )
        if self.kind != "events":
            for key in (*EVENT_KEYS, *EventFormat.model_fields):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} needs kind = 'events'")
        files = [key for key in ("train", "valid", "test") if getattr(self, key) is not None]
        if files and len(files) < 3:
            raise ValueError(
                f"train, valid and test name the files of the splits together: there is only {' and '.join(files)}"
            )
        if self.whole is not None and not files:
            raise ValueError("whole needs the files train, valid and test")
        if self.layout == "leave_one_out" and self.protocol not in (None, "leave_one_out"):
            raise ValueError(
                f"layout = 'leave_one_out' judges only a session's last event, so protocol cannot be {self.protocol}"
            )
        if files and self.layout == "leave_one_out":
            raise ValueError("layout = 'leave_one_out' has the three splits in each line, not in train, valid and test")
        return self

    @property
    def judged_by(self) -> Protocol:
        """The protocol of validation and test."""
        return self.protocol or ("leave_one_out" if self.layout == "leave_one_out" else "next")


class ProofConfig(Frozen):
    """The keys of the table `[training.proof]`: a loss term for predictions whose most probable token is not proved by
    a window (`training/proof.py`). The lead is the difference between the logits of this token and of a competing
    token. The ratio is the largest change of the lead that the tokens before the window can cause, divided by the
    lead."""

    window: Whole | None = Field(
        default=None,
        description="length, in tokens, of the window that must prove the prediction; absent: `chunk`. "
        "A window longer than the chunk is assumed to have the chunk's average gates",
    )
    weight: Finite = Field(
        gt=0, description="factor of the loss: if the ratio is multiplied by e, the loss increases by `weight` nats"
    )
    rivals: Whole = Field(
        default=5, description="number of competing tokens for which the lead of the most probable token is checked"
    )
    slack: Finite = Field(
        default=0.2,
        ge=0,
        description="the loss is 0 if the ratio is at most exp(-slack)",
    )
    ceiling: Finite = Field(
        default=2.0, gt=0, description="largest value of the loss before it is multiplied by `weight`"
    )
    ramp: Whole = Field(
        default=1000, description="number of first steps in which the factor of the loss rises from 0 to `weight`"
    )


class TeacherConfig(Frozen):
    """The keys of the table `[training.teacher]`: a trained network whose predictions the network learns (Hinton et al.
    2015, arXiv 1503.02531)."""

    run: Path = Field(description="the teacher's run folder, relative to the experiment file; with the same vocabulary")
    weight: Share = Field(default=0.5, description="share of the teacher's predictions in the loss")
    temperature: Finite = Field(
        default=1.0, gt=0, description="number by which the logits of both networks are divided in the teacher's share"
    )


class TrainingConfig(Frozen):
    """The keys of the table `[training]`: how the network is trained.

    The regime `recurrent` is truncated back-propagation: each chunk of `chunk` tokens starts from the last state of the
    chunk before. In the regime `truncated` each chunk of `chunk` tokens starts from the zero state, as a window of this
    length does in serving.

    The schedule sets the learning rate after `warmup` steps. `constant`: the rate does not change. `cosine`: the rate
    falls to zero. `inverse_time`: the rate is learning_rate / t in step t after the warm-up. `plateau`: the rate does
    not change until validation has not improved for `patience` evaluations (0: never), or until `decay_steps` steps
    remain. It then falls linearly to zero over `decay_steps` steps, and training stops.
    """

    regime: Literal["recurrent", "truncated"] = Field(
        default="recurrent",
        description="`recurrent`: each chunk starts from the last state of the chunk before; `truncated`: each chunk "
        "starts from the zero state",
    )
    steps: Whole = Field(description="largest number of optimizer steps")
    batch: Whole = Field(default=32, description="number of sequences in a batch")
    chunk: Whole = Field(
        default=64, description="number of tokens of a sequence through which one step back-propagates"
    )
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="optimizer")
    learning_rate: Finite = Field(default=2e-3, gt=0, description="learning rate after the warm-up")
    schedule: Literal["constant", "cosine", "inverse_time", "plateau"] = Field(
        default="cosine", description="shape of the learning rate after the warm-up"
    )
    warmup: int = Field(
        default=100, ge=0, strict=True, description="number of warm-up steps, in which the learning rate rises from 0"
    )
    decay_steps: int = Field(
        default=0,
        ge=0,
        strict=True,
        description="number of steps in which the learning rate of `plateau` falls to 0; must be 0 for other schedules",
    )
    patience: int = Field(
        default=0,
        ge=0,
        strict=True,
        description="number of evaluations without improvement after which the learning rate of `plateau` falls; "
        "0: never",
    )
    weight_decay: Finite = Field(default=0.0, ge=0, description="weight decay of the matrices")
    averaged: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the steps, at the end of the training, over which the weights are averaged; in these "
        "steps the averaged weights are validated and saved; 0: no average",
    )
    negatives: int = Field(
        default=0,
        ge=0,
        strict=True,
        description="number of tokens, drawn in each step and shared by its batch, from which the sampled softmax "
        "estimates the sum over the vocabulary; 0: the full softmax",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of each training target that is spread evenly over the vocabulary",
    )
    activation_penalty: Finite = Field(
        default=0.0,
        ge=0,
        description="factor of the mean square of the output layer's input, which is added to the loss",
    )
    slowness_penalty: Finite = Field(
        default=0.0,
        ge=0,
        description="factor of the mean square of the change of the output layer's input from token to token, which is "
        "added to the loss",
    )
    clip_norm: Finite = Field(default=1.0, gt=0, description="largest 2-norm of the gradient")
    project_every: Whole = Field(default=1, description="number of steps between projections of constrained weights")
    evaluate_every: Whole = Field(
        default=500, description="number of steps between evaluations on the validation split"
    )
    checkpoint_every: Whole = Field(default=500, description="number of steps between checkpoints")
    keep_every: int = Field(
        default=0, ge=0, strict=True, description="number of steps between saved copies of the weights; 0: no copies"
    )
    seed: int = Field(default=1, ge=0, strict=True, description="seed of weights, batches and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="`auto` uses CUDA if there is a GPU")
    precision: Literal["float32", "bf16"] = Field(default="float32", description="number format of the forward pass")
    threads: Whole | None = Field(default=None, description="number of torch threads; absent: torch's default")
    proof: ProofConfig | None = Field(
        default=None, description="loss term for predictions that a window cannot prove; absent: no such term"
    )
    teacher: TeacherConfig | None = Field(
        default=None, description="a trained network whose predictions are targets too; absent: none"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.schedule == "plateau" and not 0 < self.decay_steps <= self.steps:
            raise ValueError("schedule = 'plateau' needs 0 < decay_steps <= steps")
        if self.schedule != "plateau" and (self.decay_steps or self.patience):
            raise ValueError("decay_steps and patience belong to schedule = 'plateau'")
        return self


class ExportConfig(Frozen):
    """The keys of the table `[export]`: what the bundle's manifest contains."""

    description: str = Field(default="", description="one-line description in the list of models")
    window: Whole = Field(default=64, description="default window of a request, in tokens")
    max_window: Whole = Field(default=256, description="largest window of a request, in tokens")
    attribution: str | None = Field(default=None, description="authors and licence of the data; absent: none")

    @model_validator(mode="after")
    def _consistent(self) -> ExportConfig:
        if self.window > self.max_window:
            raise ValueError(f"window {self.window} is larger than max_window {self.max_window}")
        return self


class Experiment(Frozen):
    """The contents of one experiment file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the run and of the bundle")
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _can_be_built(self) -> Experiment:
        architecture = self.model.architecture(LEAST_VOCABULARY)
        in_loss = self.model.cache is not None and self.model.cache_in_loss
        for key in ("negatives", "label_smoothing"):
            if getattr(self.training, key) and in_loss:
                raise ValueError(
                    f"training.{key} needs a model without a cache, or cache_in_loss = false: fit the cache after "
                    "training with `wane cache`"
                )
        if self.training.label_smoothing and (self.training.negatives or self.training.teacher is not None):
            raise ValueError("training.label_smoothing needs the full softmax without a teacher")
        if self.training.teacher is not None:
            if self.training.negatives or self.model.cache is not None:
                raise ValueError("training.teacher needs the full softmax: negatives = 0, and no cache")
            if self.data.kind == "events":
                raise ValueError("training.teacher needs text")
        if self.data.train_on == "train_and_valid" and self.training.schedule == "plateau":
            raise ValueError("data.train_on = 'train_and_valid' has no validation, which schedule = 'plateau' needs")
        if self.data.kind == "events" and (self.training.activation_penalty or self.training.slowness_penalty):
            raise ValueError(
                "activation_penalty and slowness_penalty need text, because batches of events have padding"
            )
        if self.training.proof is not None:
            if self.data.kind == "events":
                raise ValueError(
                    "training.proof needs text: its loss is computed at the end of each chunk, where a batch of events "
                    "may have padding"
                )
            gated = [layer for layer in architecture.fading if isinstance(layer, Gated) and layer.candidate == "tanh"]
            if len(architecture.fading) != 1 or not gated or gated[0].block != "residual":
                raise ValueError("training.proof needs cell = 'gated', block = 'residual' and one layer")
            reach = architecture.reach
            if reach >= min(self.training.chunk, self.training.proof.window or self.training.chunk):
                raise ValueError(
                    f"training.proof needs chunks and windows longer than the front's reach, {reach} tokens"
                )
        return self

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """Reads a TOML file. A relative `data.path` is relative to the file's folder. Raises ConfigError, which names
        each invalid key."""
        try:
            experiment = cls.parse(path, tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
        data = experiment.data
        if data.path is not None:
            data = data.model_copy(update={"path": (path.parent / data.path).resolve()})
        training = experiment.training
        if training.teacher is not None:
            run = (path.parent / training.teacher.run).resolve()
            training = training.model_copy(update={"teacher": training.teacher.model_copy(update={"run": run})})
        return experiment.model_copy(update={"data": data, "training": training})

    @classmethod
    def parse(cls, path: Path, record: object) -> Experiment:
        """Validates an experiment that was read from `path`. Raises ConfigError, which names each invalid key."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            faults = error.errors()
            unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
            # A misspelt key is often reported as missing, too, so only unknown keys are named if there are any.
            named = [_unknown(fault) for fault in unknown] or [
                f"{'.'.join(str(part) for part in fault['loc']) or 'file'}: {fault['msg']}" for fault in faults
            ]
            raise ConfigError(f"{path}: {'; '.join(named)}") from error


def _unknown(fault: ErrorDetails) -> str:
    """Returns the message for an unknown key, with the most similar key that exists."""
    schema = Experiment.model_json_schema()
    known = {key for part in (schema, *schema["$defs"].values()) for key in part.get("properties", ())}
    nearest = get_close_matches(str(fault["loc"][-1]), known, n=1)
    name = ".".join(str(part) for part in fault["loc"])
    return f"{name}: there is no such key" + (f"; did you mean {nearest[0]}?" if nearest else "")
