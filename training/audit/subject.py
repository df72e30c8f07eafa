"""The subject of an audit: a foreign checkpoint or ONNX file, a bundle or a run, and the text to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture
from wane.models.bundle import Bundle, BundleError
from wane.models.manifest import Rounding
from wane.models.weights import Weights, WeightsError, decode_weights
from wane.training.audit.check import NOT_CHECKED, check_logits
from wane.training.audit.checkpoint import read_checkpoint
from wane.training.audit.foreign_model import add_unused_tokens
from wane.training.audit.graph.onnx_file import read_onnx
from wane.training.audit.model import import_model
from wane.training.audit.tensor_names import parse_mapping
from wane.training.audit.vocabulary import read_names, read_tokenizer, reserve
from wane.training.data import Corpus, data_kind, load_whole
from wane.training.errors import ForeignError, RunError
from wane.training.events import event_format
from wane.training.run import open_run

TOLERANCE = 1e-2
POSITIONS = 1024
TOKENS = 200_000
MAX_WINDOW = 256


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The options of `wane audit`. `file`: a checkpoint, an ONNX file, or the folder of a bundle or a run."""

    file: Path
    command: str
    data: Path | None = None
    tokenizer: Path | None = None
    vocabulary: Path | None = None
    eos: str | None = None
    state_dict: str | None = None
    mapping: Sequence[str] = ()
    ignore: Sequence[str] = ()
    ignore_token: Sequence[str] = ()
    experiment: Path | None = None
    check: Path | None = None
    nonlinearity: str | None = None
    tolerance: float = TOLERANCE
    positions: int = POSITIONS
    tokens: int = TOKENS
    max_window: int = MAX_WINDOW
    threads: int | None = None
    report: Path | None = None
    export: Path | None = None
    replace: bool = False
    name: str | None = None
    version: str = "1"
    attribution: str | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The audited model and the text that the audit reads. `split`: the name of the text's stream in `corpus`.
    `imported`: the bundle, if its graphs are imported; then `weights` are those of the graphs."""

    source: Literal["checkpoint", "onnx", "bundle", "run"]
    architecture: Architecture
    weights: Weights
    corpus: Corpus
    split: str
    sha256: str | None = None
    tensors: dict[str, str] | None = None
    notes: tuple[str, ...] = ()
    rounding: Rounding | None = None
    imported: Bundle | None = None

    @property
    def joined(self) -> bool:
        """Whether the sequences of the text are joined to one, because the model reads no token between them."""
        return self.corpus.start == "zero" and self.corpus.vocabulary.kind == "events"


def imported_weights(bundle: Bundle) -> Weights:
    """Returns the tensors in the weights file of an imported graph, for their number. Raises RunError."""
    path = bundle.path / bundle.manifest.weights
    try:
        return decode_weights(path.read_bytes())
    except WeightsError as error:
        raise RunError(f"{path}: {error}") from error


def find_subject(options: AuditOptions) -> Subject:
    """Reads the model and the text. Raises TrainingError."""
    if (options.file / "experiment.json").exists():
        run = open_run(options.file, options.data)
        weights = {name: tensor.numpy() for name, tensor in run.network.weights().items()}
        notes = _join(run.corpus, "valid")
        return Subject("run", run.network.architecture, weights, run.corpus, "valid", notes=notes)
    if not options.file.exists():
        raise RunError(f"{options.file}: No such file or directory")
    if options.data is None:
        raise RunError("no text: name a file or folder with --data")
    if options.file.is_dir():
        try:
            bundle = Bundle.read(options.file)
            tensors = imported_weights(bundle) if bundle.manifest.imported else bundle.weights()
        except BundleError as error:
            raise RunError(f"{options.file} is neither a checkpoint, a run nor a bundle: {error}") from error
        json_text = (options.file / bundle.manifest.tokenizer).read_text(encoding="utf-8")
        manifest = bundle.manifest
        corpus = load_whole(
            options.data, bundle.vocabulary, json_text, options.tokens, manifest.start, event_format(options.experiment)
        )
        return Subject(
            "bundle",
            manifest.architecture,
            tensors,
            corpus,
            "audit",
            notes=_join(corpus, "audit"),
            rounding=manifest.certificate.rounding,
            imported=bundle if manifest.imported else None,
        )
    return _foreign(options, options.data)


def _foreign(options: AuditOptions, data: Path) -> Subject:
    kind = data_kind(data)
    if (options.tokenizer is None) == (options.vocabulary is None):
        raise ForeignError(
            "a model from elsewhere needs a vocabulary: give either --tokenizer tokenizer.json or --vocabulary NAMES"
        )
    source: Literal["checkpoint", "onnx"] = "onnx" if options.file.suffix.lower() == ".onnx" else "checkpoint"
    if source == "onnx":
        for option, given in (
            ("--state-dict", options.state_dict),
            ("--map", options.mapping),
            ("--ignore", options.ignore),
            ("--nonlinearity", options.nonlinearity),
            ("--check", options.check),
        ):
            if given:
                raise ForeignError(
                    f"{options.file}: {option} is for checkpoints. An ONNX file records what the model computes, and "
                    "the audit compares with it"
                )
        model, sha256 = read_onnx(options.file)
        padding: frozenset[int] = frozenset()
    else:
        checkpoint = read_checkpoint(options.file, options.state_dict)
        model = import_model(checkpoint, parse_mapping(options.mapping), options.ignore, options.nonlinearity)
        checked = check_logits(options.check, model) if options.check is not None else NOT_CHECKED
        model = replace(model, assumptions=(*model.assumptions, checked))
        padding, sha256 = checkpoint.padding, checkpoint.sha256
    if options.tokenizer is not None:
        path, read = options.tokenizer, read_tokenizer(options.tokenizer, kind, options.eos)
    else:
        assert options.vocabulary is not None, "neither a tokenizer nor a vocabulary is given: this is a bug"
        path, read = options.vocabulary, read_names(options.vocabulary, kind, options.eos)
    size = read.vocabulary.size - read.added
    if size != model.architecture.vocabulary_size:
        tensor = model.tensors.get("embedding.weight") or model.tensors["head.weight"]
        rows = model.architecture.vocabulary_size
        raise ForeignError(
            f"{path} has {size} tokens, but {options.file}: {tensor} has {rows} rows: the model was trained with "
            "another vocabulary"
            + ("; if the first row is padding, put [PAD] before the first name" if rows == size + 1 else "")
        )
    zero_rows = np.flatnonzero(~model.weights["embedding.weight"].any(axis=1)).tolist()
    read = reserve(read, path, options.ignore_token, padding, zero_rows)
    model = add_unused_tokens(model, read.added)
    corpus = load_whole(
        data, read.vocabulary, read.tokenizer_json, options.tokens, read.start, event_format(options.experiment)
    )
    return Subject(
        source,
        model.architecture,
        model.weights,
        corpus,
        "audit",
        sha256,
        model.tensors,
        (*model.notes, *read.notes, *_join(corpus, "audit"), *model.assumptions),
    )


def _join(corpus: Corpus, split: str) -> tuple[str, ...]:
    """For a model that starts without `<eos>`, removes `<eos>` from the stream: each one from a stream of events, and
    only the first from a text, because the others are line breaks. Returns a note for the report if sequences of events
    were joined."""
    if corpus.start == "token":
        return ()
    vocabulary, stream = corpus.vocabulary, corpus.streams[split]
    if vocabulary.kind == "events":
        corpus.streams[split] = stream[stream != vocabulary.eos_id]
        return ("the sequences are joined for the measurement, so the perplexity is not that of separate sequences",)
    corpus.streams[split] = stream[1:]
    return ()


def truncate_text(subject: Subject, tokens: int) -> NDArray[np.int64]:
    """Truncates the subject's stream to `tokens` + 1 tokens, and returns the stream. (The last token is only predicted,
    not read.) Removes the word count of a truncated stream."""
    corpus, split = subject.corpus, subject.split
    if len(corpus.streams[split]) > tokens + 1:
        corpus.streams[split] = corpus.streams[split][: tokens + 1]
        corpus.words.pop(split, None)
    return corpus.streams[split]
