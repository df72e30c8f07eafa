"""What the run should reach on one H100 or H200, beside what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MARKS = {True: "  reached", False: "  missed", None: ""}

Records = dict[str, dict[str, Any]]


class Target(NamedTuple):
    """One reach. found: returns the measured value from the records, or None. reached: whether a value is enough; None
    for a value that is only stated."""

    what: str
    reach: str
    found: Callable[[Records], float | None]
    reached: Callable[[float], bool] | None
    form: str


def _steps(records: Records, **wanted: object) -> list[dict[str, Any]]:
    """Returns the measured steps of the service's runner with these figures."""
    return [
        step
        for step in records.get("step", {}).get("steps", [])
        if step["way"].startswith("runner") and "seconds" in step and wanted.items() <= step.items()
    ]


def _share(records: Records) -> float | None:
    steps = _steps(records, model="lstm-1024", batch=8192, format="bf16")
    return max((step["share"] for step in steps), default=None)


def _device_us(model: str) -> Callable[[Records], float | None]:
    def found(records: Records) -> float | None:
        steps = [
            step for step in _steps(records, model=model, batch=1, format="float32") if step["device_s"] is not None
        ]
        return min((1e6 * step["device_s"] for step in steps), default=None)

    return found


def _load(name: str) -> Callable[[Records], float | None]:
    def found(records: Records) -> float | None:
        loads = [load for load in records.get("served", {}).get("loads", []) if load["connections"] >= 1000]
        return loads[0][name] if loads else None

    return found


def _replicas(records: Records) -> float | None:
    rates = {one["replicas"]: one["steps_per_s"] for one in records.get("cores", {}).get("replicas", [])}
    return rates[16] / rates[1] if {1, 16} <= rates.keys() else None


TARGETS = (
    Target(
        "step of 1,024 units, batch 8,192, bf16, of the roofline", "60 %", _share, lambda value: value >= 0.6, ".1%"
    ),
    Target(
        "2^20 tokens, 256 units: in order / parallel",
        "200 times",
        lambda records: records.get("scan", {}).get("times_in_order"),
        lambda value: value >= 200,
        ",.0f",
    ),
    Target("step at batch 1 on the device, LSTM of 256, us", "30", _device_us("lstm-256"), lambda us: us <= 30, ".1f"),
    Target(
        "step at batch 1 on the device, gated-stable, us", "30", _device_us("gated-stable"), lambda us: us <= 30, ".1f"
    ),
    Target("service, 1,024 connections, steps/s", "HTTP's", _load("steps_per_s"), None, ",.0f"),
    Target("service, 1,024 connections, busy share of the device", "stated", _load("busy_share"), None, ".1%"),
    Target("16 replicas / 1 replica", "10", _replicas, lambda value: value >= 10, ".1f"),
    Target(
        "certified model on words, validation perplexity",
        "stated",
        lambda records: records.get("train", {}).get("best_valid_perplexity"),
        None,
        ".1f",
    ),
)


def summary(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Reads the records of all parts. Returns a table as lines, and the same as a document. The sizes of a rehearsal
    are small, so its values neither reach nor miss anything."""
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    small = any(record.get("small") for record in records.values())
    lines = ["A rehearsal: its sizes are small, and its values say nothing about a GPU."] if small else []
    lines += [f"{'':62}{'reach':>12}{'measured':>16}"]
    rows = []
    for target in TARGETS:
        value = target.found(records)
        reached = None if small or value is None or target.reached is None else target.reached(value)
        shown = "not measured" if value is None else format(value, target.form)
        lines.append(f"{target.what:62}{target.reach:>12}{shown:>16}{MARKS[reached]}")
        rows.append({"what": target.what, "reach": target.reach, "measured": value, "reached": reached})
    states = {name: record["status"] for name, record in records.items() if "status" in record}
    return lines, {"targets": rows, "parts": states, "chip": records.get("chip", {}).get("chip")}
