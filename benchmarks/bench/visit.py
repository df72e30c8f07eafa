"""Runs a visit: measures one contender, or a server of this checkout together with the same server of another checkout
(the baseline), with one model in one round. Starts the servers on the model's bundle, checks the servers' answers,
applies the loads, and stops the servers.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench.contenders import ROOT, Contender
from benchmarks.bench.loads import WINDOW, Load, NotUnderstood, Stage, check, loads_of, step_request
from benchmarks.bench.process import ServerProcess
from benchmarks.bench.results import Measured, Visit
from benchmarks.bench.services import service
from benchmarks.bench.wire import window_body
from benchmarks.peers.window_model import WindowModel
from benchmarks.summary import commit
from wane.models.bundle_checks import read_manifest
from wane.models.manifest import Manifest

WARM_S = 1.0


def visit(contenders: Sequence[Contender], bundle: Path, round_: int, seconds: float, logs: Path) -> list[Visit]:
    """Applies each load of the first contender to each of the contenders. After a warm-up of one second, a load runs
    for `seconds`.

    The contenders' order changes from load to load and from round to round. Servers write their logs into the folder
    `logs`. Raises ServerFailed, WrongAnswer, LoadFailed, BadAnswer, httpx.HTTPError.
    """
    manifest = read_manifest(bundle)
    expected = WindowModel(bundle).ranked
    loads: dict[str, dict[str, Measured]] = {contender.name: {} for contender in contenders}
    refused: dict[str, dict[str, str]] = {contender.name: {} for contender in contenders}
    with contextlib.ExitStack() as stack:
        stages = [_staged(contender, bundle, manifest, round_, logs, stack) for contender in contenders]
        for stage in stages:
            check(stage, expected)
        for index, load in enumerate(loads_of(contenders[0], manifest.name)):
            for stage in stages if (round_ + index) % 2 == 0 else reversed(stages):
                name = stage.contender.name
                try:
                    loads[name][load.name] = _measure(load, stage, seconds)
                except NotUnderstood as error:
                    refused[name][load.name] = str(error)
    return [
        Visit(
            model=manifest.name,
            contender=contender.name,
            round=round_,
            version=version(contender),
            loads=loads[contender.name],
            refused=refused[contender.name],
        )
        for contender in contenders
    ]


def _staged(
    contender: Contender, bundle: Path, manifest: Manifest, round_: int, logs: Path, stack: contextlib.ExitStack
) -> Stage:
    """Starts a contender and its services. The exit of `stack` stops them."""
    server = None
    if contender.command:
        addresses: dict[str, str] = {name: stack.enter_context(service(name)) for name in contender.services}
        log = logs / f"{manifest.name}-{contender.name}-{round_}.log"
        server = stack.enter_context(ServerProcess(contender, bundle, log, addresses))
        if contender.path:
            server.wait_ready(contender.path, window_body(contender.wire, [1] * WINDOW))
        else:
            server.wait_ready(*step_request(contender.step_path, "ready", {"tokens": [1]}))
    return Stage(contender, bundle, manifest, round_, stack, server)


def _measure(load: Load, stage: Stage, seconds: float) -> Measured:
    drive = load.prepare(stage)
    drive(WARM_S)
    spent = stage.server.cpu_seconds() if stage.server else 0.0
    timed = drive(seconds)
    cpu_s = stage.server.cpu_seconds() - spent if stage.server else None
    return Measured(**timed.model_dump(), items=timed.requests * load.items, server_cpu_s=cpu_s)


def version(contender: Contender) -> str:
    """Returns the version of the contender and that of its onnxruntime. For a server of another checkout, the text also
    contains the commit of that checkout."""
    names = [name for name in (contender.package, "onnxruntime") if name]
    program = f"from importlib.metadata import version\nprint(*(f'{{n}} {{version(n)}}' for n in {names!r}), sep=', ')"
    python = [str(contender.programs / "python"), "-c", program]
    found = subprocess.run(python, capture_output=True, text=True, check=True).stdout.strip()
    known = commit(contender.tree) if contender.tree != ROOT else None
    return f"commit {known}, {found}" if known else found
