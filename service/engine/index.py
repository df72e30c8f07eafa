"""Every version of a model that this process has to do with, and what is with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from service.engine.engine import Engine
from service.engine.repository import Found
from service.engine.retirement import Retirement
from service.errors import LoadFailed

Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of a model, and what is with it; `reason` says why it is not ready, or is still there."""

    name: str
    version: str
    condition: Condition
    reason: str = ""


def index(
    served: Iterable[Engine],
    retirement: Retirement,
    loading: Found | None,
    bundles: Iterable[Found],
    failures: Mapping[str, LoadFailed],
) -> Sequence[Entry]:
    """Every version that is `served`, is on its way in (`loading`) or out, or could be loaded, for it is one of the
    `bundles`: by name. `failures` has, by model, why the last load of it failed."""
    entries = [Entry(engine.name, engine.version, "READY") for engine in served]
    entries += [
        Entry(one.name, one.version, "READY", "for the sessions of its tokenizer only") for one in retirement.lingering
    ]
    entries += [
        Entry(one.name, one.version, "UNLOADING", "until its last requests are answered") for one in retirement.leaving
    ]
    if loading is not None:
        entries.append(Entry(loading.name, loading.version, "LOADING"))
    told = {(entry.name, entry.version) for entry in entries if entry.condition in ("READY", "LOADING")}
    for found in bundles:
        if (found.name, found.version) not in told:
            failure = failures.get(found.name)
            reason = found.reason or ("not loaded" if failure is None else failure.reason)
            entries.append(Entry(found.name, found.version, "UNAVAILABLE", reason))
    return sorted(entries, key=lambda entry: (entry.name, int(entry.version or 0)))
