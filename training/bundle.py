"""The commands `wane export` and `wane cache` on a bundle. The bundle that they write is a new version with the same
weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from wane.models.bundle import Bundle, BundleError, check_place
from wane.models.cache_statistics import cache_statistics
from wane.models.export import export_again
from wane.models.manifest import CacheModel, Manifest, Precision
from wane.models.networks import Network
from wane.training.cache import cache_start, fit_cache
from wane.training.config import DataConfig
from wane.training.data import Corpus, load_corpus, load_whole
from wane.training.errors import DataError, RunError
from wane.training.evaluate import (
    POSITIONS,
    WINDOWS,
    Advance,
    evaluation_steps,
    quality,
    recurrent_losses,
)
from wane.training.evaluate_events import session_losses, sessions_of
from wane.training.run import EVALUATED_SPLITS, LONGEST_WINDOW, bundle_place, losses_of_split, quality_table, writing

LENGTHS = (64, 512, 1024, 2048)
"""The cache lengths, in tokens, of the table that `wane cache` prints."""

LARGEST_STREAM = 1 << 22
"""The largest number of tokens that `wane cache` reads from data on which the bundle was not trained."""


LEAST_HALF = 64
"""The smallest allowed number of tokens in each of the two halves into which `corpus_of` cuts data on which the bundle
was not trained."""


def open_bundle(path: Path, *, certified: bool = True) -> Bundle:
    """Reads a bundle of Wane's own layers. If not `certified`, does not check the certificate. Raises RunError."""
    try:
        bundle = Bundle.read(path) if certified else Bundle.open(path)
    except BundleError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if bundle.manifest.imported:
        raise RunError(
            f"{path} is an imported graph, of which no layer is known: `wane import` its file again, or `wane audit` it"
        )
    return bundle


def export_bundle_again(
    path: Path,
    bundles: Path,
    version: str | None,
    console: Console,
    precision: Precision | None,
    replace: bool,
    keep_versions: bool = False,
) -> Path:
    """Exports the weights of the bundle at `path` again, with the graphs of the installed Wane version. Writes to the
    folder that `bundle_place` returns. The new bundle has the old bundle's name, with the suffix `-int8` if the export
    quantises the weights.

    `version`: the new bundle's version, None for the old bundle's version plus one. Returns the path of the new bundle.
    Raises RunError.
    """
    source = open_bundle(path, certified=False)  # the certificate is computed again
    manifest = source.manifest
    quantised = precision == "int8" and manifest.precision != "int8"
    version = version or next_version(manifest)
    name = f"{manifest.name}-int8" if quantised else manifest.name
    target = bundle_place(bundles, name, version, keep_versions)
    with writing(target):
        written = export_again(target, source, version=version, precision=precision, replace=replace)
    console.print(f"{target}: version {written.version}, schema {written.schema_version}, weights unchanged")
    return target


def next_version(manifest: Manifest) -> str:
    """Returns the version number of the manifest plus one."""
    return str(int(manifest.version) + 1)


@dataclass(frozen=True, slots=True)
class CacheFits:
    """Caches of several lengths, fitted on the validation split.

    `alone`: the mean loss of the network without a cache, in nats per token, by split. `models`: the fitted cache, by
    length. `losses`: the mixture's mean loss, by length and split.
    """

    alone: dict[str, float]
    models: dict[int, CacheModel]
    losses: dict[int, dict[str, float]]


def fit_bundle_cache(
    path: Path,
    data: Path | None,
    bundles: Path | None,
    length: int,
    version: str | None,
    console: Console,
    replace: bool = False,
) -> CacheFits:
    """Fits a cache (`models/cache_mixture.py`) to a bundle's network and prints the perplexity for several lengths.

    `data`: a file or folder, None for the corpus on which the bundle was trained, if Wane can download it. Data on
    which the bundle was not trained is cut into two halves, and the cache is fitted on the first half. `bundles`: the
    folder of the new bundle, which has the cache of `length` tokens and an evaluation with this cache; None to write no
    bundle. `version`: the new bundle's version, None for the old bundle's version plus one. Raises TrainingError.
    """
    source = open_bundle(path, certified=False)  # the certificate is computed again
    manifest = source.manifest
    if manifest.precision != "float32":
        raise RunError(
            f"{path} has the precision {manifest.precision}: fit the cache to the float32 bundle, then export that "
            f"bundle with --precision {manifest.precision}"
        )
    version = version or next_version(manifest)
    target = None if bundles is None else bundle_place(bundles, manifest.name, version)
    if target is not None:
        with writing(target):
            check_place(target, version, None, replace)
    corpus, network = corpus_of(source, data), network_of(source)
    windows = [k for k in WINDOWS if k <= max(manifest.max_window, LONGEST_WINDOW)]
    steps = sum(len(corpus.streams[split]) - 1 for split in EVALUATED_SPLITS)
    if target is not None:
        steps += evaluation_steps(corpus, EVALUATED_SPLITS, windows, POSITIONS)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("fitting", total=steps)

        def advance(tokens: int) -> None:
            bar.advance(task, tokens)

        fits = fit_lengths(network, corpus, sorted({length, *LENGTHS}), advance)
        evaluated = None
        if target is not None:
            bar.update(task, description="evaluating")
            model = fits.models[length]
            splits = {
                split: losses_of_split(network, corpus, split, windows, advance, model) for split in EVALUATED_SPLITS
            }
            evaluated = quality(splits)
        bar.update(task, completed=steps)
    console.print(_fits_table(manifest.name, fits))
    if target is not None and evaluated is not None:
        console.print(quality_table(manifest.name, evaluated))
        with writing(target):
            model = fits.models[length]
            export_again(target, source, version=version, cache=model, quality=evaluated, replace=replace)
        console.print(f"{target}: version {version}, cache of {length} tokens, weights unchanged")
    return fits


