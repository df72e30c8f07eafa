"""Measures the model alone: a loop that runs the model's graphs with onnxruntime on one thread. The loop's rate is an
upper bound of a server's rate, because the loop builds no answers from the model's outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench.open_loop import summary
from benchmarks.bench.results import Timed
from benchmarks.peers.step_model import NEXT
from benchmarks.peers.window_model import open_graph

Feeds = dict[str, NDArray[np.generic]]


def prepare_step(bundle: Path, vocabulary: int, batch: int, seed: int) -> Callable[[float], Timed]:
    """Returns a function that runs the `step` graph again and again, for a given number of seconds. Each run takes one
    token for each of `batch` sessions. The output states of a run are the input states of the next run."""
    session = open_graph(bundle / "step.onnx")
    tokens = np.random.default_rng(seed).integers(vocabulary, size=(256, batch))
    states: Feeds = {
        value.name: np.zeros((batch, *value.shape[1:]), np.float32)
        for value in session.get_inputs()
        if value.name != "tokens"
    }
    names = [output.name for output in session.get_outputs()]

    def run(index: int) -> None:
        outputs = dict(zip(names, session.run(names, {"tokens": tokens[index % 256], **states}), strict=True))
        states.update({name: outputs[NEXT + name] for name in states})

    return lambda seconds: loop(run, seconds)


def prepare_window(bundle: Path, vocabulary: int, window: int, batch: int, seed: int) -> Callable[[float], Timed]:
    """Returns a function that runs the `window` graph again and again, for a given number of seconds. Each run takes
    `batch` windows."""
    session = open_graph(bundle / "window.onnx")
    tokens = np.random.default_rng(seed).integers(vocabulary, size=(16, batch, window))
    lengths = np.full(batch, window)

    def run(index: int) -> None:
        session.run(None, {"tokens": tokens[index % 16], "lengths": lengths})

    return lambda seconds: loop(run, seconds)


def loop(run: Callable[[int], None], seconds: float) -> Timed:
    """Calls `run` repeatedly for at least `seconds`. Returns a summary of the durations of the calls."""
    taken: list[float] = []
    begun = last = time.perf_counter()
    while last - begun < seconds:
        run(len(taken))
        now = time.perf_counter()
        taken.append(now - last)
        last = now
    return summary(taken, last - begun)
