"""Part 3: trains the certified model on words for as long as the part lasts. Needs torch and numpy alone.

The run is in the folder `run` of the results. Another run of this part with the same folder resumes it, and so does
`wane train`. Without WikiText-2, and in a rehearsal, a small model reads the licence's text.

Experiments and vocabularies are objects of pydantic and of the library `tokenizers`, which a GPU machine may lack. So
this part reads its experiment with all its defaults from a JSON file, and counts the words itself. A test compares both
with the originals.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.gpu.part import Part
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder
from wane.training.wikitext import read_wikitext_2

ROOT = Path(__file__).parents[2]
EXPERIMENT = Path(__file__).with_name("word-chip.json")
"""training/experiments/word-chip.toml with all its defaults, as `Experiment.model_dump_json` writes it."""

LAST_S = 5.0
"""The training stops this time before the part's limit, in seconds. A later run resumes from the last checkpoint."""

EOS, UNK = "<eos>", "<unk>"

SMALL: dict[str, dict[str, Any]] = {
    "model": {"hidden": 32, "units": 48, "feed_forward": 32},
    "data": {"kind": "text", "vocabulary_size": 500},
    "training": {
        "steps": 12,
        "batch": 4,
        "chunk": 16,
        "evaluate_every": 4,
        "checkpoint_every": 4,
        "warmup": 2,
        "threads": 1,
    },
}
"""The keys of the experiment that a rehearsal changes."""


class PlainLayer(SimpleNamespace):
    """What training needs of a front block's convolution or of a residual gated layer."""

    def tensors(self, _inputs: int) -> dict[str, tuple[int, int]]:
        return {"weight": (self.kernel_size, self.units)}


class PlainArchitecture(SimpleNamespace):
    """What training needs of an `Architecture` of front blocks and residual gated layers."""

    residual = True

    @property
    def fading(self) -> list[PlainLayer]:
        return [layer for layer in self.layers if not layer.finite]

    def placed(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(layer=layer, inputs=self.hidden) for layer in self.layers]

    def state_tensors(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(shape=layer.shape) for layer in self.layers]


class PlainModel(SimpleNamespace):
    """The table `[model]`."""

    @property
    def contractions(self) -> tuple[float, ...]:
        return (float(self.contraction),) * int(self.layers)

    def architecture(self, vocabulary_size: int) -> PlainArchitecture:
        reach = self.front["kernel_size"] - 1
        convolution = PlainLayer(
            module="convolution",
            kind="convolution",
            block="front",
            finite=True,
            units=self.hidden,
            rows=self.hidden,
            feed_forward=self.front["feed_forward"],
            states=("inputs",),
            shape=(reach, self.hidden),
            kernel_size=reach + 1,
            dilation=1,
            channels="depthwise",
            activation="none",
        )
        gated = PlainLayer(
            module="gated",
            kind="gated",
            block="residual",
            finite=False,
            units=self.units,
            feed_forward=self.feed_forward,
            states=("s",),
            shape=(self.units,),
            candidate="tanh",
            cap=float(np.float32(self.contraction)),
            missing=("constraint", "audit"),
        )
        return PlainArchitecture(
            vocabulary_size=vocabulary_size,
            embedding=self.hidden,
            hidden=self.hidden,
            tied=self.tied,
            norm_epsilon=self.norm_epsilon,
            layers=[convolution] * self.front["blocks"] + [gated] * self.layers,
        )


class PlainExperiment:
    """An experiment with the tables of its JSON document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self.name: str = document["name"]
        self.model = PlainModel(**document["model"])
        self.training = SimpleNamespace(**document["training"])

    def model_dump(self, **_: object) -> dict[str, Any]:
        return self._document

    def model_dump_json(self, indent: int) -> str:
        return json.dumps(self._document, indent=indent)


class PlainFolder(RunFolder):
    """A run folder whose experiment is a `PlainExperiment`."""

    def experiment(self) -> Any:
        return PlainExperiment(json.loads((self.path / "experiment.json").read_text(encoding="utf-8")))


def experiment(part: Part) -> PlainExperiment:
    """Returns the experiment that this part trains."""
    document = json.loads(EXPERIMENT.read_text(encoding="utf-8"))
    if part.small or part.data is None:
        for table, keys in SMALL.items():
            document[table] |= keys
        document["model"]["front"]["feed_forward"] = 32
    document["data"]["path"] = str(part.data if document["data"]["kind"] == "wikitext-2" else ROOT / "LICENSE")
    document["training"]["device"] = part.device
    return PlainExperiment(document)


def corpus_of(data: dict[str, Any]) -> SimpleNamespace:
    """Returns the token streams, like `training.data.load_corpus` for words. data: the experiment's table `[data]`."""
    path = Path(data["path"])
    if data["kind"] == "wikitext-2":
        lines, hashes = read_wikitext_2(path)
    else:
        text, hashes = path.read_text(encoding="utf-8").splitlines(), {}
        share = len(text) // 20
        valid, test = len(text) - 2 * share, len(text) - share
        lines = {"train": text[:valid], "valid": text[valid:test], "test": text[test:]}
    words = {split: [line.split() for line in part] for split, part in lines.items()}
    counts = Counter(word for line in words["train"] for word in line)
    names = sorted((name for name in counts if name not in (EOS, UNK)), key=lambda name: (-counts[name], name))
    ids = {name: index for index, name in enumerate([EOS, UNK, *names[: data["vocabulary_size"] - 2]])}
    streams = {
        split: np.array([0] + [ids.get(word, 1) for line in part for word in (*line, EOS)], dtype=np.int64)
        for split, part in words.items()
    }
    return SimpleNamespace(
        vocabulary=SimpleNamespace(size=len(ids), kind="words"),
        tokenizer_json=_tokenizer_json(ids),
        streams=streams,
        words={split: sum(len(line) + 1 for line in part) for split, part in words.items()},
        hashes=hashes,
        last_only=False,
        validated=True,
    )


def _tokenizer_json(ids: dict[str, int]) -> str:
    """Returns the vocabulary file of the library `tokenizers`."""
    nothing = dict.fromkeys(("truncation", "padding"))
    document: dict[str, Any] = {
        "version": "1.0",
        **nothing,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        **dict.fromkeys(("post_processor", "decoder")),
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": UNK},
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def run(part: Part) -> None:
    """Trains until the experiment's last step, or until the time is nearly over."""
    chosen = experiment(part)
    corpus = corpus_of(chosen.model_dump()["data"])
    trainer = Trainer(cast(Any, chosen), cast(Any, corpus), PlainFolder(part.folder / "run"))
    epoch = trainer.train_lanes.steps
    first = trainer.step
    part.keep(
        experiment=chosen.name,
        text="WikiText-2" if corpus.hashes else "the licence",
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