def fit_lengths(network: Network, corpus: Corpus, lengths: list[int], advance: Advance | None = None) -> CacheFits:
    """Fits a cache of each length on the split `valid`. Evaluates each cache on `valid` and `test`."""
    start = cache_start(corpus.vocabulary)
    alone, at = {}, {}
    for split in EVALUATED_SPLITS:
        every = _network_losses(network, corpus, split, advance)
        at[split] = np.flatnonzero(~np.isnan(every))
        alone[split] = every[at[split]]
    models, losses = {}, {}
    for length in lengths:
        statistics = {
            split: cache_statistics(corpus.streams[split], length, start).at(at[split]) for split in EVALUATED_SPLITS
        }
        models[length] = fit_cache(statistics["valid"], alone["valid"])
        losses[length] = {
            split: -float(statistics[split].log_probabilities(models[length], -alone[split]).mean())
            for split in EVALUATED_SPLITS
        }
    return CacheFits({split: float(found.mean()) for split, found in alone.items()}, models, losses)


def _network_losses(
    network: Network, corpus: Corpus, split: str, advance: Advance | None = None
) -> NDArray[np.float64]:
    """Returns the network's -log p of every token but the first, float64 (n,). The value is NaN for a token that the
    network does not predict."""
    if corpus.vocabulary.kind == "events":
        return session_losses(network, sessions_of(corpus, split), advance=advance)[0]
    return recurrent_losses(network, corpus.streams[split], advance).double().numpy(force=True)


def _fits_table(name: str, fits: CacheFits) -> Table:
    """Returns the table of perplexity per token by cache length and split."""
    table = Table(title=f"{name}: perplexity per token with a cache of N tokens")
    table.add_column("N")
    for split in EVALUATED_SPLITS:
        table.add_column(split, justify="right")
    for label, losses in [("no cache", fits.alone), *((f"{length:,}", fits.losses[length]) for length in fits.models)]:
        table.add_row(label, *(f"{math.exp(losses[split]):.3f}" for split in EVALUATED_SPLITS))
    return table


def network_of(bundle: Bundle) -> Network:
    """Returns a bundle's network with its weights, for evaluation."""
    network = Network(bundle.manifest.architecture)
    network.load_weights({name: torch.from_numpy(np.array(tensor)) for name, tensor in bundle.weights().items()})
    return network.eval()


def corpus_of(bundle: Bundle, data: Path | None) -> Corpus:
    """Reads `data`, or downloads the corpus if `data` is None. If the hashes of the files are those of the bundle's
    training corpus, returns this corpus with its splits. Otherwise returns the two halves of `data` as the splits
    `valid` and `test`."""
    manifest = bundle.manifest
    tokenizer_json = (bundle.path / manifest.tokenizer).read_text(encoding="utf-8")
    try:
        config = DataConfig.model_validate(manifest.provenance.config.get("data"))
    except ValidationError:  # the bundle was not trained by Wane
        config = None
    if config is not None:
        try:
            corpus = load_corpus(config.model_copy(update={"path": data}), tokenizer_json)
        except DataError:
            if data is None:
                raise
        else:
            if corpus.hashes == manifest.provenance.data:
                return corpus
    if data is None:
        raise RunError(f"{bundle.path} does not name a corpus that Wane can download: give --data")
    whole = load_whole(data, bundle.vocabulary, tokenizer_json, LARGEST_STREAM, manifest.start, config)
    (stream,) = whole.streams.values()
    ends = np.flatnonzero(stream == bundle.vocabulary.eos_id)
    middle = int(ends[np.searchsorted(ends, len(stream) // 2).clip(max=len(ends) - 1)])
    halves = {"valid": stream[: middle + 1], "test": stream[middle:]}
    if min(map(len, halves.values())) < LEAST_HALF:
        raise RunError(f"{data} has {len(stream)} tokens, too few to fit a cache on half of them")
    return Corpus(bundle.vocabulary, tokenizer_json, halves, {}, whole.hashes, manifest.start)
