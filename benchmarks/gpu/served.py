"""Parts 6 and 7: the service over HTTP. Part 6 serves on the device, with 64 and 1,024 connections, and samples the
device's busy share. Part 7 runs replicas of one thread each on the machine's cores, which the clients share with them.
Both parts need the service's packages, onnx and torch, and use the model of `benchmarks/bench/lstm256.py`.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.bench import lstm256
from benchmarks.gpu.clients import load, start, wane
from benchmarks.gpu.part import Part
from benchmarks.summary import BUNDLES
from wane.models.bundle import Bundle

SAMPLE_MS = 100
CONNECTIONS, REPLICAS = (1024, 64), (1, 16, 8, 4, 2)
"""What parts 6 and 7 measure, in the order of its value."""


def _bundle(part: Part) -> Bundle:
    """Returns the model's bundle, which the first of the two parts makes. A rehearsal serves a shipped bundle, if this
    copy has its weights, because it takes less time to open than to make one."""
    shipped = BUNDLES / "lstm"
    if part.small and (shipped / "weights.safetensors").exists():
        return Bundle.read(shipped)
    folder = part.folder / "bundles" / lstm256.NAME
    if not (folder / "manifest.json").exists():
        lstm256.export(folder.parent)
    return Bundle.read(folder)


@contextmanager
def busy_share(device: str) -> Iterator[list[float]]:
    """Samples the share of time in which the device runs a kernel. Yields a list that has the mean afterwards; it stays
    empty on a CPU and without nvidia-smi."""
    found: list[float] = []
    if device != "cuda":
        yield found
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        sampler = subprocess.Popen([*command, f"-lms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield found
        return
    try:
        yield found
    finally:
        sampler.terminate()
        samples = [float(line) / 100 for line in sampler.communicate()[0].split() if line.isdigit()]
        if samples:
            found.append(statistics.mean(samples))


def run_device(part: Part) -> None:
    """Measures part 6."""
    bundle, cores = _bundle(part), os.cpu_count() or 1
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server has a file for each connection
    options = [f"--device={part.device}", "--max-batch-size=1024", "--max-queue=8192", "--max-connections=2048"]
    seconds = 0.5 if part.small else 5.0
    with ExitStack() as stack:
        (server,) = start(stack, wane(options), bundle.path, part.folder / "logs", 1)
        for connections in (4, 16) if part.small else CONNECTIONS:
            processes = 1 if part.small else min(8, max(1, cores // 2))
            before = server.cpu_seconds()
            with busy_share(part.device) as busy:
                found = load([server], connections, processes, bundle.vocabulary.size, seconds)
            found |= {"busy_share": busy[0] if busy else None, "server_cpu_s": server.cpu_seconds() - before}
            part.add("loads", found)
            part.say(f"{connections:,} connections: {found['steps_per_s']:,.0f} steps/s")


def run_cores(part: Part) -> None:
    """Measures part 7."""
    bundle, cores = _bundle(part), os.cpu_count() or 1
    part.keep(cores=cores)
    seconds = 0.5 if part.small else 4.0
    for replicas in (1, 2) if part.small else REPLICAS:
        if replicas > max(2, cores):
            continue
        if part.left_s < 3 * seconds:
            part.keep(stopped="the time")
            return
        with ExitStack() as stack:
            options = ["--device=cpu", "--threads=1"]
            servers = start(stack, wane(options), bundle.path, part.folder / "logs", replicas)
            found = load(servers, 4 if part.small else 64, 1, bundle.vocabulary.size, seconds)
        part.add("replicas", {"replicas": replicas, **found})
        part.say(f"{replicas} replicas: {found['steps_per_s']:,.0f} steps/s")
