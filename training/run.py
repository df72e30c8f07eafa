"""What the three commands do with a run folder, shown while it happens."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)
from rich.table import Table

from models.export import ExportError, export_bundle
from models.manifest import Provenance, Quality
from models.networks import Network
from training.config import Experiment
from training.data import Corpus, load_corpus
from training.errors import RunError
from training.evaluate import POSITIONS, WINDOWS, evaluate_split, evaluation_steps, quality
from training.loop import Trainer, load_best
from training.plots import plot_log, plot_quality

EVALUATED_SPLITS = ("valid", "test")
SAMPLE_TOKENS = 512


def _with_data(experiment: Experiment, data: Path | None) -> Experiment:
    if data is None:
        return experiment
    return experiment.model_copy(update={"data": experiment.data.model_copy(update={"path": data})})


def train(
    experiment: Experiment, data: Path | None, run: Path | None, tokenizer: Path | None, console: Console
) -> Path:
    """Trains, or goes on with, an experiment; returns the run folder."""
    folder = run or Path("runs") / experiment.name
    experiment = _with_data(experiment, data)
    kept = folder / "tokenizer.json" if (folder / "checkpoint.pt").exists() else tokenizer
    corpus = load_corpus(experiment.data, None if kept is None else kept.read_text(encoding="utf-8"))
    trainer = Trainer(experiment, corpus, folder)
    parameters = sum(tensor.numel() for tensor in trainer.network.weights().values())
    console.print(
        f"{experiment.name}: {parameters:,} weights, {len(corpus.streams['train']):,} training tokens, "
        f"vocabulary {corpus.vocabulary.size:,}, on {trainer.device}, in {folder}"
        + (f", from step {trainer.step}" if trainer.step else "")
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("training", total=trainer.end, completed=trainer.step, figures="")
        for progress in trainer.run():
            figures = (
                f"{progress.tokens_per_s:,.0f} tokens/s  loss {progress.loss:.3f}  "
                f"perplexity {math.exp(min(progress.loss, 20)):.1f}"
            )
            if math.isfinite(progress.best_loss):
                figures += f"  best valid {math.exp(progress.best_loss):.2f}"
            bar.update(task, completed=progress.step, total=progress.steps, figures=figures)
            if progress.valid_loss is not None:
                bar.console.print(
                    f"step {progress.step}: validation loss {progress.valid_loss:.4f} "
                    f"(perplexity {math.exp(progress.valid_loss):.2f} a token)"
                )
    plot_log(experiment.name, folder / "log.jsonl", folder / "training.png")
    console.print(f"done: best validation loss {trainer.best_loss:.4f} at step {trainer.best_step}")
    return folder


def _open_run(folder: Path, data: Path | None) -> tuple[Experiment, Corpus, Network]:
    """The experiment, its corpus and its best weights."""
    try:
        record = (folder / "experiment.json").read_text(encoding="utf-8")
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} is no run folder: {error.filename}: {error.strerror}") from error
    experiment = _with_data(Experiment.model_validate_json(record), data)
    if experiment.training.threads is not None:
        torch.set_num_threads(experiment.training.threads)
    corpus = load_corpus(experiment.data, tokenizer_json)
    network = Network(experiment.model.architecture(corpus.vocabulary.size))
    network.load_state_dict(load_best(folder), strict=not network.architecture.tied)
    return experiment, corpus, network.eval()


def evaluate_run(folder: Path, data: Path | None, positions: int, console: Console) -> Quality:
    """Evaluates a run's best weights; writes `quality.json` and `evaluation.png` into its folder."""
    experiment, corpus, network = _open_run(folder, data)
    return _evaluate(experiment, corpus, network, folder, positions, console)


