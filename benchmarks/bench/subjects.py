"""The two models with which the contenders are measured, and the metadata of a run."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.bench.contenders import LSTM, ROOT, SHIPPED
from benchmarks.bench.results import Results
from benchmarks.summary import commit, cpu
from wane.models.bundle_checks import read_manifest

WORK = ROOT / "build" / "bench"
MODELS = {LSTM: WORK / "models" / LSTM, SHIPPED: ROOT / "models" / "bundles" / SHIPPED}


def export_lstm() -> None:
    """Exports the LSTM's bundle if it is missing or the code has changed."""
    sources = hashed([*sorted((ROOT / "models").rglob("*.py")), ROOT / "benchmarks" / "bench" / "lstm256.py"])
    stamp = MODELS[LSTM].parent / f"{LSTM}.sources"
    if not MODELS[LSTM].exists() or not stamp.exists() or stamp.read_text() != sources:
        shutil.rmtree(MODELS[LSTM], ignore_errors=True)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.bench.lstm256", str(MODELS[LSTM].parent)], cwd=ROOT, check=True
        )
        stamp.write_text(sources)


def hashed(files: list[Path], root: Path = ROOT) -> str:
    """Returns a hash of the names and the contents of `files`, which are all in the folder `root`."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def facts(model: str) -> dict[str, str]:
    """Returns a model's description and the hash of its weights."""
    manifest = read_manifest(MODELS[model])
    network = manifest.architecture
    layers = itertools.groupby(network.layers, lambda layer: f"{layer.kind} of {layer.units}")
    described = ", ".join(f"{len(list(same))} x {layer}" for layer, same in layers)
    about = f"{described}, vocabulary {network.vocabulary_size:,}"
    return {"about": about, "weights": manifest.files[manifest.weights]}


def empty(models: list[str], rounds: int, seconds: float) -> Results:
    """Returns a run's results with its metadata and without figures."""
    return Results(
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit(),
        machine={"cpu": cpu(), "cores": f"{os.cpu_count()} cores", "python": f"Python {platform.python_version()}"},
        seconds=seconds,
        rounds=rounds,
        models={model: facts(model) for model in models},
    )
