"""Whether the first token of an answer is proved by direction, where the margin test leaves rivals open.

The margin test lets the output layer's input move anywhere within a radius. A gated model's window says more: how far
each unit of each state may be from the run's. A lead is a function of these, so it moves by `sum_i |gradient_i|
error_i` and what the gradient leaves out (`models/certificate/top1.py`). Let h be where exact arithmetic leads from
the state and the stream that the graph put out. Token a is first, in the never-interrupted run in float32, if for
every rival b

    (V_a - V_b) . h + b_a - b_b  >  moved + |V_a - V_b|_2 E + rounding of two logits.

What is theorem in this, and what is measured:

- `moved` bounds how far the lead of any *exact* run that ends in these tokens is from that at h. Theorem, given that
  stream, states and errors as put out are within R of those of an exact window: the two runs are then both around h,
  and R is part of how far. Evaluated in float64, whose rounding is counted.
- R is, of states, the certificate's `rounding.states`. The stream is what a front of finite reach makes of the last few
  tokens, and the errors are products of gates: how far they are off is measured when the model is made ready, for
  windows of random tokens, of held tokens and of cycles, times the safety factor of the certificate's rounding.
- E is the certificate's rounding of two runs at `hidden`: one step's error as it was measured, carried by the theorem.
- The rounding of the logits is a theorem (`margin.py`). The one that answers needs none: a is what it says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.certificate.interval_rounding import Matrix, roundoff
from models.certificate.request import RequestBound, WindowBound
from models.certificate.top1 import Top1
from models.manifest import Manifest
from models.weights import head_weight
from service.engine.batch import Ending
from service.engine.margin import OUTWARD, Margin
from service.runners.runner import ERROR, STREAM, Runner

MOST_RIVALS = 2048
"""Of more, the test is not tried. A nearest rival that is not settled ends it after about a millisecond; one that goes
through all of them takes some tens of milliseconds, on a thread of its own."""

FIRST, AT_ONCE = 16, 512
"""Rivals in the first go, and in any."""

WINDOWS = 12
"""As many are run to measure what float32 makes of stream and errors."""

SHORTEST = np.zeros((1, 1), np.int64)
"""A window of one token, whichever it is."""


class Direction:
    """The test for one model, whose `window` graph puts out what it needs. Blocks: belongs off the event loop."""

    def __init__(self, manifest: Manifest, margin: Margin, runner: Runner) -> None:
        """Measures the graph's rounding: runs windows of random tokens beside the oracle's own bound."""
        assert manifest.certificate.rounding is not None, "nothing is claimed without: this is a bug"
        self._architecture = manifest.architecture
        self._margin = margin
        self._request = RequestBound(self._architecture, margin.weights)
        self._top1 = Top1(self._architecture, margin.weights, self._request)
        self._rows: Matrix = head_weight(margin.weights).astype(np.float64)
        self._squares = (self._rows**2).sum(axis=1)
        self._longest = float(np.sqrt(self._squares.max())) * OUTWARD
        self._slight = 8 * roundoff(self._rows.shape[1]) * self._longest**2
        self._bias = margin.weights["head.bias"].astype(np.float64)
        self._names = [tensor.name for tensor in self._architecture.state_tensors()[-self._architecture.layers :]]
        rounding = manifest.certificate.rounding
        self._error = rounding.between_runs
        states = max(error.ball for error in rounding.states.values())
        self.rounding = max(states, rounding.safety * self._measured(runner, manifest.window))

    def proves(self, ending: Ending, first: int, rivals: NDArray[np.intp]) -> bool:
        """Whether token `first` comes before each of the rivals, the nearest first, in every run that ends so."""
        bound = self._bound(ending)
        if not np.isfinite(bound.radius[0]):
            return False
        hidden = bound.hidden[0]
        length = float(np.linalg.norm(hidden)) * OUTWARD
        farthest = length + float(bound.radius[0]) + self._error
        along = self._rows @ self._rows[first]
        squares = along[first] + self._squares[rivals] - 2 * along[rivals]
        apart = np.sqrt(np.maximum(0, squares) + self._slight) * OUTWARD
        biases = np.abs(self._bias[first]) + np.abs(self._bias[rivals])
        logits = self._rows @ hidden + self._bias
        lead = logits[first] - logits[rivals]
        lead -= 4 * roundoff(len(hidden)) * (2 * self._longest * length + biases)
        lead -= self._margin.rounding(first, farthest) + self._margin.rounding(rivals, farthest)
        lead -= apart * self._error
        left = np.flatnonzero(~(lead > apart * bound.radius[0]))  # the others are proved by the radius already
        start, size = 0, FIRST  # mostly it is one of the nearest that is not settled
        while start < len(left):
            now = left[start : start + size]
            start, size = start + size, min(8 * size, AT_ONCE)
            gap = self._rows[first] - self._rows[rivals[now]]
            if not (lead[now] > self._top1.moved(bound, gap, np.zeros(len(now), np.intp))).all():
                return False
        return True

    def rehearse(self) -> None:
        """The largest piece of a test, for nothing: to be called on the thread of the tests, which then has the memory
        that they take."""
        gap = self._rows[0] - self._rows[1 : 1 + AT_ONCE]
        self._top1.moved(self._request(SHORTEST), gap, np.zeros(len(gap), np.intp))

    def _bound(self, ending: Ending) -> WindowBound:
        """Where the exact run is that ends so."""
        return self._request.resume(
            ending.stream[None].astype(np.float64),
            np.array([ending.length]),
            [ending.states[name][None].astype(np.float64) for name in self._names],
            [ending.errors[name][None].astype(np.float64) for name in self._names],
            self.rounding,
        )

    def _measured(self, runner: Runner, window: int) -> float:
        """The most that the stream is off, or an error too small, after windows of random, held and cycling tokens."""
        random = np.random.default_rng(3)
        tokens = random.integers(self._architecture.vocabulary_size, size=(WINDOWS, window), dtype=np.int64)
        for row, period in enumerate((1, 1, 1, 2, 2, 3)):
            tokens[row] = np.resize(tokens[row, :period], window)
        exact = self._request(tokens)
        outputs = runner.run("window", {"tokens": tokens, "lengths": np.full(WINDOWS, window)})
        off = [outputs[STREAM] - exact.stream]
        for name, step in zip(self._names, exact.steps, strict=True):
            off.append(np.maximum(0, step.error[0].box - outputs[ERROR + name]))
        return float(max(np.linalg.norm(each, axis=1).max() for each in off))
