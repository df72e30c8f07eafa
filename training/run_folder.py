"""A run folder: the files of one training run. The folder is checked before a run resumes from it or is exported.

    experiment.json   the experiment of the run's last start or resume
    tokenizer.json    the vocabulary
    origin.jsonl      a line per start or resume of the run: command, commit, versions, hardware
    log.jsonl         a line per logged step and per evaluation
    checkpoint.pt     all state that a resumed run needs to continue as if it had not been interrupted
    best.pt           the weights with the lowest validation loss
    weights-N.pt      the weights after step N, if training.keep_every is set
    quality.json      the last evaluation, with its step and number of positions
    transitions.json  the fitted weights of the mixture with transition tables (events only)
    served.json       the ranking metrics of a server's answers, and of the model (events only)
    rankings.json     the ranking metrics of the model and the baselines in the last evaluation (events only)

Checkpoints and weights are written atomically and loaded with weights_only. A run can be trained where only torch and
numpy are installed (`benchmarks/gpu/train.py`), so the module imports what needs other packages where it is used.
"""

from __future__ import annotations

import json
import math
import pickle
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wane.models.networks import Network
from wane.training.errors import ResumeError, RunError

if TYPE_CHECKING:
    from wane.models.manifest import Quality
    from wane.training.config import Experiment
    from wane.training.data import Corpus
    from wane.training.origin import Origin
    from wane.training.rankings.metrics import Rankings
    from wane.training.rankings.transitions import TransitionWeights

FREE_TO_CHANGE = {("training", "steps"), ("training", "threads"), ("training", "device"), ("data", "path")}


TRANSITIONS = "transitions.json"


def kept_name(step: int) -> str:
    """Returns the file name of the weights after `step`."""
    return f"weights-{step}.pt"


