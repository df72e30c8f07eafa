"""The command `wane audit`. Proves and measures how fast a model forgets earlier tokens, and recommends a
window length k."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from wane.models.bundle import IMPORTED, check_place
from wane.models.certificate import certify
from wane.models.export import export_bundle
from wane.models.manifest import Certificate, Manifest, Provenance
from wane.models.networks import Network
from wane.models.vocabulary import UNK
from wane.training.audit.forgetting import Forgetting, Unmeasurable, measure, smallest_window, token_steps, window_grid
from wane.training.audit.report import AuditedModel, AuditedText, AuditReport, Recommended, margins, show
from wane.training.audit.subject import AuditOptions, Subject, find_subject, truncate_text
from wane.training.errors import RunError
from wane.training.evaluate import quality, smallest_close_window
from wane.training.imported.network import GraphNetwork
from wane.training.origin import describe_origin
from wane.training.plots import plot_audit
from wane.training.run import SAMPLE_TOKENS, writing

LEAST_WINDOW = 8
"""The audited text must be at least four times as long as a window of this many tokens, or of `max_window` tokens if
`max_window` is smaller."""


def audit(options: AuditOptions, console: Console) -> AuditReport:
    """Audits a model. Prints the report, and writes it as JSON and as a plot. If `options.export` is set, also exports
    the model as a bundle. Raises TrainingError."""
    name = options.name or _name(options.file)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.export is not None and options.file.is_dir():
        raise RunError(
            f"{options.file}: --export needs a checkpoint. A bundle needs no export, and `wane export` exports a run"
        )
    if options.export is not None:
        with writing(options.export / name):
            check_place(options.export / name, options.version, None, options.replace)
    folder = options.report or Path("audits") / name
    with _writing_report(folder), TemporaryFile(dir=folder):
        pass
    subject = find_subject(options)
    network: Network
    if subject.imported is not None:
        network = GraphNetwork(subject.imported)
    else:
        network = Network(subject.architecture)
        network.load_weights({name: torch.from_numpy(np.array(tensor)) for name, tensor in subject.weights.items()})
    stream = truncate_text(subject, options.tokens)
    windows = [k for k in window_grid(options.max_window) if 4 * k <= len(stream)]
    if len(stream) < 4 * (needed := min(LEAST_WINDOW, options.max_window)):
        raise RunError(f"the text has {len(stream)} tokens, but windows of {needed} tokens need at least {4 * needed}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        proving = bar.add_task("proving", total=None)
        if subject.imported is not None:
            certificate = IMPORTED
        else:
            certificate = certify(subject.architecture, subject.weights, options.max_window, subject.rounding)
        bar.update(proving, total=1, completed=1)
        task = bar.add_task("measuring", total=token_steps(len(stream), windows, options.positions))
        found: Forgetting | None = None
        unmeasured = None
        try:
            found = measure(
                network,
                subject.corpus,
                subject.split,
                windows,
                options.positions,
                lambda steps: bar.advance(task, steps),
                differentiable=subject.imported is None,
            )
            bar.update(task, completed=bar.tasks[task].total)
        except Unmeasurable as error:
            unmeasured = str(error)
    report = AuditReport(
        model=AuditedModel(
            source=subject.source,
            file=options.file.resolve().name,
            sha256=subject.sha256,
            architecture=subject.architecture,
            parameters=sum(tensor.size for tensor in subject.weights.values()),
            tensors=subject.tensors or {},
            notes=subject.notes,
        ),
        text=_text(subject, found, windows),
        perplexity=None if found is None else found.losses.perplexity(found.losses.recurrent),
        certificate=certificate,
        margins=margins(certificate),
        unmeasured=unmeasured,
        windows=() if found is None else found.windows,
        gradients=() if found is None else found.lags,
        recommended=_recommend(options.tolerance, certificate, found),
    )
    show(report, console)
    written = ", ".join(str(path) for path in _write(report, folder))
    console.print(f"written: {written}", highlight=False, soft_wrap=True)
    if options.export is not None:
        if found is None:
            raise RunError(f"{options.export / name} was not written: {unmeasured}")
        _export(options, options.export / name, subject, found, report, network, console)
    return report


def _name(file: Path) -> str:
    """Returns a name for the audited model: its file's name, with only characters that a bundle's name may have."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", file.resolve().stem if file.is_file() else file.resolve().name)
    return plain.lstrip("._-")[:64] or "model"


