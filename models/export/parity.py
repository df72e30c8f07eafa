"""The parity check at export. It compares torch and ONNX Runtime with the numpy oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from wane.models.bundle import Bundle, BundleError, verify_graphs
from wane.models.manifest import Role
from wane.models.networks import Network
from wane.models.parity import TOLERANCE, ParityError, Tensors, check_graphs, log_softmax
from wane.models.reference import Reference

REAL_ROWS = 4
"""The number of sequences into which `sample_tokens` are split. The last sequence is half as long as the others."""

RANDOM_TIME = 32


class ExportError(Exception):
    """Raised if the torch network or a graph differs from the oracle. The message names the network or the graph, the
    position or the output, and the difference."""


def check_bundle(bundle: Bundle, sample_tokens: list[int], network: Network | None) -> float:
    """Compares the bundle's graphs, and the torch network if any, with the oracle.

    Uses random tokens and `sample_tokens`. Returns the largest difference. Raises ExportError.
    """
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    run = OnnxGraphs(bundle).run
    time = max(1, len(sample_tokens) // REAL_ROWS)
    rows = min(REAL_ROWS, len(sample_tokens))
    tokens = np.array(sample_tokens[: rows * time], dtype=np.int64).reshape(rows, time)
    lengths = np.full(rows, time, dtype=np.int64)
    lengths[-1] = (time + 1) // 2
    try:
        worst = verify_graphs(bundle, run)
        zeros = reference.zero_state(rows)
        manifest = bundle.manifest
        found = check_graphs(reference, run, tokens, lengths, zeros, manifest.certificate, precision=manifest.precision)
        worst = max(worst, found)
        if network is not None:
            generator = np.random.default_rng(1)
            random = generator.integers(bundle.vocabulary.size, size=(rows, RANDOM_TIME), dtype=np.int64)
            worst = max(worst, *(check_network(reference, network, each) for each in (tokens, random)))
    except (ParityError, BundleError) as error:
        raise ExportError(str(error)) from error
    return worst


def check_network(reference: Reference, network: Network, tokens: NDArray[np.int64]) -> float:
    """Compares torch's log-probabilities with the oracle's at every position of tokens (B, T), in one pass and token by
    token."""
    mode = network.training
    network.eval()
    with torch.no_grad():
        by_time = torch.from_numpy(tokens.T.copy())
        whole = network.logits(network(by_time)[0]).numpy()
        streamed, torch_state = [], None
        for row in by_time:
            hidden, torch_state = network(row[None], torch_state)
            streamed.append(network.logits(hidden)[0].numpy())
    network.train(mode)
    state, worst = reference.zero_state(len(tokens)), 0.0
    for t, column in enumerate(tokens.T):
        logits, _, state = reference.step(column, state)
        for case, found in (("in one pass", whole[t]), ("token by token", streamed[t])):
            difference = float(np.abs(log_softmax(found) - log_softmax(logits)).max())
            if not difference <= TOLERANCE:
                raise ParityError(
                    f"torch network, {case}, position {t}: log-probabilities differ from the oracle by "
                    f"{difference:.3g}, tolerance {TOLERANCE:g}"
                )
            worst = max(worst, difference)
    return worst


class OnnxGraphs:
    """Runs a bundle's graphs on the CPU with one thread."""

    def __init__(self, bundle: Bundle) -> None:
        self._sessions = {role: _session(bundle.graph_path(role)) for role in bundle.manifest.graphs}

    @classmethod
    def at(cls, paths: Mapping[Role, Path]) -> OnnxGraphs:
        """Opens graphs that are not part of a bundle."""
        graphs = cls.__new__(cls)
        graphs._sessions = {role: _session(path) for role, path in paths.items()}
        return graphs

    def run(self, role: Role, feeds: Tensors) -> Tensors:
        """Runs a graph. Returns all outputs by name."""
        session = self._sessions[role]
        names = [output.name for output in session.get_outputs()]
        return cast(Tensors, dict(zip(names, session.run(names, feeds), strict=True)))


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