def _evaluate(
    experiment: Experiment, corpus: Corpus, network: Network, folder: Path, positions: int, console: Console
) -> Quality:
    windows = [k for k in WINDOWS if k <= experiment.export.max_window]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("evaluating", total=evaluation_steps(corpus, EVALUATED_SPLITS, windows, positions))
        found = quality(
            {
                split: evaluate_split(
                    network, corpus, split, windows, positions, lambda tokens: bar.advance(task, tokens)
                )
                for split in EVALUATED_SPLITS
            }
        )
    (folder / "quality.json").write_text(found.model_dump_json(indent=2) + "\n")
    plot_quality(experiment.name, found, folder / "evaluation.png")
    console.print(quality_table(experiment.name, found))
    return found


def quality_table(name: str, found: Quality) -> Table:
    """Perplexity by k and split, as a table."""
    table = Table(title=f"{name}: perplexity per token (per word)")
    table.add_column("")
    for split in found.window:
        table.add_column(split, justify="right")

    def cell(split: str, k: int | None) -> str:
        window = found.window[split]
        perplexity = window.recurrent if k is None else window.by_k.get(k)
        if perplexity is None:
            return "-"
        word = "" if perplexity.per_word is None else f" ({perplexity.per_word:.1f})"
        return f"{perplexity.per_token:.3f}{word}"

    for k in sorted({k for window in found.window.values() for k in window.by_k}):
        table.add_row(f"window {k}", *(cell(split, k) for split in found.window))
    table.add_row("recurrent, same positions", *(cell(split, None) for split in found.window))
    whole = (
        f"{p.per_token:.3f}" + ("" if p.per_word is None else f" ({p.per_word:.1f})")
        for p in (found.recurrent[split] for split in found.window)
    )
    table.add_row("recurrent, whole split", *whole)
    return table


def export_run(folder: Path, bundles: Path, data: Path | None, bundle_version: str, console: Console) -> Path:
    """Writes the run's best weights as `bundles/NAME`; returns that path. Raises RunError."""
    experiment, corpus, network = _open_run(folder, data)
    recorded = folder / "quality.json"
    if recorded.exists() and recorded.stat().st_mtime >= (folder / "best.pt").stat().st_mtime:
        found = Quality.model_validate_json(recorded.read_text())
    else:
        found = _evaluate(experiment, corpus, network, folder, POSITIONS, console)
    target = bundles / experiment.name
    try:
        manifest = export_bundle(
            target,
            architecture=network.architecture,
            weights={name: tensor.numpy() for name, tensor in network.weights().items()},
            vocabulary_kind=corpus.vocabulary.kind,
            tokenizer_json=corpus.tokenizer_json,
            name=experiment.name,
            version=bundle_version,
            description=experiment.export.description,
            window=experiment.export.window,
            max_window=experiment.export.max_window,
            quality=found,
            provenance=_provenance(experiment, corpus, folder),
            sample_tokens=corpus.streams["valid"][:SAMPLE_TOKENS].tolist(),
            torch_network=network,
        )
    except ExportError as error:
        raise RunError(f"{target} was not written: {error}") from error
    size = sum(file.stat().st_size for file in target.iterdir())
    contractive = "contractive" if manifest.certificate.contractive else "not contractive by the simple bounds"
    console.print(f"{target}: {size:,} bytes, {contractive}")
    return target


def _provenance(experiment: Experiment, corpus: Corpus, folder: Path) -> Provenance:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True, map_location="cpu")
    config = experiment.model_dump(mode="json", exclude={"data": {"path"}})
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "training", "train", f"{experiment.name}.toml"]),
        config=config,
        seed=experiment.training.seed,
        steps=saved["step"],
        best_step=saved["best_step"],
        git_commit=_git_commit(),
        data=corpus.hashes,
        versions={name: version(name) for name in ("torch", "numpy", "onnx", "onnxruntime", "tokenizers")}
        | {"python": platform.python_version()},
        hardware=f"{_processor()}, {experiment.training.threads or torch.get_num_threads()} thread(s)",
        train_wall_s=round(saved["wall_s"], 1),
        attribution=experiment.export.attribution,
    )


def _git_commit() -> str | None:
    """The checkout's commit, `+` behind it where files differ from it; null outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """The processor's name, or what the platform says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.processor() or platform.machine()} ({sys.platform})"
