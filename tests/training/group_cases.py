"""Trains runs with several processes. Tests compare these runs with runs of one process. Writes the losses and errors
of the runs into a folder.

torchrun --standalone --nproc-per-node 2 tests/training/group_cases.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.training.corpora import experiment, text_corpus
from wane.training.config import Experiment, ModelConfig
from wane.training.data import Corpus
from wane.training.errors import DataError, RunError, TrainingError
from wane.training.group import Group
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder

STOP = 11
"""The runs `HANDED_ON` and `NOISY` are stopped after this number of steps, and resumed later."""

HANDED_ON, NOISY = "handed-on", "noisy"


def model(cell: str, contraction: float | None = None, **keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"cell": cell, "hidden": 16, "layers": 2, "contraction": contraction} | keys)


def gated(**keys: object) -> ModelConfig:
    return model("gated", keys.pop("contraction", None), block="residual", feed_forward=8, **keys)  # type: ignore[arg-type]


def chosen(of: ModelConfig, **training: object) -> Experiment:
    keys = {"steps": 30, "batch": 6, "learning_rate": 1e-2, "evaluate_every": 10, "checkpoint_every": 10}
    return experiment(of, **keys | training)


FRONT = {"blocks": 1, "kernel_size": 3, "feed_forward": 8}

ALIKE = {
    "rnn_tanh": chosen(model("rnn_tanh")),
    "rnn_tanh-stable": chosen(model("rnn_tanh", 0.5)),
    "lstm": chosen(model("lstm")),
    "lstm-stable": chosen(model("lstm", 0.5), project_every=4),
    "gated": chosen(gated()),
    "gated-stable": chosen(gated(contraction=0.9, spectral_limit=0.5)),
    "gru": chosen(model("gru"), steps=10),
    "linear-stable": chosen(model("linear", 0.5), steps=10),
    "uneven": chosen(model("lstm"), batch=5),
    "validation split with only one lane": chosen(model("lstm"), batch=5, chunk=256, steps=12),
    "truncated": chosen(model("lstm"), regime="truncated"),
    "proof": chosen(gated(contraction=0.9, layers=1, front=FRONT), chunk=16, batch=5, proof={"weight": 0.5, "ramp": 2}),
    "plateau": chosen(
        model("rnn_tanh"), schedule="plateau", steps=99, decay_steps=8, patience=1, evaluate_every=2, warmup=0
    ),
    "clipped": chosen(model("lstm"), optimizer="sgd", learning_rate=1.0, clip_norm=0.1),
    HANDED_ON: chosen(model("lstm"), batch=5),
}
"""Experiments without dropout, by name. The result of their training does not depend on the number of processes."""

DROPOUT = chosen(gated(dropout=0.3))


def trained(one: Experiment, corpus: Corpus, folder: Path, group: Group, steps: int | None = None) -> list[float]:
    """Trains a run to its end, or for its next `steps` steps. Returns the losses."""
    return [progress.loss for progress in islice(Trainer(one, corpus, RunFolder(folder), group).run(), steps)]


def refusal(call: Callable[[], object]) -> str:
    """Returns the message of the TrainingError that `call` raises."""
    try:
        call()
    except TrainingError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("`call` raised no TrainingError")


def fail(error: TrainingError) -> None:
    raise error


def drifting(corpus: Corpus, folder: Path, group: Group) -> None:
    trainer = Trainer(ALIKE["lstm"], corpus, RunFolder(folder), group)
    for progress in trainer.run():
        if progress.step == 12 and not group.first:
            with torch.no_grad():
                trainer.network.head.bias[7] += 1e-6


def apart(group: Group) -> None:
    with group.together():
        if not group.first:
            raise RunError("no device here")


def main(folder: Path) -> None:
    group = Group.join()
    corpus = group.from_first(text_corpus)
    losses = {
        name: trained(one, corpus, folder / name, group, STOP if name == HANDED_ON else None)
        for name, one in ALIKE.items()
    }
    losses["dropout"] = trained(DROPOUT, corpus, folder / "dropout", group)
    begun = trained(DROPOUT, corpus, folder / NOISY, group, STOP)[:10]
    losses[NOISY] = begun + trained(DROPOUT, corpus, folder / NOISY, group)
    noise = []
    for step in (1, 2, 1):
        group.seed_noise(7, step)
        noise.append(torch.rand(4).tolist())
    refused = {
        "narrow": refusal(lambda: trained(chosen(model("lstm"), batch=1), corpus, folder / "narrow", group)),
        "first": refusal(lambda: group.from_first(lambda: fail(DataError("no such file")))),
        "other": refusal(lambda: apart(group)),
        "drift": refusal(lambda: drifting(corpus, folder / "drift", group)),
    }
    seen = {"losses": losses, "noise": noise, "refused": refused}
    (folder / f"rank-{group.rank}.json").write_text(json.dumps(seen))
    group.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
