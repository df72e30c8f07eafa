"""One visit: a contender is started on a bundle, its answers are checked, it is put under each load, and stopped."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

from benchmarks.bench.contenders import Contender
from benchmarks.bench.loads import WINDOW, Load, Stage, check, loads_of
from benchmarks.bench.process import ServerProcess
from benchmarks.bench.results import Measured, Visit
from benchmarks.bench.wire import window_body
from benchmarks.peers.window_model import WindowModel

WARM_S = 1.0


def visit(contender: Contender, bundle: Path, round_: int, seconds: float, log: Path) -> Visit:
    """Every load of this contender, for `seconds` each after a second unmeasured.

    Raises ServerFailed, WrongAnswer, LoadFailed, BadAnswer, httpx.HTTPError.
    """
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    vocabulary = int(manifest["vocabulary"]["size"])
    with contextlib.ExitStack() as stack:
        server = None
        if contender.command:
            server = stack.enter_context(ServerProcess(contender, bundle, log))
            server.wait_ready(contender.path, window_body(contender.wire, [1] * WINDOW))
        stage = Stage(contender, bundle, vocabulary, round_, stack, server)
        check(stage, WindowModel(bundle).ranked)
        loads = {load.name: _measure(load, stage, seconds) for load in loads_of(contender, manifest["name"])}
    return Visit(
        model=manifest["name"], contender=contender.name, round=round_, version=version(contender), loads=loads
    )


def _measure(load: Load, stage: Stage, seconds: float) -> Measured:
    drive = load.prepare(stage)
    drive(WARM_S)
    spent, begun = stage.server.cpu_seconds() if stage.server else 0.0, time.perf_counter()
    timed = drive(seconds)
    cpus = (stage.server.cpu_seconds() - spent) / (time.perf_counter() - begun) if stage.server else None
    return Measured(**timed.model_dump(), items=timed.requests * load.items, server_cpus=cpus)


def version(contender: Contender) -> str:
    """Of what is measured and of its onnxruntime, as its own environment has them."""
    names = [name for name in (contender.package, "onnxruntime") if name]
    program = f"from importlib.metadata import version\nprint(*(f'{{n}} {{version(n)}}' for n in {names!r}), sep=', ')"
    python = [str(contender.programs / "python"), "-c", program]
    return subprocess.run(python, capture_output=True, text=True, check=True).stdout.strip()
