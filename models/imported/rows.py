"""Compares the rows of a batch with the same rows run one by one: a session must not affect another one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import numpy as np
import onnx

from wane.models.imported.graph_file import GraphError, subgraphs
from wane.models.imported.roles import Step, reads
from wane.models.imported.signature import Arrays
from wane.models.manifest import Role
from wane.models.parity import Tensors

RunStep = Callable[[Role, Tensors], Arrays]

PAST, AT_ONCE, REPEATS = 8, 64, 4
"""The number of states from which the tokens are read, and of tokens that each read before; the number of tokens of one
batch; how many rows of the batch read each of them."""

SAME, SAMPLE = 64, 256
"""The number of rows of a batch that reads one token only, and for how many tokens there is such a batch."""

SIZES, MOST_VALUES = (1, 2, 16, 4096), 1 << 22
"""The sizes of batches of the first AT_ONCE tokens, up to the largest batch of the service; the largest number of
values in `hidden` or a state of such a batch, which may make it smaller."""

SECONDS = 300.0
"""The time limit of the comparison, in seconds. If it is exceeded, the rows are run one by one."""


def compare_rows(step: Step, together: RunStep, alone: RunStep, tolerance: float) -> None:
    """Compares `advance` and `head`, whose rows run together, with those whose rows run one by one.

    Every token of the vocabulary is read from a state that sequences of random tokens reach: in a batch of AT_ONCE
    tokens, REPEATS times each, and SAMPLE tokens also in a batch of their own. The first tokens are read in batches of
    all SIZES. `tolerance`: the largest difference of a value, divided by the largest value if that is above 1. Raises
    GraphError if a row differs, or if a branch is chosen for the whole batch by the values of its rows.
    """
    if node := _branch(step):
        raise GraphError(f"the node {node.name or node.output[0]!r} (If) chooses by the values of all rows")
    generator, end = np.random.default_rng(1), time.monotonic() + SECONDS

    ports = step.signature.inputs.states
    whole = {f"next.state.{port.name}" for port in ports if not np.issubdtype(port.dtype, np.floating)}

    def advance(run: RunStep, tokens: np.ndarray, before: Tensors) -> Arrays:
        lengths = np.full(len(tokens), tokens.shape[1], np.int64)
        return run("advance", {"tokens": np.ascontiguousarray(tokens), "lengths": lengths, **before})

    def compare(role: Role, found: Arrays, expected: Arrays, rows: np.ndarray, what: str) -> None:
        for name, value in expected.items():
            scale = 1.0 if name in whole else max(1.0, float(np.abs(value).max()))
            difference = float(np.abs(found[name].astype(np.float64) - value[rows]).max()) / scale
            if not difference <= tolerance:  # this condition also holds for NaN
                raise GraphError(f"{role}: {name} differ by {difference:.3g} between {what} and the same rows alone")

    def after(outputs: Arrays) -> Tensors:
        return {tensor.name: outputs[f"next.{tensor.name}"] for tensor in step.states}

    zeros = {tensor.name: np.zeros((PAST, *tensor.shape), np.float32) for tensor in step.states}
    states = after(advance(alone, generator.integers(step.vocabulary, size=(PAST, PAST)), zeros))
    sample = {*generator.permutation(step.size)[:SAMPLE].tolist()}
    for first in range(0, step.size, AT_ONCE):
        tokens = np.arange(first, min(first + AT_ONCE, step.size))[:, None]
        before = {name: value[tokens[:, 0] % PAST] for name, value in states.items()}
        expected = advance(alone, tokens, before)
        batches = [(np.tile(np.arange(len(tokens)), REPEATS), f"a batch of the tokens {first} to {int(tokens[-1, 0])}")]
        batches += [
            (np.full(SAME, row), f"a batch of {SAME} times the token {token}")
            for row, token in enumerate(tokens[:, 0].tolist())
            if token in sample
        ]
        if first == 0:
            widest = max(step.width, *(math.prod(tensor.shape) for tensor in step.states))
            for size in SIZES:
                rows = np.arange(min(size, max(1, MOST_VALUES // widest))) % len(tokens)
                batches.append((rows, f"a batch of {len(rows)} rows"))
        for rows, what in batches:
            found = advance(together, tokens[rows], {name: value[rows] for name, value in before.items()})
            compare("advance", found, expected, rows, what)
            if time.monotonic() > end:
                raise GraphError(f"comparing the rows of all tokens takes more than {SECONDS:g} s")
    rows = np.arange(len(expected["hidden"]))
    alone_logits, logits = (
        {"logits": run("head", {"hidden": expected["hidden"]})["logits"]} for run in (alone, together)
    )
    compare("head", logits, alone_logits, rows, "a batch")


def _branch(step: Step) -> onnx.NodeProto | None:
    """Returns the first `If` whose condition is computed from the values of the tokens or states. A condition that
    depends on shapes only is common in exported graphs."""
    inputs = step.signature.inputs
    values = {inputs.tokens.name, *(port.name for port in inputs.states)}

    def find(nodes: Iterable[onnx.NodeProto]) -> onnx.NodeProto | None:
        for node in nodes:
            if node.op_type == "If" and node.input[0] in values:
                return node
            if node.op_type not in ("Shape", "Size") and not values.isdisjoint(reads(node)):
                values.update(name for name in node.output if name)
                for graph in subgraphs(node):
                    if node.op_type != "If":
                        values.update(value.name for value in graph.input)
            for graph in subgraphs(node):
                if found := find(graph.node):
                    return found
        return None

    return find(step.nodes)