class RunFolder:
    """The files of one run, in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return (self.path / "checkpoint.pt").exists()

    # -- while training

    def begin(self, experiment: Experiment, corpus: Corpus) -> None:
        """Starts a run. Overwrites the files of an earlier run that wrote no checkpoint."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be created: {error.strerror}") from error
        for name in ("best.pt", "quality.json", "rankings.json", TRANSITIONS, "origin.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        (self.path / "tokenizer.json").write_text(corpus.tokenizer_json, encoding="utf-8")
        (self.path / "log.jsonl").write_text("")
        self._write_experiment(experiment)

    def resume(self, experiment: Experiment, corpus: Corpus) -> dict[str, Any]:
        """Returns the checkpoint to resume from. The folder's experiment and data must be equal to the given ones,
        except for the keys in `FREE_TO_CHANGE`.

        Raises ResumeError, which names the difference.
        """
        before, now = self.experiment().model_dump(mode="json"), experiment.model_dump(mode="json")
        for part in ("model", "data", "training"):
            for key, value in now[part].items():
                if before[part][key] != value and (part, key) not in FREE_TO_CHANGE:
                    raise ResumeError(
                        f"{self.path} holds a run with {part}.{key} = {before[part][key]!r}, not {value!r}"
                    )
        checkpoint = self.load("checkpoint.pt")
        self.check_data(checkpoint, corpus.hashes)
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
        """Writes a checkpoint or weights atomically to the file `name`. Raises OSError with the file's path."""
        partial = self.path / f"{name}.partial"
        buffer = BytesIO()
        torch.save(record, buffer)  # to a path, torch.save reports a full disk as a RuntimeError without its reason
        try:
            partial.write_bytes(buffer.getbuffer())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(partial)) from error
        partial.replace(self.path / name)

    def add_origin(self, origin: Origin) -> None:
        """Appends a start or resume of the run to `origin.jsonl`."""
        with (self.path / "origin.jsonl").open("a", encoding="utf-8") as file:
            file.write(origin.model_dump_json() + "\n")

    # -- after training

    def experiment(self) -> Experiment:
        """Reads the run's experiment. Raises RunError if this is not a run folder."""
        from wane.training.config import Experiment

        path = self.path / "experiment.json"
        try:
            return Experiment.parse(path, json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise RunError(f"{self.path} is not a run folder: {path.name}: {error.strerror}") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RunError(f"{path}: cannot be read as JSON: {error}") from error

    def tokenizer_json(self) -> str:
        """Reads the vocabulary file. Raises RunError."""
        try:
            return (self.path / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{self.path / 'tokenizer.json'} cannot be read: {error}") from error

    def origins(self) -> list[Origin]:
        """Reads the starts and resumes of the run, in order. Raises RunError."""
        from wane.training.origin import Origin

        try:
            lines = (self.path / "origin.jsonl").read_text(encoding="utf-8").splitlines()
            return [Origin.model_validate_json(line) for line in lines]
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / 'origin.jsonl'} cannot be read: {error}") from error

    def load(self, name: str) -> dict[str, Any]:
        """Loads a checkpoint or weights on the CPU. Raises ResumeError if the file is missing or damaged."""
        try:
            saved: dict[str, Any] = torch.load(self.path / name, weights_only=True, map_location="cpu")
        except FileNotFoundError as error:
            raise ResumeError(f"{self.path} has no {name}: the run has not reached its first evaluation") from error
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ResumeError(f"{self.path / name} is damaged: {error}") from error
        return saved

    def network(self, vocabulary_size: int) -> tuple[Network, dict[str, Any]]:
        """Returns the network with the best weights, and the record of `best.pt`. Raises ResumeError or RunError."""
        best = self.load("best.pt")
        network = Network(self.experiment().model.architecture(vocabulary_size))
        try:
            network.load_weights(best["weights"])
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{self.path / 'best.pt'} does not fit the experiment: {error}") from error
        return network.eval(), best

    def check_data(self, checkpoint: dict[str, Any], hashes: dict[str, str]) -> None:
        """Raises ResumeError unless the run was trained on the files with these names and SHA-256 hashes."""
        trained_on = dict(checkpoint["data"])
        other = sorted(name for name, sha256 in hashes.items() if trained_on.get(name) != sha256)
        absent = sorted(trained_on.keys() - hashes.keys())
        if other:
            before = "its content has changed" if other[0] in trained_on else ", ".join(absent or sorted(trained_on))
            fault = f"{other[0]} is not the file on which the run was trained ({before})"
        elif absent:
            fault = f"{absent[0]}, on which the run was trained, is missing"
        else:
            return
        raise ResumeError(f"{self.path} holds a run on other data: {fault}")

    def write_quality(self, found: Quality, best_step: int, positions: int, transitions: bool = False) -> None:
        """Writes the evaluation of the weights after step `best_step`. `positions`: the requested number of window
        positions. `transitions`: whether the model was mixed with transition tables."""
        record = {"best_step": best_step, "positions": positions, "quality": found.model_dump(mode="json")}
        record["transitions"] = transitions
        (self.path / "quality.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def write_rankings(self, rankings: dict[str, Rankings], name: str = "rankings.json") -> None:
        """Writes the ranking metrics of an evaluation, by split, to the file `name`."""
        record = {split: found.model_dump(mode="json") for split, found in rankings.items()}
        (self.path / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def write_transitions(self, fitted: TransitionWeights) -> None:
        """Writes the weights of the mixture with transition tables."""
        (self.path / TRANSITIONS).write_text(fitted.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def keep_transitions(self, chosen: RunFolder) -> None:
        """Copies the weights of the mixture with transition tables from the run that chose them, if it has any."""
        if (chosen.path / TRANSITIONS).is_file():
            self.write_transitions(chosen.transitions())

    def transitions(self) -> TransitionWeights:
        """Reads the weights of the mixture with transition tables. Raises RunError."""
        from wane.training.rankings.transitions import TransitionWeights

        path = self.path / TRANSITIONS
        try:
            return TransitionWeights.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RunError(
                f"{self.path} has no {path.name}: run `wane evaluate RUN --transitions` on the run of --after first, "
                "then the same `wane train --after RUN` again, which copies the file"
            ) from error
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def quality(self, best_step: int, positions: int, transitions: bool = False) -> Quality | None:
        """Returns the written evaluation if it is of the weights after step `best_step`, has at least `positions`
        window positions, and is with or without transition tables as asked. Otherwise returns None."""
        from wane.models.manifest import Quality

        try:
            record = json.loads((self.path / "quality.json").read_text(encoding="utf-8"))
            if record.get("transitions", False) != transitions:
                return None
            if record["best_step"] != best_step or record["positions"] < positions:
                return None
            return Quality.model_validate(record["quality"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_experiment(self, experiment: Experiment) -> None:
        (self.path / "experiment.json").write_text(experiment.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def _drop_lines_after(self, step: int) -> None:
        """Removes the log lines that a killed run wrote after its last checkpoint. The resumed run writes these lines
        again."""
        path = self.path / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if _step_of(line) <= step), encoding="utf-8")


def _step_of(line: str) -> float:
    """Returns the step of a log line, or infinity for an incomplete line."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf
