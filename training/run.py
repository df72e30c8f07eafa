"""The commands train, evaluate and export on a run folder, with progress bars."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import ValidationError
from rich import box
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

from wane.models.bundle import BundleExistsError, check_place
from wane.models.bundle_checks import MANIFEST
from wane.models.certificate.certify import CERTIFIED
from wane.models.export import ExportError, export_bundle
from wane.models.manifest import (
    CacheModel,
    Certificate,
    Perplexity,
    Precision,
    Provenance,
    Quality,
    TransitionModel,
    Unknown,
)
from wane.models.networks import Network
from wane.training.config import DataConfig, Experiment, Protocol
from wane.training.data import Corpus, load_corpus, source_hashes
from wane.training.errors import DataError, ResumeError, RunError
from wane.training.evaluate import POSITIONS, WINDOWS, Advance, SplitLosses, evaluate_split, evaluation_steps, quality
from wane.training.evaluate_events import (
    RECURRENT,
    Judge,
    cache_of,
    evaluate_events,
    fit_transitions,
    mixture_of,
    sessions_of,
)
from wane.training.group import ALONE, Group
from wane.training.lanes import lanes_of
from wane.training.loop import Trainer
from wane.training.origin import describe_origin
from wane.training.plots import plot_log, plot_quality, plot_rankings
from wane.training.rankings.baselines import baselines_of
from wane.training.rankings.metrics import LISTED, RankingMetrics, Rankings
from wane.training.rankings.replay import replay
from wane.training.rankings.transitions import Counts, TransitionWeights
from wane.training.run_folder import RunFolder

EVALUATED_SPLITS = ("valid", "test")
SAMPLE_TOKENS = 512
TABLE_WIDTH = 80
"""The width of a table of rankings in characters, even if the terminal is narrower."""
METRICS = {"recall": "recall", "hit_rate": "hit rate", "mrr": "MRR", "ndcg": "NDCG"}
"""The metrics of the tables of rankings that have an interval, with their titles."""
SHOWN = (5, 10, 20)
"""The values of k in the tables of rankings. `rankings.json` has all of CUTOFFS."""
SERVED = "served"
TABLES = "transitions.safetensors"
"""The name of the file of transition tables in a bundle."""
LONGEST_WINDOW = 128
"""Every evaluation includes windows up to this length, even if the bundle serves only shorter windows."""


def _with_data(experiment: Experiment, data: Path | None) -> Experiment:
    if data is None:
        return experiment
    return experiment.model_copy(update={"data": experiment.data.model_copy(update={"path": data})})


def train(
    experiment: Experiment,
    data: Path | None,
    run: Path | None,
    tokenizer: Path | None,
    command: str,
    console: Console,
    group: Group = ALONE,
    after: Path | None = None,
) -> Path:
    """Trains or resumes an experiment. Returns the run folder. Records `command` in the run's origin (`Origin`).
    `after`: the folder of a run of the same experiment, whose choices this run repeats on the training and the
    validation split together (`chosen_by`).

    In a group only the first process reads the data and writes the folder.
    """
    folder = RunFolder(run or Path("runs") / experiment.name)
    experiment, cache = _with_data(experiment, data), None
    if after is not None:
        experiment, cache = group.from_first(lambda: chosen_by(after, experiment))
    with console.status("reading the data"):
        corpus = group.from_first(
            lambda: (
                _load_again(folder, experiment)
                if folder.begun
                else load_corpus(experiment.data, _read_tokenizer(tokenizer))
            )
        )
    trainer = Trainer(experiment, corpus, folder, group, cache)
    if group.first:
        if after is not None:
            folder.keep_transitions(RunFolder(after))
        folder.add_origin(describe_origin(command, trainer.device, group.size))
    parameters = sum(tensor.numel() for tensor in trainer.network.weights().values())
    console.print(
        f"{experiment.name}: {parameters:,} weights, {len(corpus.streams['train']):,} training tokens, "
        f"{trainer.train_lanes.steps:,} steps an epoch, "
        f"vocabulary {corpus.vocabulary.size:,}, on {trainer.device}, in {folder.path}"
        + (f", {group.size} processes" if not group.alone else "")
        + (f", from step {trainer.step}" if trainer.step else ""),
        soft_wrap=True,
    )
    for note in corpus.notes:
        console.print(note, soft_wrap=True)
    columns = (
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("training", total=trainer.end, completed=trainer.step, figures="")
        for progress in trainer.run():
            # At most 80 columns with the bar: the perplexities of training and of the best validation.
            figures = f"{progress.tokens_per_s:,.0f} tokens/s  train {math.exp(min(progress.loss, 20)):.1f}"
            if math.isfinite(progress.best_loss):
                figures += f"  best {math.exp(progress.best_loss):.1f}"
            bar.update(task, completed=progress.step, total=progress.steps, figures=figures)
            if progress.valid_loss is not None:
                bar.console.print(
                    f"step {progress.step}: validation loss {progress.valid_loss:.4f} "
                    f"(perplexity {math.exp(progress.valid_loss):.2f} per token)"
                )
    if group.first:
        plot_log(experiment.name, folder.path / "log.jsonl", folder.path / "training.png")
    epochs = trainer.step / trainer.train_lanes.steps
    best = f"best validation loss {trainer.best_loss:.4f} at step {trainer.best_step}"
    console.print(
        f"done: {best if corpus.validated else 'the last weights are saved'}; {epochs:.1f} epochs, "
        f"{trainer.wall_s / epochs:,.0f} s an epoch with its evaluations, peak memory {peak_memory_gib():.2f} GiB",
        soft_wrap=True,
    )
    return folder.path


def chosen_by(after: Path, experiment: Experiment) -> tuple[Experiment, CacheModel | None]:
    """Returns an experiment that trains on the training and the validation split together, for as many epochs as the
    best weights of the run `after` had, and this run's fitted cache. The schedule of the learning rate ends with these
    epochs. Raises RunError if the run is of another experiment or other data."""
    folder = RunFolder(after)
    before = folder.experiment()
    for part in ("model", "training", "data"):
        own, other = getattr(experiment, part).model_dump(mode="json"), getattr(before, part).model_dump(mode="json")
        for key in own.keys() - {"path", "steps", "threads", "device", "seed"}:
            if own[key] != other[key]:
                raise RunError(f"--after {after} holds a run with {part}.{key} = {other[key]!r}, not {own[key]!r}")
    if experiment.data.kind != "events":
        raise RunError("--after needs a run on events")
    corpus = load_corpus(experiment.data)
    try:
        folder.check_data(folder.load("checkpoint.pt"), corpus.hashes)
    except ResumeError as error:
        raise RunError(f"--after {after}: {error}") from error
    if not corpus.validated:
        raise RunError(f"--after {after} holds a run without validation, which has chosen nothing")
    both = experiment.model_copy(update={"data": experiment.data.model_copy(update={"train_on": "train_and_valid"})})
    config, best = experiment.training, folder.load("best.pt")
    old, new = (
        lanes_of(ALONE, one, "train", config.batch, config.chunk, config.seed).steps
        for one in (corpus, load_corpus(both.data))
    )
    steps = max(1, round(best["step"] * new / old))
    training = config.model_copy(update={"steps": steps, "warmup": min(config.warmup, steps)})
    cache = CacheModel.model_validate_json(best["cache"]) if "cache" in best else None
    return Experiment.model_validate(both.model_copy(update={"training": training}).model_dump()), cache


def _load_again(folder: RunFolder, experiment: Experiment) -> Corpus:
    """Reads the data of a run with the run's vocabulary. Raises DataError. Raises ResumeError instead if the files are
    not those on which the run was trained, because the vocabulary may lack their words and events."""
    try:
        return load_corpus(experiment.data, folder.tokenizer_json())
    except DataError:
        path = experiment.data.path
        if path is not None and path.exists() and experiment.data.kind != "wikitext-2":
            folder.check_data(folder.load("checkpoint.pt"), source_hashes(experiment.data, path))
        raise


def peak_memory_gib() -> float:
    """Returns the largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # Linux reports `ru_maxrss` in KiB


def _read_tokenizer(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--tokenizer {path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Trained:
    """A run with at least one evaluation: its best weights, and the corpus on which these were trained."""

    folder: RunFolder
    experiment: Experiment
    corpus: Corpus
    network: Network
    best_step: int
    cache: CacheModel | None


def open_run(path: Path, data: Path | None, protocol: Protocol | None = None) -> Trained:
    """Reads a run folder. `protocol`: replaces that of the experiment. Raises TrainingError if the folder has no run,
    if the folder is damaged, or if the run was trained on other data."""
    folder = RunFolder(path)
    experiment = _with_data(folder.experiment(), data)
    if protocol is not None:
        changed = experiment.data.model_dump() | {"protocol": protocol}
        try:
            experiment = experiment.model_copy(update={"data": DataConfig.model_validate(changed)})
        except ValidationError as error:
            raise RunError(f"--protocol {protocol}: {error.errors()[0]['msg']}") from error
    if experiment.training.threads is not None:
        torch.set_num_threads(experiment.training.threads)
    corpus = _load_again(folder, experiment)
    folder.check_data(folder.load("checkpoint.pt"), corpus.hashes)
    network, best = folder.network(corpus.vocabulary.size)
    cache = CacheModel.model_validate_json(best["cache"]) if "cache" in best else None
    return Trained(folder, experiment, corpus, network, best["step"], cache)


def evaluate_run(
    path: Path,
    data: Path | None,
    positions: int,
    console: Console,
    protocol: Protocol | None = None,
    transitions: bool = False,
) -> Quality:
    """Evaluates a run's best weights. Writes `quality.json`, `evaluation.png` and, for events, `rankings.json` into the
    run folder. `protocol`: replaces that of the experiment. `transitions`: whether the
    model is mixed with transition tables. Their weights are fitted to the validation split, and written to
    `transitions.json`."""
    run = open_run(path, data, protocol)
    if transitions and run.corpus.vocabulary.kind != "events":
        raise RunError("--transitions needs a run on events")
    if transitions and run.corpus.validated:
        run.folder.write_transitions(fit_transitions(run.network, run.corpus, positions, run.cache))
    return evaluate_opened(run, positions, console, _transitions(run) if transitions else None)


def _transitions(run: Trained) -> tuple[Counts, TransitionWeights]:
    """Returns the transition tables of a run's training split, with the weights that `wane evaluate --transitions`
    fitted. Raises RunError."""
    fitted = run.folder.transitions()
    return Counts(sessions_of(run.corpus, "train"), run.corpus.vocabulary.size, fitted.backwards), fitted


def evaluate_opened(
    run: Trained, positions: int, console: Console, transitions: tuple[Counts, TransitionWeights] | None = None
) -> Quality:
    """Evaluates a run that was read by `open_run`, and writes the same files as `evaluate_run`. `transitions`: see
    `evaluate_events`."""
    splits = EVALUATED_SPLITS if run.corpus.validated else EVALUATED_SPLITS[1:]
    windows = [k for k in WINDOWS if k <= max(run.experiment.export.max_window, LONGEST_WINDOW)]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        is_events = run.corpus.vocabulary.kind == "events"
        total = evaluation_steps(run.corpus, splits, windows, positions)
        baselines = {}
        if is_events:
            baselines = baselines_of(sessions_of(run.corpus, "train"), run.corpus.vocabulary.size)
            total += sum(min(positions, len(run.corpus.streams[split])) for split in splits) * len(baselines)
        task = bar.add_task("evaluating", total=total)

        def advance(tokens: int) -> None:
            bar.advance(task, tokens)

        rankings: dict[str, Rankings] = {}
        losses: dict[str, SplitLosses] = {}
        if is_events:
            for split in splits:
                losses[split], rankings[split] = evaluate_events(
                    run.network, run.corpus, split, windows, positions, advance, run.cache, baselines, transitions
                )
        else:
            for split in splits:
                losses[split] = evaluate_split(run.network, run.corpus, split, windows, positions, advance, run.cache)
        found = quality(losses)
        # For a split with fewer positions than requested, the evaluation took fewer steps than `total` assumes.
        bar.update(task, completed=total)
    name, plot = run.experiment.name, run.folder.path / "evaluation.png"
    run.folder.write_quality(found, run.best_step, positions, transitions is not None)
    console.print(quality_table(name, found))
    if rankings:
        run.folder.write_rankings(rankings)
        plot_rankings(name, found, rankings, plot)
        for table in rankings_tables(name, "test", rankings["test"]):
            console.print(table, width=TABLE_WIDTH, crop=False)
    else:
        plot_quality(name, found, plot)
    return found


def evaluate_server(
    path: Path,
    data: Path | None,
    positions: int,
    console: Console,
    protocol: Protocol | None,
    url: str,
    model: str | None,
    transitions: bool = False,
) -> Rankings:
    """Replays the test sessions of a run through a running server, and prints the metrics of its answers beside those
    of the run, computed from the files. Writes `served.json` into the run folder. `transitions`: whether the served
    bundle has transition tables. Raises RunError."""
    run = open_run(path, data, protocol)
    if run.corpus.vocabulary.kind != "events":
        raise RunError("--server needs a run on events")
    judge = Judge(run.network, run.corpus, "test", positions)
    steps = sum(len(events) for events, _ in judge.sessions_to_replay())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("steps", total=steps)
        replayed = replay(
            judge, run.corpus.vocabulary, run.experiment.data, url, model, lambda count: bar.advance(task, count)
        )
    tables = _transitions(run) if transitions else None
    own = judge.recurrent(mixture_of(run.cache, run.corpus.vocabulary.size, tables))
    found = judge.rankings({SERVED: replayed.judged, RECURRENT: own}, [])
    run.folder.write_rankings({"test": found}, "served.json")
    for table in rankings_tables(run.experiment.name, "test", found):
        if table.row_count:
            console.print(table, width=TABLE_WIDTH, crop=False)
    console.print(replayed.describe(), soft_wrap=True)
    same = int((replayed.judged.lists == own.lists).all(1).sum())
    console.print(f"{same:,} of {judge.count:,} lists of {LISTED} events are those of the run", soft_wrap=True)
    return found


def losses_of_split(
    network: Network, corpus: Corpus, split: str, windows: list[int], advance: Advance, cache: CacheModel | None
) -> SplitLosses:
    """Evaluates one split of text or events, without rankings."""
    if corpus.vocabulary.kind == "events":
        return evaluate_events(network, corpus, split, windows, POSITIONS, advance, cache, {})[0]
    return evaluate_split(network, corpus, split, windows, POSITIONS, advance, cache)


def rankings_tables(name: str, split: str, found: Rankings) -> list[Table]:
    """Returns a table of the model and the baselines for each of SHOWN, one of the model's windows, and one of the
    tests. An interval is shown as its mean half-width. A metric is "-" if no position was evaluated."""
    judged = "last events of sessions" if found.protocol == "leave_one_out" else "next events"
    judged += ", the events before them left out" if found.protocol == "next_other" else ""
    counted = f"{found.positions:,} {judged}"
    counted += f", {found.missed_share:.2%} unknown" if found.missed_share else ""
    whole = {method: metrics for method, metrics in found.methods.items() if not method.startswith("window ")}
    windows = {method: metrics for method, metrics in found.methods.items() if method.startswith("window ")}
    tables = []
    for k in SHOWN:
        table = _table(f"{name}: {split}, {counted}, k = {k}", [*METRICS.values(), "cover\nage", "popu\nlarity"])
        for method, metrics in whole.items():
            cells = [_with_interval(metrics, metric, k) for metric in METRICS]
            cells += [f"{metrics.coverage[k]:.3f}", f"{metrics.popularity[k]:.3f}"]
            table.add_row(method, *(cells if found.positions else ["-"] * len(cells)))
        tables.append(table)
    tables[
        -1
    ].caption = (
        "±: half of the 95 % interval of a bootstrap over sessions; hit rate: any of the session's remaining events"
    )
    pairs = [(metric, k) for metric in ("recall", "mrr") for k in SHOWN[1:]]
    headers = [f"{METRICS[metric]}\n@{k}" for metric, k in pairs]
    table = _table(f"{name}: {split}, the last k events of a session alone", headers)
    for method, metrics in windows.items():
        cells = [f"{getattr(metrics, metric)[k]:.3f}" if found.positions else "-" for metric, k in pairs]
        table.add_row(method, *cells)
    tables.append(table)
    if found.tests and found.positions:
        table = _table(f"{name}: {split}, {next(iter(whole))} minus a baseline (p of a paired test)", headers)
        for method, tests in found.tests.items():
            cells = [f"{tests[metric][k].difference:+.3f} ({tests[metric][k].p:.3f})" for metric, k in pairs]
            table.add_row(method, *cells)
        tables.append(table)
    return tables


def _table(title: str, headers: list[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _with_interval(metrics: RankingMetrics, metric: str, k: int) -> str:
    low, high = metrics.intervals[metric][k]
    return f"{getattr(metrics, metric)[k]:.3f} ±{(high - low) / 2:.3f}".replace("±0.", "±.")


def quality_table(name: str, found: Quality) -> Table:
    """Returns a table of perplexity by window length k and split."""
    has_words = any(perplexity.per_word is not None for perplexity in found.recurrent.values())
    table = Table(title=f"{name}: perplexity per token (per word)" if has_words else f"{name}: perplexity per event")
    table.add_column("")
    for split in found.window:
        table.add_column(split, justify="right")

    def cell(split: str, k: int | None) -> str:
        window = found.window[split]
        perplexity = window.recurrent if k is None else window.by_k.get(k)
        return "-" if perplexity is None else _perplexity(perplexity)

    for k in sorted({k for window in found.window.values() for k in window.by_k}):
        table.add_row(f"window {k}", *(cell(split, k) for split in found.window))
    table.add_row("recurrent, same positions", *(cell(split, None) for split in found.window))
    table.add_row("recurrent, whole split", *(_perplexity(found.recurrent[split]) for split in found.window))
    if (alone := found.without_cache) is not None:
        table.add_row(
            "recurrent, whole split, without the cache", *(_perplexity(alone[split]) for split in found.window)
        )
    return table


def _perplexity(found: Perplexity) -> str:
    """Returns the perplexity per token, followed by the perplexity per word in parentheses."""
    return f"{found.per_token:.3f}" + ("" if found.per_word is None else f" ({found.per_word:.1f})")


def export_run(
    path: Path,
    bundles: Path,
    data: Path | None,
    bundle_version: str,
    console: Console,
    precision: Precision = "float32",
    replace: bool = False,
    keep_versions: bool = False,
    transitions: bool = False,
) -> Path:
    """Writes a bundle with the run's best weights to the folder that `bundle_place` returns. The bundle has the
    experiment's name, with the suffix `-int8` for int8. Returns the bundle's path.

    An int8 bundle records no perplexity, because the evaluation runs in float32. `replace`: whether to replace a bundle
    of the same or a higher version. `transitions`: whether the bundle has transition tables, with the weights that
    `wane evaluate --transitions` fitted. Raises RunError."""
    run = open_run(path, data)
    tables = _transitions(run) if transitions else None
    experiment, corpus, network = run.experiment, run.corpus, run.network
    name, found = f"{experiment.name}-{precision}", None
    if precision == "float32":
        name = experiment.name
        found = run.folder.quality(run.best_step, POSITIONS, transitions)
    target = bundle_place(bundles, name, bundle_version, keep_versions)
    with writing(target):
        check_place(target, bundle_version, found, replace)
    if precision == "float32":
        found = found or evaluate_opened(run, POSITIONS, console, tables)
    cache = run.cache
    if tables is not None:
        mixed = TransitionModel(file=TABLES, weights=tables[1].with_model)
        cache = cache_of(cache).model_copy(update={"transitions": mixed})
    with writing(target), console.status("exporting: building the graphs, and checking them against torch and numpy"):
        manifest = export_bundle(
            target,
            architecture=network.architecture,
            weights={name: tensor.numpy() for name, tensor in network.weights().items()},
            vocabulary_kind=corpus.vocabulary.kind,
            tokenizer_json=corpus.tokenizer_json,
            name=name,
            version=bundle_version,
            description=experiment.export.description,
            window=experiment.export.window,
            max_window=experiment.export.max_window,
            quality=found,
            provenance=_provenance(run),
            sample_tokens=corpus.streams["valid"][:SAMPLE_TOKENS].tolist(),
            torch_network=network,
            precision=precision,
            replace=replace,
            cache=cache,
            transitions=None if tables is None else tables[0].weighted(tables[1].with_model),
            unknown=_unknown(corpus, experiment),
            start=corpus.start,
        )
    size = sum(file.stat().st_size for file in target.iterdir())
    console.print(f"{target}: {size:,} bytes, {describe_certificate(manifest.certificate)}", soft_wrap=True)
    return target


def _unknown(corpus: Corpus, experiment: Experiment) -> Unknown:
    """Returns what the server does with words or events that the vocabulary lacks: the same as in training."""
    if corpus.vocabulary.kind == "events":
        return experiment.data.unknown
    return "token" if corpus.vocabulary.has_unknown and corpus.vocabulary.kind != "bpe" else "refuse"


def describe_certificate(certificate: Certificate) -> str:
    """Returns one line that says whether the model is contractive and whether the server reports it as certified."""
    if not certificate.contractive:
        return f"not contractive, and therefore not certified: {certificate.reason}"
    if certificate.certified:
        return f"contractive and certified: the error_bound of the largest window is at most {CERTIFIED:g}"
    return (
        f"contractive (the state forgets its start), but not certified (which needs an error_bound of at most "
        f"{CERTIFIED:g} for the largest window): {certificate.reason}"
    )


def bundle_place(bundles: Path, name: str, bundle_version: str, keep_versions: bool = False) -> Path:
    """Returns the folder of a new bundle: `bundles/NAME/VERSION` if `keep_versions` is true or if `bundles/NAME`
    already has such folders, otherwise `bundles/NAME`. Raises RunError if `keep_versions` is true and `bundles/NAME`
    itself is a bundle."""
    folder = bundles / name
    if (folder / MANIFEST).is_file():
        if keep_versions:
            raise RunError(
                f"{folder} is a bundle. To keep it beside other versions, move it to {folder}/VERSION, where "
                "VERSION is its version number"
            )
        return folder
    return folder / bundle_version if keep_versions or any(folder.glob(f"*/{MANIFEST}")) else folder


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Converts each error that occurs while the bundle `target` is written to a RunError."""
    try:
        yield
    except BundleExistsError as error:
        way_out = "; use --replace or a higher --version" if error.replaceable else ""
        raise RunError(f"{target} was not written: {error}{way_out}") from error
    except (ExportError, OSError) as error:
        raise RunError(f"{target} was not written: {error}") from error


def _provenance(run: Trained) -> Provenance:
    """Returns the provenance: command, commit and versions of the run's first start, and the versions of the export's
    libraries."""
    origins, saved = run.folder.origins(), run.folder.load("checkpoint.pt")
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=origins[0].command,
        config=run.experiment.model_dump(mode="json", exclude={"data": {"path"}, "training": {"teacher": {"run"}}}),
        seed=run.experiment.training.seed,
        steps=saved["step"],
        best_step=run.best_step,
        git_commit=origins[0].git_commit,
        data=run.corpus.hashes,
        versions=origins[0].versions | {name: version(name) for name in ("onnx", "onnxruntime")},
        hardware="; ".join(dict.fromkeys(origin.hardware for origin in origins)),
        train_wall_s=round(saved["wall_s"], 1),
        attribution=run.experiment.export.attribution,
    )
