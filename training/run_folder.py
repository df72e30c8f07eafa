"""A run folder: all that a training leaves behind, and what is checked before it is used again.

    experiment.json   the experiment, as it was last run
    tokenizer.json    the vocabulary
    origin.jsonl      a line each time the run was begun or gone on with: command, commit, versions, hardware
    log.jsonl         a line for every logged step and every evaluation
    checkpoint.pt     everything that a resumed run needs to go on as if it had never stopped
    best.pt           the weights with the lowest validation loss
    weights-N.pt      the weights after step N, where training.keep_every asks for them
    quality.json      the last evaluation, with what it was of

Files are written whole or not at all; checkpoints are loaded with weights_only.
"""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import torch

from wane.models.manifest import Quality
from wane.training.config import Experiment
from wane.training.data import Corpus
from wane.training.errors import ResumeError, RunError
from wane.training.origin import Origin

FREE_TO_CHANGE = {("training", "steps"), ("training", "threads"), ("training", "device"), ("data", "path")}


def kept_name(step: int) -> str:
    """The file of the weights after `step`."""
    return f"weights-{step}.pt"


class RunFolder:
    """One run's files, under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.path / "checkpoint.pt").exists()

    # -- while training

    def begin(self, experiment: Experiment, corpus: Corpus) -> None:
        """Starts afresh, over whatever a run without a checkpoint has left."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}") from error
        for name in ("best.pt", "quality.json", "origin.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        (self.path / "tokenizer.json").write_text(corpus.tokenizer_json, encoding="utf-8")
        (self.path / "log.jsonl").write_text("")
        self._write_experiment(experiment)

    def resume(self, experiment: Experiment, corpus: Corpus) -> dict[str, Any]:
        """The checkpoint of the same experiment on the same data; `steps` may have been raised.

        Raises ResumeError naming what differs.
        """
        before, now = self.experiment().model_dump(mode="json"), experiment.model_dump(mode="json")
        for part in ("model", "data", "training"):
            for key, value in now[part].items():
                if before[part][key] != value and (part, key) not in FREE_TO_CHANGE:
                    raise ResumeError(
                        f"{self.path} holds a run with {part}.{key} = {before[part][key]!r}, not {value!r}"
                    )
        checkpoint = self.load("checkpoint.pt")
        self.check_data(checkpoint, corpus)
        if experiment.training.steps < checkpoint["step"]:
            raise ResumeError(
                f"{self.path} is at step {checkpoint['step']}, past training.steps = {experiment.training.steps}"
            )
        self._write_experiment(experiment)
        self._drop_lines_after(checkpoint["step"])
        return checkpoint

    def log(self, record: dict[str, object]) -> None:
        """Appends a line to the log."""
        with (self.path / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")

    def save(self, name: str, record: dict[str, Any]) -> None:
        """Writes a checkpoint, whole or not at all."""
        partial = self.path / f"{name}.partial"
        torch.save(record, partial)
        partial.replace(self.path / name)

    def add_origin(self, origin: Origin) -> None:
        """Records how the run was begun or gone on with."""
        with (self.path / "origin.jsonl").open("a", encoding="utf-8") as file:
            file.write(origin.model_dump_json() + "\n")

    # -- afterwards

    def experiment(self) -> Experiment:
        """The experiment of this run. Raises RunError where this is no run folder."""
        path = self.path / "experiment.json"
        try:
            return Experiment.parse(path, json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise RunError(f"{self.path} is no run folder: {path.name}: {error.strerror}") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RunError(f"{path}: cannot be read as JSON: {error}") from error

    def tokenizer_json(self) -> str:
        """The vocabulary's file."""
        try:
            return (self.path / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{self.path / 'tokenizer.json'} cannot be read: {error}") from error

    def origins(self) -> list[Origin]:
        """How the run was begun and gone on with, in order."""
        try:
            lines = (self.path / "origin.jsonl").read_text(encoding="utf-8").splitlines()
            return [Origin.model_validate_json(line) for line in lines]
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / 'origin.jsonl'} cannot be read: {error}") from error

    def load(self, name: str) -> dict[str, Any]:
        """A checkpoint or weights, on the CPU. Raises ResumeError where the file is missing or damaged."""
        try:
            saved: dict[str, Any] = torch.load(self.path / name, weights_only=True, map_location="cpu")
        except FileNotFoundError as error:
            raise ResumeError(f"{self.path} holds no {name}: has it been trained past one evaluation?") from error
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ResumeError(f"{self.path / name} is damaged: {error}") from error
        return saved

    def check_data(self, checkpoint: dict[str, Any], corpus: Corpus) -> None:
        """Raises ResumeError unless the run was trained on `corpus`."""
        trained_on = dict(checkpoint["data"])
        for name in sorted(trained_on.keys() | corpus.hashes.keys()):
            if trained_on.get(name) != corpus.hashes.get(name):
                raise ResumeError(f"{self.path} holds a run on other data: {name} is not the file it was trained on")

    def write_quality(self, found: Quality, best_step: int, positions: int) -> None:
        """Keeps an evaluation of the weights of `best_step`."""
        record = {"best_step": best_step, "positions": positions, "quality": found.model_dump(mode="json")}
        (self.path / "quality.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def quality(self, best_step: int, positions: int) -> Quality | None:
        """The kept evaluation, if it is of these weights and at least that many positions."""
        try:
            record = json.loads((self.path / "quality.json").read_text(encoding="utf-8"))
            if record["best_step"] != best_step or record["positions"] < positions:
                return None
            return Quality.model_validate(record["quality"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_experiment(self, experiment: Experiment) -> None:
        (self.path / "experiment.json").write_text(experiment.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def _drop_lines_after(self, step: int) -> None:
        """Forgets log lines that a killed run wrote after its last checkpoint: they will be written again."""
        path = self.path / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if _step_of(line) <= step), encoding="utf-8")


def _step_of(line: str) -> float:
    """The step of a log line; a line that the kill cut short counts as later than all."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf
