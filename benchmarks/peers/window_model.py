"""The model that the peer servers serve in the benchmarks without sessions: a bundle's `window` graph on onnxruntime.

This module needs only numpy and onnxruntime, so that it runs in each peer's own virtual environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

TOP_K = 5
LARGEST_BATCH = 64

Prediction = dict[str, int | float]


def open_graph(path: Path) -> onnxruntime.InferenceSession:
    """Opens a graph with Wane's thread settings: one thread per run, without spinning, because several processes share
    the CPU cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def named_predictions(ids: NDArray[np.int64], probabilities: NDArray[np.float32]) -> list[list[Prediction]]:
    """Converts token ids and probabilities (B, TOP_K) to JSON values."""
    return [
        [{"token_id": token, "probability": probability} for token, probability in zip(row_ids, row, strict=True)]
        for row_ids, row in zip(ids.tolist(), probabilities.tolist(), strict=True)
    ]


class WindowModel:
    """A model that predicts the next tokens of many windows in one run of the graph."""

    def __init__(self, bundle: Path) -> None:
        self._session = open_graph(bundle / "window.onnx")

    @classmethod
    def served(cls) -> WindowModel:
        """Opens the bundle whose path is in the environment variable BENCH_BUNDLE."""
        return cls(Path(os.environ["BENCH_BUNDLE"]))

    def top(self, windows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the ids and the probabilities, both (B, TOP_K), of each window's most probable next tokens. The
        most probable token is first."""
        lengths = np.array([len(window) for window in windows], np.int64)
        if lengths.min() == lengths.max():
            tokens = np.asarray(windows, np.int64)
        else:
            tokens = np.zeros((len(windows), int(lengths.max())), np.int64)
            for row, window in zip(tokens, windows, strict=True):
                row[: len(window)] = window
        named = {"tokens": tokens, "lengths": lengths}
        ids, found, total = self._session.run(["top_ids", "top_logits", "log_sum_exp"], named)
        return ids[:, :TOP_K], np.exp(found[:, :TOP_K] - total[:, None])

    def predict(self, windows: Sequence[Sequence[int]]) -> list[list[Prediction]]:
        """Returns the result of `top` as JSON values, one for each window."""
        return named_predictions(*self.top(windows))

    def ranked(self, windows: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
        """Returns the result of `top` as pairs of token id and probability."""
        ids, probabilities = self.top(windows)
        rows = zip(ids.tolist(), probabilities.tolist(), strict=True)
        return [list(zip(row_ids, row, strict=True)) for row_ids, row in rows]
