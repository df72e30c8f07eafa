"""Trains and evaluates one network of the paper's experiments.

A run is stored in two files: `NAME.json` when it is finished, and before that `NAME.pt`, from which it goes on if the
program is started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.summary import commit, digits, write_json
from research.paper.corpora import Corpus, Sequences
from research.paper.network import Cell, PaperNetwork, Shape
from research.paper.spans import span_f1

CONTRACTION = 0.98
"""The limit of a stable network's contraction factor."""
WINDOWS = (1, 2, 4, 8, 16, 32, 64)
POSITIONS = 2000
"""The number of positions of a stream at which windows are measured."""
STREAM_BATCH = 4096
"""The number of positions of a stream that are evaluated at once."""
BATCH = 32
"""The number of sequences that are evaluated at once."""
SNAPSHOTS = 20
SAVE_EVERY_S = 60.0
CLIPPED = 1.0
"""The largest norm of a gradient."""

Advance = Callable[[], None]


@dataclass(frozen=True)
class Recipe:
    """How a task's networks are trained.

    batch: sequences, or parts of a stream, at once. chunk: the positions of a stream between two steps of the
    optimiser. epochs: passes over the training split. patience: epochs without a better validation loss after which
    training ends. project_every: steps between two projections of a stable network.
    """

    shapes: dict[Cell, Shape]
    learning_rate: float
    batch: int
    epochs: int
    patience: int
    chunk: int = 35
    project_every: int = 1


@dataclass(frozen=True)
class Run:
    """One training. window: the number of inputs that the network reads for each target in training, from the zero
    state; None for all inputs. In a stream, a window begins at every `window`-th position, so a target has at most that
    many inputs."""

    task: str
    cell: Cell
    stable: bool
    window: int | None
    bidirectional: bool = False
    seed: int = 1

    @property
    def name(self) -> str:
        """The name of the run's files."""
        regime = "recurrent" if self.window is None else f"window{self.window}"
        parts = [self.task, self.cell, "stable" if self.stable else "free", regime]
        return "-".join([*parts, *(["bidirectional"] if self.bidirectional else []), f"seed{self.seed}"])


def train(corpus: Corpus, recipe: Recipe, run: Run, folder: Path, advance: Advance) -> dict[str, Any]:
    """Returns the record of a run from its file, or trains the network, evaluates it, and writes the file. Calls
    `advance` after each epoch."""
    record = finished(corpus, recipe, run, folder)
    if record is not None:
        for _ in range(recipe.epochs):
            advance()
        return record
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(corpus, recipe, run, folder)
    training.finish(advance)
    network = training.network
    windows = sorted({*WINDOWS, *([] if run.window is None else [run.window])})
    record = {
        **_described(corpus, recipe, run),
        "commit": commit(),
        "epochs": training.epoch,
        "seconds": round(training.seconds, 1),
        "weights": sum(tensor.numel() for tensor in network.parameters()),
        "factor": None if (factor := network.factor()) is None else digits(factor),
        "by_the_paper": network.follows_the_paper(),
        **{split: evaluate(network, corpus, split, windows) for split in ("valid", "test")},
    }
    torch.save({"network": network.state_dict(), "snapshots": training.snapshots}, folder / f"{run.name}.weights.pt")
    write_json(folder / f"{run.name}.json", record)
    training.checkpoint.unlink(missing_ok=True)
    return record


def finished(corpus: Corpus, recipe: Recipe, run: Run, folder: Path) -> dict[str, Any] | None:
    """Returns the record of a run that is finished with this recipe and these data; None if there is none."""
    path = folder / f"{run.name}.json"
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_bytes())
    described = _described(corpus, recipe, run)
    return record if {name: record[name] for name in described} == json.loads(json.dumps(described)) else None


def _described(corpus: Corpus, recipe: Recipe, run: Run) -> dict[str, Any]:
    return {"run": asdict(run), "recipe": asdict(recipe), "data": dict(corpus.hashes)}


