"""The model that the peer servers serve in the benchmarks with sessions: a bundle's `step` graph, and the sessions'
states in memory.

Unlike Wane, this module does not recognise repeated requests, computes no error bounds, and does not limit the number
of sessions. It needs only numpy and onnxruntime, so that it runs in each peer's own virtual environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.window_model import TOP_K, Prediction, named_predictions, open_graph

NEXT = "next."


class StepModel:
    """A model with the states of its sessions. It steps many sessions in one run of the graph. The first step of a
    session starts from a state of zeros."""

    def __init__(self, bundle: Path) -> None:
        self._graph = open_graph(bundle / "step.onnx")
        inputs = [value for value in self._graph.get_inputs() if value.name != "tokens"]
        self._names = [value.name for value in inputs]
        self._outputs = ["top_ids", "top_logits", "log_sum_exp", *(NEXT + name for name in self._names)]
        self._start: list[NDArray[np.float32]] = [np.zeros(value.shape[1:], np.float32) for value in inputs]
        self._states: dict[str, list[NDArray[np.float32]]] = {}

    @classmethod
    def served(cls) -> StepModel:
        """Opens the bundle whose path is in the environment variable BENCH_BUNDLE."""
        return cls(Path(os.environ["BENCH_BUNDLE"]))

    def step(self, sessions: Sequence[str], tokens: Sequence[int]) -> list[list[Prediction]]:
        """Feeds one of `tokens` to each of `sessions`. Returns each session's predictions. `sessions` must not contain
        a session twice."""
        rows = [self._states.get(session, self._start) for session in sessions]
        feeds = {name: np.stack(column) for name, column in zip(self._names, zip(*rows, strict=True), strict=True)}
        feeds["tokens"] = np.array(tokens, np.int64)
        ids, found, total, *after = self._graph.run(self._outputs, feeds)
        for index, session in enumerate(sessions):
            self._states[session] = [column[index] for column in after]
        return named_predictions(ids[:, :TOP_K], np.exp(found[:, :TOP_K] - total[:, None]))
