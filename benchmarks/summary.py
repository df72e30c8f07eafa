"""How measurements are stored as JSON. A file has the median, the smallest and the largest of several measurements
instead of all measurements, and the provenance of the figures."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from wane.models.bundle_checks import MANIFEST, read_manifest
from wane.models.layer_registry import Frozen

WIDTH = 120
"""The largest width of a line of JSON."""


class Spread(Frozen):
    """The median, the smallest and the largest of several measurements. A format such as `f"{spread:.1f}"` applies to
    each of these three values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarises `values`, which must not be empty."""
        some = [float(value) for value in values]
        return cls(median=digits(statistics.median(some)), least=digits(min(some)), most=digits(max(some)))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


def digits(value: float) -> float:
    """Rounds to nine significant digits. No measurement is that precise, so tables show the same figures as without
    this rounding."""
    return float(f"{value:.9g}")


def ratios(above: Iterable[float], below: Iterable[float]) -> Spread:
    """Divides each element of one series by the element of the other series at the same index. Returns the spread of
    these ratios. Raises ValueError if the lengths of the two series differ."""
    return Spread.of(a / b for a, b in zip(above, below, strict=True))


def cpu() -> str:
    """Returns the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Returns the commit of the checkout that contains `folder`; None outside a repository."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


def command(module: str, arguments: Iterable[str]) -> str:
    """Returns the command line. Absolute paths, which are private, are replaced with file names."""
    words = [Path(word).name if word.startswith("/") else word for word in arguments]
    return shlex.join(["python", "-m", module, *words])


BUNDLES = Path(__file__).parents[1] / "models" / "bundles"


MEASURED_FIELDS = ("architecture", "window", "max_window", "precision", "cache", "weights")
"""The fields of a manifest that determine what a bundle computes. The field `weights` is replaced with the hash of the
weights file."""


def bundles_of_text(folder: Path) -> list[Path]:
    """Returns the folder's bundles whose tokens are parts of a text, sorted by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path for path in paths if read_manifest(path).vocabulary.kind != "events"]


def bundle_hashes(names: Iterable[str] | None = None) -> dict[str, str]:
    """Returns, for each shipped bundle, the first 16 digits of a SHA-256 over MEASURED_FIELDS in the manifest's file.

    Two versions of a bundle that compute the same function have the same hash. `names` are the names of the hashed
    bundles; None for all shipped bundles. Leaves out the names of bundles that do not ship.
    """
    found = sorted(path.parent.name for path in BUNDLES.glob("*/manifest.json"))
    found = found if names is None else sorted({*found} & {*names})
    return {name: _bundle_hash(json.loads((BUNDLES / name / MANIFEST).read_text(encoding="utf-8"))) for name in found}


def _bundle_hash(manifest: dict[str, Any]) -> str:
    fields = {name: manifest[name] for name in MEASURED_FIELDS}
    fields["weights"] = manifest["files"][manifest["weights"]]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def provenance(module: str, *packages: str, bundles: Iterable[str] | None = None) -> dict[str, Any]:
    """Returns this process's command, commit and machine, the versions of Python and of `packages`, and the hashes of
    the measured bundles. `bundles` are the names of the measured bundles; None for all shipped bundles."""
    return {
        "bundles": bundle_hashes(bundles),
        "command": command(module, sys.argv[1:]),
        "commit": commit(),
        "machine": f"{cpu()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
    }


def write_json(path: Path, document: object) -> None:
    """Writes a document atomically. Raises ValueError if a number in it is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_suffix(".part")
    building.write_text(_laid_out(_plain(document), "", 0) + "\n", encoding="utf-8")
    building.replace(path)


def rounded(document: object) -> Any:
    """Returns a document for JSON with its floats rounded to nine significant digits."""
    return _each(document, lambda value: digits(value) if isinstance(value, float) else value)


def _plain(document: object) -> Any:
    """Returns a document for JSON that contains only dicts, lists and scalars."""
    return _each(document, lambda value: value)


def _each(value: object, of: Callable[[object], object]) -> Any:
    if isinstance(value, Frozen):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): _each(item, of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, of) for item in value]
    return of(value)


def _laid_out(value: Any, indent: str, taken: int) -> str:
    """Returns JSON whose lines are filled up to WIDTH. Each list or dict in a list starts a new line.

    taken: the number of characters that precede the value on its first line.
    """
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or taken + len(flat) < WIDTH:
        return flat
    inner = indent + " "
    items = [("", item) for item in value] if isinstance(value, list) else value.items()
    lines: list[str] = []
    filling = False
    for key, item in items:
        start = f"{json.dumps(key)}: " if isinstance(value, dict) else ""
        part = start + json.dumps(item)
        if filling and len(lines[-1]) + len(part) + 3 <= WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(inner + start + _laid_out(item, inner, len(inner + start)))
            filling = "\n" not in lines[-1] and not (isinstance(value, list) and isinstance(item, dict | list))
    return flat[0] + "\n" + ",\n".join(lines) + f"\n{indent}{flat[-1]}"
