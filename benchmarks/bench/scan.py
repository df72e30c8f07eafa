"""Computes a long sequence's last state or its tokens' log-probabilities with the methods of
`benchmarks.parallel_scan`.

Modules that need the extra `train` are imported where they are used, so that the tables can be printed without this
extra.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.bench.bare import loop
from benchmarks.bench.results import Timed

TOKENS = 65_536
THREADS = 2
NATIVE = "native"
WAYS = ("one call", "in pieces", "parallel")
KINDS = ("state", "score")


def prepare_way(bundle: Path, kind: str, way: str, stack: ExitStack) -> Callable[[float], Timed]:
    """Returns a function that computes the result `kind` (one of KINDS) again and again with the method `way` (one of
    WAYS), for a given number of seconds. The exit of `stack` stops the subject's threads."""
    from benchmarks.parallel_scan import Subject

    subject = Subject(bundle, TOKENS)
    stack.callback(subject.close)
    run = subject.ways(kind)[way]
    return lambda seconds: loop(lambda _: run(), seconds)


def prepare_native(bundle: Path, kind: str, vocabulary: int, seed: int) -> Callable[[float], Timed]:
    """Returns a function that runs ONNX's LSTM operator again and again on THREADS threads, for a given number of
    seconds. Each call runs the whole sequence."""
    from benchmarks.bench.native import NativeLstm

    native = NativeLstm(bundle, THREADS)
    tokens = np.random.default_rng(seed).integers(vocabulary, size=TOKENS + 1)

    def run(_: int) -> None:
        if kind == "state":
            native.state(tokens[:-1])
        else:
            native.score(tokens[:-1], tokens[1:])

    return lambda seconds: loop(run, seconds)
