"""The parts of a run in the order of their value, and the process of each."""

from __future__ import annotations

import os
import traceback
from importlib import import_module
from typing import NamedTuple

from benchmarks.gpu.part import Part, Skipped


class Kind(NamedTuple):
    """One kind of part. title: what it measures. minutes: its limit in a run of ten minutes. module and function: the
    code that measures it."""

    title: str
    minutes: float
    module: str
    function: str = "run"


PARTS = {
    "chip": Kind("the chip, copies and products", 0.5, "chip"),
    "scan": Kind("a long sequence, and windows", 1.0, "scan"),
    "train": Kind("training on words", 4.0, "train"),
    "parity": Kind("the shipped graphs against the oracle", 0.75, "parity"),
    "step": Kind("steps against the roofline", 2.0, "step"),
    "served": Kind("the service on the device", 0.75, "served", "run_device"),
    "cores": Kind("replicas on the machine's cores", 1.0, "served", "run_cores"),
}


def measure(part: Part) -> None:
    """Runs one part in this process, which becomes the leader of a session with all its children. Keeps in the record
    whether it was done, skipped because something is missing, or failed."""
    os.setsid()
    kind = PARTS[part.name]
    part.keep(part=kind.title, device=part.device, small=part.small)
    try:
        getattr(import_module(f"benchmarks.gpu.{kind.module}"), kind.function)(part)
        part.keep(status="done")
    except ModuleNotFoundError as error:
        part.keep(status="skipped", reason=f"needs the package {error.name}")
    except Skipped as error:
        part.keep(status="skipped", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        part.keep(status="failed", reason=f"{type(error).__name__}: {error}")
