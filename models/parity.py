"""Whether the graphs compute what the oracle computes: the tie between a statement about weights and an answer.

Differences are absolute, in float32 against the float64 oracle: of log-probabilities as they are, of hidden and of
state tensors per unit of their greatest magnitude, where that is above 1. Float32 alone makes about 1e-6 of them here,
a wrong gate order about 1; the tolerance is the promise made of streaming a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from models.manifest import Role
from models.reference import Reference, State

TOLERANCE = 1e-4

Tensors = dict[str, NDArray[np.generic]]
Run = Callable[[Role, Tensors], Mapping[str, NDArray[np.generic]]]
"""Runs a graph: the inputs by name, then all outputs by name."""


ANSWERS: dict[Role, tuple[str, ...]] = {
    "step": ("logits", "hidden"),
    "window": ("logits", "hidden"),
    "advance": ("hidden",),
    "scan": ("logprobs", "hidden"),
    "head": ("logits",),
}
"""What each graph puts out beside the state after (which all but `head` do)."""


class ParityError(Exception):
    """A graph that differs from the oracle; the message names graph, output, difference and tolerance."""


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log-probabilities (..., V) of logits (..., V), in float64."""
    shifted = logits.astype(np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def check_graphs(
    reference: Reference, run: Run, tokens: NDArray[np.int64], lengths: NDArray[np.int64], start: State
) -> float:
    """Holds every graph against the oracle, on tokens (B, T) of which the first `lengths` (B) of each row count.

    From the zero state and from `start`; whole and in two pieces; in a batch, row by row, and token by token.
    Returns the worst difference; raises ParityError beyond TOLERANCE.
    """
    return _Check(reference, run, tokens, lengths).all(start)


class _Check:
    def __init__(self, reference: Reference, run: Run, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._reference = reference
        self._run = run
        self._tokens = tokens
        self._lengths = lengths
        self._targets = np.roll(tokens, -1, axis=1)
        self._worst = 0.0

    def all(self, start: State) -> float:
        batch = len(self._tokens)
        zeros = self._reference.zero_state(batch)
        expected = self._oracle(zeros, self._lengths)
        self._compare("window", "a batch", {"tokens": self._tokens, "lengths": self._lengths}, expected)
        for row in range(batch):
            alone = slice(row, row + 1), slice(0, self._lengths[row])
            feeds: Tensors = {"tokens": self._tokens[alone], "lengths": self._lengths[alone[0]]}
            self._compare("window", f"row {row} alone", feeds, {k: v[alone[0]] for k, v in expected.items()})

        expected = self._oracle(start, self._lengths)
        feeds = {"tokens": self._tokens, "lengths": self._lengths, **_float32(start)}
        self._compare("advance", "a batch", feeds, expected)
        self._compare("scan", "a batch", {**feeds, "targets": self._targets}, expected)
        self._in_pieces(start)
        self._token_by_token(start)
        hidden = expected["hidden"].astype(np.float32)
        self._compare(
            "head", "a batch", {"hidden": hidden}, {"logits": self._reference.logits(hidden.astype(np.float64))}
        )
        return self._worst

    def _oracle(self, state: State, lengths: NDArray[np.int64]) -> dict[str, NDArray[np.floating]]:
        """What every output of the sequence graphs should be, from `state` and over the first `lengths` tokens."""
        time, rows = self._tokens.shape[1], np.arange(self._tokens.shape[0])
        steps = []
        for t in range(time):
            logits, hidden, state = self._reference.step(self._tokens[:, t], state)
            chosen = log_softmax(logits)[rows, self._targets[:, t]]
            steps.append({"logits": logits, "hidden": hidden, "logprobs": chosen, **_after(state)})
        stacked = {name: np.stack([step[name] for step in steps], axis=1) for name in steps[0]}
        expected = {name: value[rows, lengths - 1] for name, value in stacked.items()}
        expected["logprobs"] = np.where(np.arange(time) < lengths[:, None], stacked["logprobs"], 0.0)
        return expected

    def _in_pieces(self, start: State) -> None:
        """`advance` over the first half, then `scan` over the second from where that ended: all positions count."""
        batch, time = self._tokens.shape
        half = time // 2
        if half == 0:
            return
        expected = self._oracle(start, np.full(batch, half))
        feeds: Tensors = {"tokens": self._tokens[:, :half], "lengths": np.full(batch, half), **_float32(start)}
        outputs = self._compare("advance", "the first half", feeds, expected)
        feeds = {name: outputs[f"next.{name}"] for name in start}
        feeds |= {"tokens": self._tokens[:, half:], "targets": self._targets[:, half:]}
        feeds["lengths"] = np.full(batch, time - half)
        expected = self._oracle(start, np.full(batch, time))
        expected["logprobs"] = expected["logprobs"][:, half:]
        self._compare("scan", "the second half", feeds, expected)

    def _token_by_token(self, start: State) -> None:
        """`step`, fed with its own state, beside the oracle, fed with its own."""
        state, fed = start, _float32(start)
        for t in range(self._tokens.shape[1]):
            logits, hidden, state = self._reference.step(self._tokens[:, t], state)
            expected = {"logits": logits, "hidden": hidden, **_after(state)}
            feeds: Tensors = {"tokens": self._tokens[:, t], **fed}
            outputs = self._compare("step", f"token {t} of a stream", feeds, expected)
            fed = {name: outputs[f"next.{name}"] for name in fed}

    def _compare(
        self, role: Role, case: str, feeds: Tensors, expected: Mapping[str, NDArray[np.floating]]
    ) -> Mapping[str, NDArray[np.generic]]:
        """Runs a graph and holds its outputs against `expected`, which may hold more than this role puts out."""
        outputs = self._run(role, feeds)
        after = () if role == "head" else tuple(f"next.{name}" for name in self._reference.zero_state(0))
        for name in ANSWERS[role] + after:
            if name not in outputs:
                raise ParityError(f"{role}, {case}: the graph has no output {name}")
            wanted, got = expected[name], outputs[name].astype(np.float64)
            if got.shape != wanted.shape:
                raise ParityError(f"{role}, {case}: {name} has shape {got.shape}, expected {wanted.shape}")
            scale = 1.0
            if name == "logits":
                wanted, got = log_softmax(wanted), log_softmax(got)
            elif name != "logprobs":
                scale = max(1.0, float(np.abs(wanted).max()))
            difference = float(np.abs(wanted - got).max()) / scale
            if not difference <= TOLERANCE:  # also where it is not a number
                raise ParityError(
                    f"{role}, {case}: {name} differs from the oracle by {difference:.3g}, tolerance {TOLERANCE:g}"
                )
            self._worst = max(self._worst, difference)
        return outputs


def _after(state: State) -> State:
    return {f"next.{name}": value for name, value in state.items()}


def _float32(state: State) -> Tensors:
    return {name: value.astype(np.float32) for name, value in state.items()}
