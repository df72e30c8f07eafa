"""The one training loop: batches, optimiser, schedule, projection, validation, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.constraints import project
from models.networks import Network
from training.config import Experiment, TrainingConfig
from training.data import Corpus, batches
from training.errors import RunError
from training.proof import ProofPressure
from training.run_folder import RunFolder, kept_name

LOG_EVERY = 50


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run tells whoever watches it, after every step."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    valid_loss: float | None
    best_loss: float


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one. Raises RunError for `cuda` without one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("training.device is cuda, but torch finds no CUDA device")
    return torch.device(name)


def learning_rate(config: TrainingConfig, step: int, decay_start: int | None) -> float:
    """The learning rate of `step` (0 is the first). `decay_start`: the step at which `plateau` began to decay."""
    peak = config.learning_rate
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    match config.schedule:
        case "constant":
            return peak
        case "inverse_time":
            return peak / (step - config.warmup + 1)
        case "cosine":
            done = (step - config.warmup) / max(1, config.steps - config.warmup)
            return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        case "plateau":
            if decay_start is None or step < decay_start:
                return peak
            return peak * max(0.0, 1 - (step - decay_start + 1) / config.decay_steps)


class Trainer:
    """Trains one experiment on one corpus in one run folder. `run()` yields after every step.

    Raises ResumeError where the folder holds another run.
    """

    def __init__(self, experiment: Experiment, corpus: Corpus, folder: RunFolder) -> None:
        self.corpus, self.folder = corpus, folder
        self.config = experiment.training
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.device = choose_device(self.config.device)
        torch.manual_seed(self.config.seed)
        architecture = experiment.model.architecture(corpus.vocabulary.size)
        self.network = Network(architecture, experiment.model.dropout).to(self.device)
        self.constraints = experiment.model.contractions, experiment.model.spectral_limit
        project(self.network, *self.constraints)
        self.pressure = ProofPressure(self.network, self.config.proof) if self.config.proof is not None else None
        self.optimizer = self._optimizer()
        self.stream, self.chunks = self._lay_out("train", self.config.batch)
        self.valid_stream, self.valid_chunks = self._valid_batches()
        self.step = 0
        self.state = self.network.zero_state(self.config.batch)
        self.best_loss, self.best_step = math.inf, 0
        self.decay_start: int | None = None
        self.proved: float | None = None
        self.end = self.config.steps
        self.wall_s = 0.0
        if folder.begun:
            self._resume(folder.resume(experiment, corpus))
        else:
            folder.begin(experiment, corpus)
            self._maybe_keep()

    def run(self) -> Iterator[Progress]:
        """Trains to the end, one step per item."""
        self.network.train()
        seen, since = 0, time.monotonic()
        while self.step < self.end:
            started = time.monotonic()
            rate = learning_rate(self.config, self.step, self.decay_start)
            loss = self._train_step(rate)
            self.step += 1
            seen += self.config.batch * self.config.chunk
            last = self.step >= self.end
            if self.step % LOG_EVERY == 0 or self.step == 1 or last:
                record: dict[str, object] = {"step": self.step, "loss": loss, "learning_rate": rate}
                self.folder.log(record | ({} if self.proved is None else {"proved": self.proved}))
            evaluated = self.step % self.config.evaluate_every == 0 or last
            valid_loss = self._validate() if evaluated else None
            self._maybe_decay()
            self._maybe_keep()
            self.wall_s += time.monotonic() - started
            if evaluated or self.step % self.config.checkpoint_every == 0:
                self._checkpoint()
            yield Progress(
                self.step, self.end, loss, rate, seen / (time.monotonic() - since), valid_loss, self.best_loss
            )

    def _train_step(self, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens = self._chunk(self.stream, self.step % self.chunks)
        carried = self.config.regime == "recurrent" and self.step % self.chunks != 0
        state = [tensor.detach() for tensor in self.state] if carried else None
        with self._autocast():
            hidden, self.state = self.network(tokens[:-1], state)
            logits = self.network.logits(hidden)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[1:].flatten())
        if not math.isfinite(value := loss.item()):
            raise FloatingPointError(f"the loss is {value} at step {self.step + 1}: try a smaller learning_rate")
        if self.pressure is not None:
            pressed, self.proved = self.pressure(self.step)
            loss = loss + pressed
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient is {norm} at step {self.step + 1}: try a smaller learning_rate")
        self.optimizer.step()
        if (self.step + 1) % self.config.project_every == 0:
            project(self.network, *self.constraints)
        return value

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss over the validation split, recurrent or as the regime trains it; keeps the best weights."""
        project(self.network, *self.constraints)
        self.network.eval()
        total, state = 0.0, None
        for index in range(self.valid_chunks):
            tokens = self._chunk(self.valid_stream, index)
            with self._autocast():
                hidden, after = self.network(tokens[:-1], state)
                logits = self.network.logits(hidden)
            state = after if self.config.regime == "recurrent" else None
            total += functional.cross_entropy(logits.float().flatten(0, 1), tokens[1:].flatten()).item()
        self.network.train()
        loss = total / self.valid_chunks
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step
            self.folder.save("best.pt", {"weights": self.network.weights(), "step": self.step, "valid_loss": loss})
        self.folder.log(
            {
                "step": self.step,
                "valid_loss": loss,
                "best_loss": self.best_loss,
                "wall_s": round(self.wall_s, 1),
            }
        )
        return loss

    def _maybe_decay(self) -> None:
        """`plateau`: begins the decay once validation has stopped improving, or when only its steps are left."""
        if self.config.schedule != "plateau" or self.decay_start is not None:
            return
        waited = (self.step - self.best_step) // self.config.evaluate_every
        stalled = self.config.patience > 0 and waited >= self.config.patience
        if stalled or self.step >= self.config.steps - self.config.decay_steps:
            self.decay_start = self.step
            self.end = min(self.config.steps, self.step + self.config.decay_steps)
            self.folder.log({"step": self.step, "decay_start": self.step, "stalled": stalled})

    def _maybe_keep(self) -> None:
        """`keep_every`: the weights of this step, in a file of their own; those of the start too."""
        if self.config.keep_every and self.step % self.config.keep_every == 0:
            self.folder.save(kept_name(self.step), {"weights": self.network.weights(), "step": self.step})

    def _optimizer(self) -> torch.optim.Optimizer:
        """Weight decay on matrices only, not on biases and gains."""
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.config.learning_rate)
        return torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=(0.9, 0.99))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _lay_out(self, split: str, batch: int) -> tuple[NDArray[np.int64], int]:
        return batches(self.corpus.streams[split], batch, self.config.chunk, split)

    def _valid_batches(self) -> tuple[NDArray[np.int64], int]:
        """As many parallel streams as training has, or as few as the validation split has room for."""
        tokens = len(self.corpus.streams["valid"]) - 1
        return self._lay_out("valid", max(1, min(self.config.batch, tokens // self.config.chunk)))

    def _chunk(self, rows: NDArray[np.int64], index: int) -> Tensor:
        chunk = self.config.chunk
        part = np.ascontiguousarray(rows[index * chunk : (index + 1) * chunk + 1])
        return torch.from_numpy(part).to(self.device)

    def _checkpoint(self) -> None:
        self.folder.save(
            "checkpoint.pt",
            {
                "step": self.step,
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "state": self.state,
                "best_loss": self.best_loss,
                "best_step": self.best_step,
                "decay_start": self.decay_start,
                "end": self.end,
                "wall_s": self.wall_s,
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
                "data": sorted(self.corpus.hashes.items()),
            },
        )

    def _resume(self, saved: dict[str, Any]) -> None:
        """Goes on from a checkpoint; a decay that had begun goes on to its end, whatever `steps` says now."""
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.state = saved["step"], [tensor.to(self.device) for tensor in saved["state"]]
        self.best_loss, self.best_step = saved["best_loss"], saved["best_step"]
        self.wall_s = saved["wall_s"]
        if saved["decay_start"] is not None:
            self.decay_start, self.end = saved["decay_start"], saved["end"]
        torch.set_rng_state(saved["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state_all(saved["random_cuda"])
