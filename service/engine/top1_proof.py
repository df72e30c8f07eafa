"""Proves that an answer's most probable token is also the never-interrupted model's, by margin or by gradient.

The gradient proof also bounds the total variation between the two distributions.

**Margin proof** (`MarginProof`). The logit of token a is l_a = W_a . h + c_a, where h is the output layer's input, W_a
the token's row of the output layer's matrix, and c_a its bias. Let E bound the 2-norm distance between the h of the
answer's run and the h of the never-interrupted model. The lead l_a - l_b of token a over token b then differs by at
most |W_a - W_b|_2 E between the two runs. So the most probable token a is proved if, for every other token b,

    l_a - l_b  >  |W_a - W_b|_2 E + rounding of the four logits.

A token b for which this inequality fails is a rival. The gradient proof may still rule out a rival.

The bound on the rounding is a theorem. The error of a float32 sum of n terms, in any order, is at most gamma = n u / (1
- n u) times the sum of the terms' magnitudes, where u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms,
2002, section 4.2). Here the sum of the magnitudes is at most |W_a|_2 |h|_2 + |c_a| (Cauchy-Schwarz). For the other run,
|h|_2 + E replaces |h|_2. The whole inequality is evaluated in float64.

**Gradient proof** (`DirectionProof`). It runs if the request sets `prove`, and the margin proof leaves rivals or the
bound on the total variation is not small. The margin proof lets the output layer's input move in any direction within a
radius. For a window of a gated model, the run also outputs a bound error_i for each unit i of the states. It bounds the
distance between the unit's value in this run and its value in the never-interrupted model. A lead is a function of
these units. The lead therefore changes by at most `sum_i |gradient_i| error_i` plus the remainder of the first-order
expansion (`models/certificate/top1.py`). From here on, h is computed in exact arithmetic from the states and the stream
(the first layer's input), which are outputs of the graph. Token a is the most probable token of the never-interrupted
float32 run if, for every rival b,

    (W_a - W_b) . h + c_a - c_b  >  moved + |W_a - W_b|_2 E + rounding of two logits.

Some of these terms are theorems, and some are measured:

- `moved` bounds the difference between the lead at h and the lead of any *exact* run that ends in these tokens. It is a
  theorem if the stream, states and errors in the graph's output differ by at most R from those of an exact run over the
  window. `moved` includes the effect of R. It is evaluated in float64, and the float64 rounding is included.
- R, for states, is the certificate's `rounding.states`. The stream is computed from the last few tokens by convolution
  layers, and the errors are products of gates. For the stream and the errors, R is measured when the model is loaded,
  with windows of random tokens, of one repeated token and of cycles. The measured rounding is multiplied by the safety
  factor of the certificate's rounding.
- E is the certificate's rounding of two runs at `hidden`. It is computed from the measured error of one step and a
  proved bound of the error's growth. Half of E bounds the distance of either run from exact arithmetic. The total
  variation of the two float32 runs therefore exceeds that of h and the exact run by at most tanh(D E / 4), where D is
  the diameter of the output matrix.
- The rounding of the logits is a theorem (above). It is added only for the logits of the never-interrupted run. The
  logits of the answering run need no rounding term, because a is the answering run's most probable token by definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.interval_rounding import Matrix, roundoff
from wane.models.certificate.mixture import SLACK, LogitMoves, first_is_proved
from wane.models.certificate.request import Evaluated, RequestBound, WindowBound
from wane.models.certificate.top1 import Top1, variation
from wane.models.certificate.total_variation import total_variation
from wane.models.manifest import Manifest
from wane.models.weights import Weights, head_weight
from wane.service.batching.batch import Row, WindowTrace
from wane.service.engine.logits import Ranking
from wane.service.runners.outputs import Largest
from wane.service.runners.runner import ERROR, STREAM, Runner

UNIT = 2.0**-24  # unit roundoff of float32
OUTWARD = 1 + 1e-9  # upper bounds are multiplied by this factor; 1e-9 far exceeds the relative float64 rounding


class MarginProof:
    """Proves most probable tokens by their margin. All values that do not depend on a request are computed once."""

    def __init__(self, weights: Weights) -> None:
        self._rows = head_weight(weights)
        rows = self._rows.astype(np.float64)
        self._norms: NDArray[np.float64] = np.sqrt((rows**2).sum(axis=1)) * OUTWARD
        terms = rows.shape[1] + 2  # number of terms of a logit's sum: the products, the bias, and one spare term
        self._gamma = terms * UNIT / (1 - terms * UNIT) * OUTWARD
        self._of_bias: NDArray[np.float64] = 2 * self._gamma * np.abs(weights["head.bias"].astype(np.float64))
        self._of_norm: NDArray[np.float64] = 2 * self._gamma * self._norms
        # Lists of Python floats, indexed by token id. For one or two tokens they are faster than arrays.
        self._norm_of: list[float] = self._norms.tolist()
        self._rounding_of: list[tuple[float, float]] = list(
            zip(self._of_norm.tolist(), self._of_bias.tolist(), strict=True)
        )
        self._largest_norm = float(self._norms.max())
        self._of_sum = (len(rows) + 256) * UNIT
        """Bounds both the relative float32 rounding of a sum of exponentials and the rounding of the sum's logarithm.
        """
        self._largest_of_norm = float(self._of_norm.max())
        self._largest_of_bias = float(self._of_bias.max())

    def proves(self, ranking: Ranking, top: Largest, row: Row, error: float) -> bool:
        """Returns whether the most probable of the tokens that `ranking` may list stays the most probable of them for
        every h within `error` of the `hidden` of the network's run, in any float32 run of the output layer.

        `top`: at least the two most probable of these tokens, or the only one. For nearly all answers these two are
        enough if `error` is a rounding error. The other tokens are then not read."""
        if len(top.ids) < 2:
            return bool(top.ids) and math.isfinite(error)
        first, second = top.ids[:2]
        settled = self.settles(first, second, top.logits[0] - top.logits[1], row.length, error)
        if settled is not None:
            return settled
        logits, hidden = row.logits, row.hidden
        assert logits is not None and hidden is not None, "a graph lacks an output: this is a bug"
        return self.has_no_rival(logits, hidden, error, first, among=ranking.ids)

    def settled(
        self,
        ids: NDArray[np.int64],
        logits: NDArray[np.float64],
        lengths: NDArray[np.float64],
        errors: NDArray[np.float64],
    ) -> NDArray[np.int8]:
        """Like `proves`, for B rows, but compares only the K most probable tokens. Returns int8 (B): 1 proved, 0 not
        proved, -1 undecided.

        ids, int64 (B, K), and logits, float64 (B, K), are the K >= 2 most probable tokens in descending order. lengths,
        float64 (B), are the 2-norms of `hidden`. errors, float64 (B), are like `error` of `proves`. All further tokens
        have at most the K-th logit.
        """
        first = ids[:, 0]
        lengths = lengths * OUTWARD + errors
        lead = logits[:, :1] - logits[:, 1:] - (self._of_norm[first] * lengths + self._of_bias[first])[:, None]
        most = self._largest_of_norm * lengths + self._largest_of_bias
        ahead = lead - (most + (self._largest_norm + self._norms[first]) * errors)[:, None]
        signs = (ahead[:, 0] > 0).astype(np.int8)
        rows = np.flatnonzero(signs == 0)
        if len(rows):
            others = ids[rows, 1:]
            left = lead[rows] - (self._of_norm[others] * lengths[rows, None] + self._of_bias[others])
            beats = (left > self._apart(first[rows, None], others) * errors[rows, None]).all(axis=1)
            signs[rows[beats]] = np.where(ahead[rows[beats], -1] > 0, 1, -1)
        return signs

    def settles(self, first: int, second: int, lead: float, length: float, error: float) -> bool | None:
        """Like `proves`, but compares only the two most probable tokens, `first` and `second`. Returns None if the
        other tokens must be checked. `lead`: the difference of the two logits. `length`: the 2-norm of `hidden`.

        Returns True if the lead is large enough for any row of the output matrix: then no other token can be first.
        Returns False if the second token is a rival, because the proof fails with one rival."""
        length = length * OUTWARD + error
        of_norm, of_bias = self._rounding_of[first]
        lead -= of_norm * length + of_bias
        most = self._largest_of_norm * length + self._largest_of_bias
        if lead - most > (self._largest_norm + self._norm_of[first]) * error:
            return True
        of_norm, of_bias = self._rounding_of[second]
        gap = self._rows[second].astype(np.float64) - self._rows[first]
        if not lead - (of_norm * length + of_bias) > math.sqrt(gap @ gap) * OUTWARD * error:
            return False
        return None

    def has_no_rival(
        self,
        logits: NDArray[np.float32],
        hidden: NDArray[np.float32],
        error: float,
        first: int,
        weight: float = 1.0,
        added: NDArray[np.float64] | None = None,
        among: NDArray[np.int64] | None = None,
    ) -> bool:
        """Returns whether `first` is the most probable token for every h within `error` of `hidden`, in any float32 run
        of the output layer. weight, added (V): see `DirectionProof.search`. among: see `first_is_proved`."""
        if not math.isfinite(error):
            return False
        exact = logits.astype(np.float64)
        shares = np.exp(exact - exact.max())
        shares /= shares.sum()
        length = float(np.sqrt(np.square(hidden, dtype=np.float64).sum())) * OUTWARD + error
        rounding = self.rounding(slice(None), length)
        moved = (self._norms + self._largest_norm) * error + rounding + float(rounding.max())
        moves = LogitMoves(exact, shares, moved, SLACK * float(moved.max()))

        def lead_moved(others: NDArray[np.intp]) -> NDArray[np.float64]:
            moved: NDArray[np.float64] = self._apart(first, others) * error + rounding[first] + rounding[others]
            return moved

        return first_is_proved(first, weight, added, moves, lead_moved, among)

    def rounding(self, tokens: NDArray[np.intp] | slice | int, length: float) -> NDArray[np.float64]:
        """Returns, for each of `tokens`, a bound of the sum of the float32 rounding errors of the token's logit in two
        runs. `length` must bound the 2-norm of h in both runs."""
        result: NDArray[np.float64] = np.asarray(self._of_norm[tokens] * length + self._of_bias[tokens])
        return result

    def _apart(self, first: int | NDArray[np.intp], others: NDArray[np.intp]) -> NDArray[np.float64]:
        """Returns upper bounds of the 2-norm distances between the rows `first` and `others` of the output matrix, in
        the shape of `others`."""
        gaps = self._rows[others].astype(np.float64) - self._rows[first]
        result: NDArray[np.float64] = np.sqrt(np.einsum("...h,...h->...", gaps, gaps)) * OUTWARD
        return result

    # Mixtures with a cache

    def proves_mixtures(
        self,
        probabilities: NDArray[np.float64],
        lengths: NDArray[np.float64],
        weights: NDArray[np.float64],
        errors: NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """Like `proves`, for B mixtures with a cache, but compares only the two largest probabilities. Returns bool
        (B).

        probabilities (B, K >= 2): in descending order; lengths (B): the 2-norms of the output layer's inputs; weights
        (B): the weights of the network's distributions; errors (B): like `error` of `proves`, infinite for a row that
        cannot be proved. The difference of any two logits changes by at most `spread`. The total variation of the
        network's distribution is therefore at most t = tanh(spread / 4) (`models/certificate/total_variation.py`), so
        each of its probabilities changes by at most t. The difference of two probabilities of the mixture changes by at
        most 2 * weight * t.
        """
        longest = lengths * OUTWARD + errors
        spread = 2 * self._largest_norm * errors + 2 * (self._largest_of_norm * longest + self._largest_of_bias)
        lead = probabilities[:, 0] - probabilities[:, 1]
        proved: NDArray[np.bool_] = lead > 2 * weights * np.tanh(spread / 4) * OUTWARD + self._of_sum
        return proved & np.isfinite(errors)


WINDOWS = 12
"""Number of windows for which the float32 rounding of the stream and of the error bounds is measured."""

HOPELESS = 2.0
"""The proof gives up at once if the input of the last LayerNorm may change by this many times its length. Its direction
is then unknown."""


class DirectionProof:
    """The gradient proof for one model whose `window` graph outputs a stream. Its methods block, so they must not be
    called on the event loop."""

    def __init__(
        self, manifest: Manifest, weights: Weights, request: RequestBound, margin: MarginProof, runner: Runner
    ) -> None:
        """Measures the graph's rounding: compares the graph's output with the output of `request`, the float64 oracle,
        for WINDOWS windows.

        `request`, `margin` and the graphs of `runner` must be made from `weights`.
        """
        self._architecture = manifest.architecture
        self._margin = margin
        self._request = request
        self._top1 = Top1(self._architecture, weights, request)
        self._rows: Matrix = self._top1.rows
        self._longest = float(np.sqrt((self._rows**2).sum(axis=1).max())) * OUTWARD
        self._bias = weights["head.bias"].astype(np.float64)
        self._names = [tensor.name for tensor in self._architecture.state_tensors()[-len(self._architecture.fading) :]]
        rounding, self._readout = manifest.certificate.rounding, manifest.certificate.readout
        self._diameter = manifest.certificate.head_diameter
        self._hopeless = HOPELESS * math.sqrt(self._architecture.hidden)
        self._error = self.rounding = 0.0
        if rounding is not None:
            self._error = rounding.between_runs
            states = max(error.ball for error in rounding.states.values())
            self.rounding = max(states, rounding.safety * self._measured(runner, manifest.window))

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        weights: Weights,
        request: Callable[[], RequestBound],
        margin: MarginProof,
        runner: Runner,
    ) -> DirectionProof | None:
        """Returns the gradient proof; None if the graphs do not output a stream, or if nothing bounds the rounding."""
        if STREAM not in runner.outputs("window") or not manifest.certificate.has_rounding:
            return None
        return cls(manifest, weights, request(), margin, runner)

    def search(
        self,
        trace: WindowTrace,
        first: int | None,
        weight: float,
        added: NDArray[np.float64] | None,
        among: NDArray[np.int64] | None = None,
    ) -> tuple[bool, float]:
        """Returns whether `first` is proved to be the most probable token of every run that ends in the trace's tokens.
        Also returns the bound of the total variation between the network's distribution and that of any such run. If
        `first` is None, no proof is tried. weight: the network's weight in the mixture with a cache. added, (V): the
        cache's part of the probabilities in the mixture. Without a cache `weight` is 1 and `added` is None. among: see
        `first_is_proved`."""
        bound = self._bound(trace)
        if not np.isfinite(bound.radius[0]) or (bound.norm is not None and bound.norm.reached(0) >= self._hopeless):
            return False, 1.0
        moves = self._top1.moves(bound, 0)
        distance = min(variation(moves) + self._rounded(trace, bound, moves), 1.0)
        return first is not None and self._proves(bound, moves, first, weight, added, among), distance

    def _rounded(self, trace: WindowTrace, bound: WindowBound, moves: LogitMoves) -> float:
        """Returns the bound of the total variation that rounding adds, and that `moves` does not include."""
        if self._readout is None:
            return float(total_variation(self._diameter, np.array(self._error)))
        # The distance of the answer's own logits from those of `bound`, and the rounding of the other run's logits.
        logits = trace.logits.astype(np.float64) - moves.logits
        length = float(np.linalg.norm(bound.hidden[0])) * OUTWARD + float(bound.radius[0])
        spread = float(np.ptp(logits)) + 2 * float(self._margin.rounding(slice(None), length).max())
        return float(np.tanh(spread / 4)) * OUTWARD

    def _proves(
        self,
        bound: WindowBound,
        moves: LogitMoves,
        first: int,
        weight: float,
        added: NDArray[np.float64] | None,
        among: NDArray[np.int64] | None,
    ) -> bool:
        length = float(np.linalg.norm(bound.hidden[0])) * OUTWARD
        off = self._margin.rounding(slice(None), length + float(bound.radius[0]) + self._error)
        off += 4 * roundoff(self._rows.shape[1]) * (self._longest * length + np.abs(self._bias))

        def lead_moved(others: NDArray[np.intp]) -> NDArray[np.float64]:
            gap = self._rows[first] - self._rows[others]
            apart = np.sqrt(np.einsum("vh,vh->v", gap, gap)) * OUTWARD
            moved: NDArray[np.float64] = self._top1.moved(bound, gap, np.zeros(len(others), np.intp))
            moved = np.minimum(moved, apart * float(bound.radius[0])) + apart * self._error
            moved += off[first] + off[others]
            return moved

        wider = moves._replace(moved=moves.moved + moves.off + self._diameter * self._error + off + float(off.max()))
        return first_is_proved(first, weight, added, wider, lead_moved, among)

    def _bound(self, trace: WindowTrace) -> WindowBound:
        """Returns the values at the end of the window, such as the output layer's input. Also returns bounds of the
        distance between these values and those of any exact run that ends in the trace's tokens."""
        return self._request.resume(
            trace.stream[None].astype(np.float64),
            np.array([trace.length]),
            [trace.states[name][None].astype(np.float64) for name in self._names],
            [trace.errors[name][None].astype(np.float64) for name in self._names],
            self.rounding,
            self._evaluated(trace),
        )

    def _evaluated(self, trace: WindowTrace) -> Evaluated | None:
        """Returns the errors that the never-interrupted run's evaluation adds above the cell."""
        if self._readout is None:
            return None
        # Both runs have equal bits in the stream, and the magnitudes of the bound include those of any state.
        assert trace.norms is not None, "the graph outputs no `norms` although the model has a readout: this is a bug"
        return Evaluated(*self._readout.of_one(trace.norms), self._readout.top)

    def _measured(self, runner: Runner, window: int) -> float:
        """Runs windows of random, repeated and cycling tokens. Returns the larger of two 2-norms: the largest rounding
        error of the stream, and the largest amount by which the graph's error bounds of a layer are too small."""
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
