"""Part 3: trains the certified model on words for as long as the part lasts. Needs torch, pydantic and tokenizers.

The run is in the folder `run` of the results. Another run of this part with the same folder resumes it. Without
WikiText-2, and in a rehearsal, a small model reads the licence's text.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from benchmarks.gpu.part import Part
from wane.training.config import Experiment
from wane.training.data import load_corpus
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "training" / "experiments" / "word-chip.toml"
LAST_S = 5.0
"""The training stops this time before the part's limit, in seconds. A later run resumes from the last checkpoint."""


def experiment(part: Part) -> Experiment:
    """Returns the experiment that this part trains."""
    chosen = Experiment.read(EXPERIMENT)
    device = {"device": part.device}
    if part.data is not None and not part.small:
        return chosen.model_copy(
            update={
                "data": chosen.data.model_copy(update={"path": part.data}),
                "training": chosen.training.model_copy(update=device),
            }
        )
    small = {
        "steps": 12,
        "batch": 4,
        "chunk": 16,
        "evaluate_every": 4,
        "checkpoint_every": 4,
        "warmup": 2,
        "threads": 1,
    }
    text = {"kind": "text", "path": ROOT / "LICENSE", "vocabulary_size": 500}
    network = {"hidden": 32, "units": 48, "feed_forward": 32}
    model = chosen.model.model_copy(update=network)
    if model.front is not None:
        model = model.model_copy(update={"front": model.front.model_copy(update={"feed_forward": 32})})
    return chosen.model_copy(
        update={
            "model": model,
            "data": chosen.data.model_copy(update=text),
            "training": chosen.training.model_copy(update=small | device),
        }
    )


def run(part: Part) -> None:
    """Trains until the experiment's last step, or until the time is nearly over."""
    chosen = experiment(part)
    corpus = load_corpus(chosen.data, None)
    trainer = Trainer(chosen, corpus, RunFolder(part.folder / "run"))
    epoch = trainer.train_lanes.steps
    first = trainer.step
    part.keep(
        experiment=chosen.name,
        text="WikiText-2" if chosen.data.kind == "wikitext-2" else "the licence",
        weights=sum(tensor.numel() for tensor in trainer.network.weights().values()),
        steps_an_epoch=epoch,
        first_step=first,
        curve=[],
    )
    begun, tokens = time.monotonic(), 0
    for progress in trainer.run():
        tokens += trainer.step_tokens
        if progress.valid_loss is not None:
            words = _per_word(progress.valid_loss, len(corpus.streams["valid"]) - 1, corpus.words["valid"])
            part.add("curve", {"step": progress.step, "epochs": progress.step / epoch, "valid_perplexity": words})
            part.say(f"step {progress.step:,}, epoch {progress.step / epoch:.1f}: {words:.1f} a word")
        seconds = time.monotonic() - begun
        part.record |= {"last_step": progress.step, "tokens_per_s": tokens / seconds, "seconds": seconds}
        if progress.step % 50 == 0:
            part.write()
        if part.left_s < LAST_S:
            break
    words = trainer.best_loss
    part.keep(best_step=trainer.best_step, stopped="the time" if trainer.step < trainer.end else "the last step")
    if math.isfinite(words):
        best = _per_word(words, len(corpus.streams["valid"]) - 1, corpus.words["valid"])
        part.keep(best_valid_perplexity=best)


def _per_word(loss: float, tokens: int, words: int) -> float:
    """Returns the perplexity a word. loss: nats a token. tokens and words: the numbers of both in the split."""
    return math.exp(min(loss * tokens / words, 50.0))