def _recommend(tolerance: float, certificate: Certificate, found: Forgetting | None) -> Recommended:
    return Recommended(
        tolerance=tolerance,
        p99=None if found is None else smallest_window(found.windows, tolerance, "p99"),
        max=None if found is None else smallest_window(found.windows, tolerance, "max"),
        certified=certificate.smallest_window(tolerance),
        perplexity=None if found is None else smallest_close_window(found.losses),
    )


def _text(subject: Subject, found: Forgetting | None, windows: Sequence[int]) -> AuditedText:
    corpus, stream = subject.corpus, subject.corpus.streams[subject.split]
    vocabulary = corpus.vocabulary
    unknown = [index for index in range(vocabulary.size) if vocabulary.token(index) == UNK]
    return AuditedText(
        split="all of the given data" if subject.split == "audit" else f"the {subject.split} split of the run",
        files=corpus.hashes,
        tokens=len(stream) - 1,
        words=corpus.words.get(subject.split),
        unknown=int(np.isin(stream, unknown).sum()),
        positions=0 if found is None else found.losses.positions,
        behind=2 * max(windows),
        gradient_positions=0 if found is None else found.gradient_positions,
    )


@contextmanager
def _writing_report(folder: Path) -> Iterator[None]:
    """Creates the report's folder. Raises RunError for an OSError, also of the code in the context."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RunError(
            f"{folder}: the report cannot be written: {error.strerror}; name a folder with --report"
        ) from error


def _write(report: AuditReport, folder: Path) -> list[Path]:
    """Writes the report and, if the report has measurements, its plot. Deletes the plot of an earlier audit. Returns
    the paths of the written files."""
    json, plot = folder / "audit.json", folder / "audit.png"
    with _writing_report(folder):
        json.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        plot.unlink(missing_ok=True)
        if report.unmeasured is None:
            plot_audit(report, plot)
    return [json] if report.unmeasured is not None else [json, plot]


def _export(
    options: AuditOptions,
    target: Path,
    subject: Subject,
    found: Forgetting,
    report: AuditReport,
    network: Network,
    console: Console,
) -> None:
    """Writes the bundle `target`. The bundle's default window is the recommended k (`Recommended.p99`), or the largest
    window if no k is recommended. The manifest has no perplexities if the sequences were joined for the measurement.
    Raises RunError."""
    recommended = report.recommended.p99
    window = min(recommended or options.max_window, options.max_window)
    with writing(target):
        manifest = export_bundle(
            target,
            architecture=subject.architecture,
            weights=subject.weights,
            vocabulary_kind=subject.corpus.vocabulary.kind,
            tokenizer_json=subject.corpus.tokenizer_json,
            name=target.name,
            version=options.version,
            description=f"Imported from {report.model.file}"
            + ("; its perplexity was measured on the text given to the audit." if not subject.joined else "."),
            window=window,
            max_window=options.max_window,
            quality=quality({"audit": found.losses}, judged="audit") if not subject.joined else None,
            provenance=_provenance(options, report),
            sample_tokens=subject.corpus.streams["audit"][:SAMPLE_TOKENS].tolist(),
            torch_network=network,
            replace=options.replace,
            start=subject.corpus.start,
            reserved=subject.corpus.vocabulary.reserved,
        )
    _print_bundle(manifest, target, recommended, report, console)


def _print_bundle(
    manifest: Manifest, target: Path, recommended: int | None, report: AuditReport, console: Console
) -> None:
    size = sum(file.stat().st_size for file in target.iterdir())
    certified = "certified" if manifest.certificate.certified else "not certified"
    console.print(f"{target}: {size:,} bytes, k = {manifest.window}, {certified}", highlight=False, soft_wrap=True)
    if recommended is None:
        console.print(
            f"no evaluated window has a total variation of at most {report.recommended.tolerance:g} at 99 % of the "
            "positions: the bundle's default k is its largest k",
            highlight=False,
        )


def _provenance(options: AuditOptions, report: AuditReport) -> Provenance:
    """Returns the provenance of an imported model. The figures of the training are 0, because Wane did not train the
    model. The field `config` describes the imported file and contains the recommended window lengths."""
    origin = describe_origin(options.command, torch.device("cpu"))
    imported = report.model.model_dump(mode="json", include={"file", "sha256", "tensors", "notes"})
    return Provenance(
        created=origin.started,
        command=options.command,
        config={"imported": imported, "recommended": report.recommended.model_dump(mode="json")},
        seed=0,
        steps=0,
        best_step=0,
        git_commit=origin.git_commit,
        data=report.text.files,
        versions=origin.versions | {name: version(name) for name in ("onnx", "onnxruntime")},
        hardware=origin.hardware,
        train_wall_s=0.0,
        attribution=options.attribution,
    )
