"""The training loop: batches, optimiser, schedule, projection, validation, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wane.models.constraints import project
from wane.models.networks import Network
from wane.training.device import choose_device
from wane.training.errors import ResumeError, RunError
from wane.training.group import ALONE, Group
from wane.training.lanes import Batch, Lanes, lanes_of
from wane.training.losses.sampled_softmax import SampledSoftmax, full_losses, token_losses
from wane.training.losses.teacher import Teacher
from wane.training.proof import ProofPressure
from wane.training.run_folder import RunFolder, kept_name
from wane.training.schedule import learning_rate
from wane.training.sessions import Sessions
from wane.training.weight_average import WeightAverage

if TYPE_CHECKING:
    from wane.models.manifest import CacheModel
    from wane.training.cache import CacheTraining
    from wane.training.config import Experiment
    from wane.training.data import Corpus

LOG_EVERY = 50


@dataclass(frozen=True, slots=True)
class Progress:
    """The figures of one training step."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    valid_loss: float | None
    best_loss: float


class Trainer:
    """Trains one experiment on one corpus in one run folder. `run()` yields after every step.

    In a group of processes each process has some lanes (parallel streams) of every batch, and the states of these
    lanes. Weights, losses and the decisions based on them are the same in all processes. Only the first process writes
    the folder. Raises ResumeError if the folder contains another run.
    """

    def __init__(
        self,
        experiment: Experiment,
        corpus: Corpus,
        folder: RunFolder,
        group: Group = ALONE,
        cache: CacheModel | None = None,
    ) -> None:
        """cache: the fitted cache of an earlier run, for a run without validation."""
        self.corpus, self.folder, self.group = corpus, folder, group
        self.config = experiment.training
        self.cache_in_loss = experiment.model.cache_in_loss
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        with group.together():
            self.device = choose_device(self.config.device, group)
            torch.manual_seed(self.config.seed)
            architecture = experiment.model.architecture(corpus.vocabulary.size)
            self.network = Network(
                architecture,
                experiment.model.dropout,
                embedding_dropout=experiment.model.embedding_dropout,
                weight_dropout=experiment.model.weight_dropout,
                locked=experiment.model.locked,
            ).to(self.device)
            self.constraints = experiment.model.contractions, experiment.model.spectral_limit
            project(self.network, *self.constraints)
            self.pressure = ProofPressure(self.network, self.config.proof) if self.config.proof is not None else None
            self.optimizer = self._optimizer()
            self.average = WeightAverage(self.network)
            self.train_lanes = self._lanes("train", self._train_width(), self.config.seed)
            self.valid_lanes = self._lanes("valid", self._valid_width(), None)
            self.judged = self._judged()
            self.cache = self._cache(experiment)
            if self.cache is not None and cache is not None:
                self.cache.model = cache
            self.sampled = self._sampled_softmax()
            self.teacher = self._teacher()
        self.step = self.step_tokens = 0
        self.state = self.network.zero_state(self.train_lanes.count)
        self.best_loss, self.best_step = math.inf, 0
        self.decay_start: int | None = None
        self.proved: float | None = None
        self.end = self.config.steps
        self.wall_s = 0.0
        saved = group.from_first(lambda: self._open(experiment))
        if saved is not None:
            self._resume(saved)
        else:
            self._maybe_keep()
        self.parallel = group.parallel(self.network)

    def run(self) -> Iterator[Progress]:
        """Trains to the last step. Yields after every step."""
        self.network.train()
        seen, since = 0, time.monotonic()
        while self.step < self.end:
            started = time.monotonic()
            rate = learning_rate(self.config, self.step, self.decay_start)
            loss = self._train_step(rate)
            self.step += 1
            seen += self.step_tokens
            last = self.step >= self.end
            if self.step % LOG_EVERY == 0 or self.step == 1 or last:
                record: dict[str, object] = {"step": self.step, "loss": loss, "learning_rate": rate}
                self._log(record | ({} if self.proved is None else {"proved": self.proved}))
            self._average()
            evaluated = last or (self.corpus.validated and self.step % self.config.evaluate_every == 0)
            valid_loss = self._validate() if evaluated and self.corpus.validated else None
            if evaluated and not self.corpus.validated:
                self._save_last()
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
        batch = self.train_lanes.batch(self.step, self.device)
        self.step_tokens = batch.tokens
        carried = self.config.regime == "recurrent" and not batch.fresh
        state = [tensor.detach() for tensor in self.state] if carried else None
        self.group.seed_noise(self.config.seed, self.step)
        with self._autocast():
            hidden, self.state = self.parallel(batch.inputs, state)
            losses = self._losses(batch, hidden, carried)
        positions = batch.chosen_positions()
        if self.cache is not None and self.cache_in_loss:
            losses = self.cache.losses("train", positions, losses)
        loss = losses.mean() if losses.numel() else hidden.sum() * 0
        means = [loss.item()]
        loss = loss + self._penalty(hidden)
        if self.pressure is not None:
            shares = None if self.cache is None else self.cache.shares("train", batch.positions[-1])
            pressed, proved = self.pressure(self.step, shares)
            loss = loss + pressed
            means.append(proved)
        # DistributedDataParallel averages the gradients of the processes with equal weights. This factor weights each
        # process by its share of the tokens.
        loss = loss * (batch.share * self.group.size)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        value, *rest = self.group.total([batch.share * mean for mean in means])
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {self.step + 1}: try a smaller learning_rate")
        self.proved = rest[0] if rest else None
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient is {norm} at step {self.step + 1}: try a smaller learning_rate")
        self.optimizer.step()
        if (self.step + 1) % self.config.project_every == 0:
            project(self.network, *self.constraints)
        return value

    def _average(self) -> None:
        """Adds the weights to their average in the last steps, of which `averaged` is the share. A run that is resumed
        with more steps begins the average again if it has earlier weights."""
        begin = self.end * (1 - self.config.averaged)
        if self.step - self.average.count <= begin:
            self.average.clear()
        if self.step > begin:
            self.average.add()

    def _save_last(self) -> None:
        """Saves the weights, or their average, as the best ones: of a run without validation these are the last."""
        project(self.network, *self.constraints)
        with self.average.in_place():
            project(self.network, *self.constraints)
            self.best_step = self.step
            self._save("best.pt", {"weights": self.network.weights(), "step": self.step} | self._saved_cache())

    def _judged(self) -> NDArray[np.bool_] | None:
        """Returns the positions of the validation split whose losses count, bool (positions,): those that predict the
        last event of a session, or None for all."""
        if not self.corpus.last_only:
            return None
        stream = self.corpus.streams["valid"]
        counted = np.zeros(len(stream), np.bool_)
        counted[Sessions(stream, self.corpus.vocabulary.eos_id, self.corpus.start).last_inputs()] = True
        return counted

    def _validate(self) -> float:
        """Returns the mean loss of the weights, or of their average if there is one, over the validation split."""
        project(self.network, *self.constraints)
        with self.average.in_place():
            return self._validate_weights()

    @torch.no_grad()
    def _validate_weights(self) -> float:
        """Returns the mean loss over the validation split, in the regime (recurrent or truncated) of the training.
        Saves the weights if the loss is the lowest so far.

        If there is a cache, its mixture weights are first fitted to the split.
        """
        project(self.network, *self.constraints)
        carried = self.config.regime == "recurrent"
        self.group.check_same(f"weights after step {self.step}", self.network.digest)
        self.network.eval()
        state, lanes = None, self.valid_lanes
        losses: list[Tensor] = []
        positions: list[Tensor] = []
        for step in range(lanes.steps if lanes.count else 0):
            batch = lanes.batch(step, self.device)
            with self._autocast():
                hidden, state = self.network(batch.inputs, None if batch.fresh or not carried else state)
                hidden, targets = batch.chosen(hidden), batch.chosen(batch.targets)
                hidden, targets, at = hidden.flatten(0, -2), targets.flatten(), batch.chosen_positions().ravel()
                if self.judged is not None:
                    chosen = torch.from_numpy(self.judged[at]).to(targets.device)
                    hidden, targets, at = hidden[chosen], targets[chosen], at[self.judged[at]]
                losses.append(full_losses(self.network, hidden, targets))
            positions.append(torch.from_numpy(at))
        self.network.train()
        loss = self._mean(losses) if self.cache is None else self._fit(self.cache, losses, positions)
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step
            best = {"weights": self.network.weights(), "step": self.step, "valid_loss": loss}
            self._save("best.pt", best | self._saved_cache())
        self._log(
            {
                "step": self.step,
                "valid_loss": loss,
                "best_loss": self.best_loss,
                "wall_s": round(self.wall_s, 1),
            }
        )
        return loss

    def _mean(self, losses: list[Tensor]) -> float:
        """Returns the mean validation loss over the lanes of all processes. losses: this process's losses, one tensor
        (n,) per batch."""
        mine = torch.cat(losses) if losses else torch.zeros(0)
        total, count = self.group.total([mine.sum(dtype=torch.float64).item(), float(len(mine))])
        return total / count

    def _fit(self, cache: CacheTraining, losses: list[Tensor], positions: list[Tensor]) -> float:
        """Fits the cache's weights to the network's validation losses. losses: one tensor (n,) per batch. positions:
        the index of each loss's input in the split, one tensor (n,) per batch. Returns the mean loss of the mixture of
        network and cache."""
        mine = torch.cat(losses) if losses else torch.zeros(0)
        at = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)
        network, every = self.group.gather([mine, at])
        fitted, loss = self.group.from_first(
            lambda: cache.fitted("valid", every.numpy(), network.double().numpy(force=True))
        )
        cache.model = fitted
        return loss

    def _losses(self, batch: Batch, hidden: Tensor, carried: bool) -> Tensor:
        """Returns -log p of each target that is not padding, or its estimate by the sampled softmax, or its mixture
        with the teacher's predictions. hidden: (T, lanes, H). carried: whether the batch continues the batch before."""
        hidden, targets = batch.chosen(hidden), batch.chosen(batch.targets)
        if self.teacher is not None:
            return self.teacher.losses(batch, self.network.logits(hidden), carried)
        if self.sampled is None:
            return token_losses(self.network.logits(hidden), targets, self.config.label_smoothing)
        return self.sampled.losses(self.network, hidden.flatten(0, -2), targets.flatten()).view_as(targets)

    def _penalty(self, hidden: Tensor) -> Tensor | float:
        """Returns the penalties of large and of fast activations (Merity et al. 2017, arXiv 1708.02182, section 4.6).
        hidden: (T, lanes, H)."""
        penalty: Tensor | float = 0.0
        if self.config.activation_penalty:
            penalty = self.config.activation_penalty * hidden.float().square().mean()
        if self.config.slowness_penalty and len(hidden) > 1:
            penalty = penalty + self.config.slowness_penalty * hidden.float().diff(dim=0).square().mean()
        return penalty

    def _cache(self, experiment: Experiment) -> CacheTraining | None:
        if experiment.model.cache is None:
            return None
        from wane.training.cache import CacheTraining

        return CacheTraining.of(experiment, self.corpus, self.device)

    def _teacher(self) -> Teacher | None:
        if self.config.teacher is None:
            return None
        return Teacher(self.config.teacher, self.corpus, self.train_lanes.count, self.device)

    def _sampled_softmax(self) -> SampledSoftmax | None:
        if not self.config.negatives:
            return None
        counts = np.bincount(self.corpus.streams["train"], minlength=self.corpus.vocabulary.size)
        return SampledSoftmax(torch.from_numpy(counts), self.config.negatives)

    def _maybe_decay(self) -> None:
        """Begins the learning rate's decay in the schedule `plateau` when the validation loss stops improving, or when
        only `decay_steps` steps remain."""
        if self.config.schedule != "plateau" or self.decay_start is not None:
            return
        waited = (self.step - self.best_step) // self.config.evaluate_every
        stalled = self.config.patience > 0 and waited >= self.config.patience
        if stalled or self.step >= self.config.steps - self.config.decay_steps:
            self.decay_start = self.step
            self.end = min(self.config.steps, self.step + self.config.decay_steps)
            self._log({"step": self.step, "decay_start": self.step, "stalled": stalled})

    def _maybe_keep(self) -> None:
        """Saves the weights in a file of their own at every multiple of `keep_every` steps, including step 0."""
        if self.config.keep_every and self.step % self.config.keep_every == 0:
            self._save(kept_name(self.step), {"weights": self.network.weights(), "step": self.step})

    def _optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimiser. Weight decay applies to matrices only, not to biases and gains."""
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.config.learning_rate)
        return torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=(0.9, 0.99), fused=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _train_width(self) -> int:
        """Returns the number of lanes for training, `batch`. Raises RunError if `batch` is smaller than the number of
        processes."""
        if self.config.batch < self.group.size:
            raise RunError(
                f"training.batch = {self.config.batch} for {self.group.size} processes: each process "
                "needs at least one sequence"
            )
        return self.config.batch

    def _valid_width(self) -> int:
        """Returns the number of lanes for validation: `batch`, or fewer if the validation split is too short for a
        chunk in each lane."""
        tokens = len(self.corpus.streams["valid"]) - 1
        return max(1, min(self.config.batch, tokens // self.config.chunk))

    def _lanes(self, split: str, width: int, shuffle_seed: int | None) -> Lanes:
        return lanes_of(self.group, self.corpus, split, width, self.config.chunk, shuffle_seed)

    def _open(self, experiment: Experiment) -> dict[str, Any] | None:
        """Returns the checkpoint to resume from, or starts a fresh folder and returns None."""
        if self.folder.begun:
            return self.folder.resume(experiment, self.corpus)
        self.folder.begin(experiment, self.corpus)
        return None

    def _log(self, record: dict[str, object]) -> None:
        if self.group.first:
            self.folder.log(record)

    def _save(self, name: str, record: dict[str, Any]) -> None:
        if self.group.first:
            self.folder.save(name, record)

    def _saved_cache(self) -> dict[str, Any]:
        return {} if self.cache is None else {"cache": self.cache.model.model_dump_json()}

    def _checkpoint(self) -> None:
        self._save(
            "checkpoint.pt",
            {
                "step": self.step,
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": self.average.state(),
                "state": self.group.gather(self.state),
                "teacher": [] if self.teacher is None else self.group.gather(self.teacher.state),
                "teacher_weights": None if self.teacher is None else self.teacher.digest,
                "best_loss": self.best_loss,
                "best_step": self.best_step,
                "decay_start": self.decay_start,
                "end": self.end,
                "wall_s": self.wall_s,
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
                "data": sorted(self.corpus.hashes.items()),
            }
            | self._saved_cache(),
        )

    def _resume(self, saved: dict[str, Any]) -> None:
        """Restores the training from a checkpoint. If the learning rate's decay had begun, the decay ends at the step
        that was set when it began, even if `steps` has changed."""
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if "average" in saved:
            self.average.restore(saved["average"])
        self.step = saved["step"]
        self.state = [tensor[self.train_lanes.mine].to(self.device) for tensor in saved["state"]]
        if self.teacher is not None:
            before = saved.get("teacher_weights", self.teacher.digest)
            if before != self.teacher.digest:
                raise ResumeError(
                    f"{self.folder.path} holds a run whose teacher had other weights (SHA-256 {before}) than those in "
                    f"training.teacher.run ({self.teacher.digest})"
                )
            self.teacher.state = [tensor[self.train_lanes.mine].to(self.device) for tensor in saved["teacher"]]
        self.best_loss, self.best_step = saved["best_loss"], saved["best_step"]
        self.wall_s = saved["wall_s"]
        if self.cache is not None:
            self.cache.model = type(self.cache.model).model_validate_json(saved["cache"])
        if saved["decay_start"] is not None:
            self.decay_start, self.end = saved["decay_start"], saved["end"]
        torch.set_rng_state(saved["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state_all(saved["random_cuda"])