class Training:
    """The state of a training. `network` has the weights with the best validation loss once it is finished."""

    def __init__(self, corpus: Corpus, recipe: Recipe, run: Run, folder: Path) -> None:
        torch.manual_seed(run.seed)
        self.corpus, self.recipe, self.run = corpus, recipe, run
        self.network = PaperNetwork(corpus, run.cell, recipe.shapes[run.cell], run.bidirectional)
        self.optimiser = torch.optim.Adam(self.network.parameters(), recipe.learning_rate)
        self.checkpoint = folder / f"{run.name}.pt"
        self.epoch, self.index, self.steps, self.seconds = 0, 0, 0, 0.0
        self.best, self.best_epoch = float("inf"), 0
        self.best_weights = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.state: tuple[Tensor, ...] | None = None
        self.snapshots: dict[int, Tensor] = {0: self._recurrent_weights()}
        total = recipe.epochs * sum(1 for _ in self._batches(0))
        self._snapshot_at = {int(step) for step in np.geomspace(1, max(total, 2), SNAPSHOTS)}
        if self.checkpoint.exists():
            self._restore()

    def finish(self, advance: Advance) -> None:
        """Trains to the end."""
        for _ in range(self.epoch):
            advance()
        while self.epoch < self.recipe.epochs and self.epoch - self.best_epoch < self.recipe.patience:
            self._train_epoch()
            self._project()
            loss = self._validation_loss()
            self.epoch, self.index, self.state = self.epoch + 1, 0, None
            if loss < self.best:
                self.best, self.best_epoch = loss, self.epoch
                self.best_weights = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
            self._save()
            advance()
        for _ in range(self.recipe.epochs - self.epoch):
            advance()
        self.network.load_state_dict(self.best_weights)

    def _train_epoch(self) -> None:
        self.network.train()
        began = time.process_time()
        saved = time.monotonic()
        for index, (inputs, targets, lengths) in enumerate(self._batches(self.epoch)):
            if index < self.index:
                continue
            torch.manual_seed(self.run.seed + 1_000_003 * self.steps)  # dropout is the same after an interruption
            loss = self._loss(inputs, targets, lengths)
            self.optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), CLIPPED)
            self.optimiser.step()
            self.steps, self.index = self.steps + 1, index + 1
            if self.steps % self.recipe.project_every == 0:
                self._project()
            if self.steps in self._snapshot_at:
                self.snapshots[self.steps] = self._recurrent_weights()
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.seconds, began = self.seconds + time.process_time() - began, time.process_time()
                self._save()
                saved = time.monotonic()
        self.seconds += time.process_time() - began

    def _loss(self, inputs: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        if self.corpus.is_stream:
            state = self.state if self.run.window is None else None
            y, after = self.network.forwards(self.network.embedded(inputs), state)
            self.state = tuple(tensor.detach() for tensor in after)
            features = self.network.dropout(y).flatten(0, 1)
            return self.network.losses(features, targets.flatten(0, 1)).mean()
        features = self.network.features(inputs, lengths, self.run.window)
        read = torch.arange(len(inputs))[:, None] < lengths
        return self.network.losses(features[read], targets[read]).mean()

    @torch.no_grad()
    def _validation_loss(self) -> float:
        """Returns the mean loss of the validation split: of sequences in the window of the training, of a stream with
        all inputs."""
        if self.corpus.is_stream:
            return float(evaluate(self.network, self.corpus, "valid", windows=())["loss"])
        self.network.eval()
        loss, _ = _sequence_losses(self.network, self.corpus, self.corpus.splits["valid"], self.run.window, BATCH)
        return digits(loss)

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields inputs (T, B, ...), targets (T, B, ...) and lengths (B)."""
        sequences, batch = self.corpus.splits["train"], self.recipe.batch
        if self.corpus.is_stream:
            ((inputs, targets),) = sequences
            length = len(inputs) // batch
            lanes = [one[: length * batch].reshape(batch, length).T for one in (inputs, targets)]
            chunk = self.recipe.chunk if self.run.window is None else self.run.window
            for begin in range(0, length, chunk):
                part = [lane[begin : begin + chunk] for lane in lanes]
                yield part[0], part[1], torch.full((batch,), len(part[0]))
            return
        order = np.random.default_rng((self.run.seed, epoch)).permutation(len(sequences))
        for begin in range(0, len(order), batch):
            yield padded([sequences[index] for index in order[begin : begin + batch]])

    def _project(self) -> None:
        if self.run.stable:
            self.network.project(CONTRACTION)

    def _recurrent_weights(self) -> Tensor:
        """Returns the weights of the recurrent layers, (N)."""
        return torch.cat(
            [tensor.detach().flatten() for each in self.network.directions for tensor in each.parameters()]
        )

    FIELDS = ("epoch", "index", "steps", "seconds", "best", "best_epoch", "best_weights", "state", "snapshots")

    def _save(self) -> None:
        fields = {name: getattr(self, name) for name in self.FIELDS}
        building = self.checkpoint.with_suffix(".part")
        torch.save({**fields, "network": self.network.state_dict(), "optimiser": self.optimiser.state_dict()}, building)
        building.replace(self.checkpoint)

    def _restore(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        for name in self.FIELDS:
            setattr(self, name, saved[name])
        self.network.load_state_dict(saved["network"])
        self.optimiser.load_state_dict(saved["optimiser"])


def padded(sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the inputs and the targets of sequences, (T, B, ...) each, and the lengths, (B)."""
    inputs, targets = (pad_sequence([pair[side] for pair in sequences]) for side in (0, 1))
    return inputs, targets, torch.tensor([len(pair[0]) for pair in sequences])


@torch.no_grad()
def evaluate(
    network: PaperNetwork, corpus: Corpus, split: str, windows: Sequence[int] = WINDOWS, batch: int = BATCH
) -> dict[str, Any]:
    """Returns the mean loss of a split in nats a position, and the loss in windows: `loss`, `by_k`. For slot tags, also
    the F1 of spans in per cent: `f1`, `f1_by_k`."""
    network.eval()
    sequences = corpus.splits[split]
    if corpus.is_stream:
        ((inputs, targets),) = sequences
        losses = _stream_losses(network, inputs, targets)
        found: dict[str, Any] = {"loss": digits(float(losses.mean()))}
        longest = max(windows, default=0)
        if windows and len(inputs) > longest:
            ends = torch.from_numpy(np.linspace(longest, len(inputs) - 1, POSITIONS).astype(np.int64)).unique()
            found["by_k"] = {}
            for k in windows:
                places = ends - torch.arange(k - 1, -1, -1)[:, None]
                y, _ = network.forwards(network.embedded(inputs[places]))
                moved = network.losses(y[-1], targets[ends]) - losses[ends]
                found["by_k"][k] = digits(float(losses.mean() + moved.mean()))
        return found
    loss, f1 = _sequence_losses(network, corpus, sequences, None, batch)
    by_k = {k: _sequence_losses(network, corpus, sequences, k, batch) for k in windows}
    found = {"loss": digits(loss), "by_k": {k: digits(each) for k, (each, _) in by_k.items()}}
    if corpus.tags:
        found |= {"f1": digits(f1), "f1_by_k": {k: digits(each) for k, (_, each) in by_k.items()}}
    return found


def _stream_losses(network: PaperNetwork, inputs: Tensor, targets: Tensor) -> Tensor:
    state: tuple[Tensor, ...] | None = None
    losses = []
    for begin in range(0, len(inputs), STREAM_BATCH):
        part = slice(begin, begin + STREAM_BATCH)
        y, state = network.forwards(network.embedded(inputs[part, None]), state)
        losses.append(network.losses(y[:, 0], targets[part]))
    return torch.cat(losses)


def _sequence_losses(
    network: PaperNetwork, corpus: Corpus, sequences: Sequences, window: int | None, batch: int
) -> tuple[float, float]:
    """Returns the mean loss, and the F1 of spans (0 without tags)."""
    total, count = 0.0, 0
    predicted: list[list[str]] = []
    expected: list[list[str]] = []
    for begin in range(0, len(sequences), batch):
        some = sequences[begin : begin + batch]
        inputs, targets, lengths = padded(some)
        features = network.features(inputs, lengths, window)
        read = torch.arange(len(inputs))[:, None] < lengths
        losses = network.losses(features[read], targets[read])
        total, count = total + float(losses.sum()), count + len(losses)
        if corpus.tags:
            assert network.head is not None
            best = network.head(features).argmax(-1)
            for index, length in enumerate(lengths.tolist()):
                predicted.append([corpus.tags[tag] for tag in best[:length, index].tolist()])
                expected.append([corpus.tags[tag] for tag in targets[:length, index].tolist()])
    return total / count, 100 * span_f1(predicted, expected) if corpus.tags else 0.0
