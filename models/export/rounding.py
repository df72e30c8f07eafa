"""Measures, at export, the distance of float32 graphs from exact arithmetic: the error of one step, and the error of a
whole run.

**One step.** The output of the `step` graph is compared with that of the float64 oracle. Both steps start from the
state that the graph returned last. The state of the convolution blocks is an exception: it is taken from the oracle's
run. The step's error therefore contains the whole error of these blocks, whose receptive field is finite.

The measurement depends on the choice of steps. Random tokens never cause the largest error. If a token is repeated, the
state s of a cell with factor f converges to a fixed point. In float32 it stops on the side from which it approaches, up
to about u |s| / (1 - f) away from this point, where u is float32's unit roundoff. A step's error is also larger if the
state is large, and cycles that resonate with the recurrence may cause large states. The sequences are therefore:

- Tokens repeated for 4 / (1 - factor) steps, up to 4,096. Each of these tokens is repeated in two rows, after
  two different sequences.
- Cycles of two and three tokens.
- Sequences in which every token is chosen to make the state as large as possible.
- Random tokens and the caller's tokens.

One step with every token of the vocabulary is measured from two states. The repeated tokens are those whose step
reduces the difference of two states least (with the largest gates), those whose step has the largest error, and random
ones.

**A whole run.** The error of a run of any length is bounded by one step's error, by a theorem that holds for all token
sequences (`models/certificate/rounding.py`). In residual networks, the measured error does not bound the output's: a
LayerNorm amplifies rounding without limit if its input nearly vanishes, and rounding may open a gate that is closed in
exact arithmetic. So their bound is the largest possible distance. Residual networks with one layer of an input-gated
cell need no measurement (`models/certificate/readout.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import has_readout
from wane.models.certificate.interval_rounding import Matrix
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.rounding import carry
from wane.models.certificate.stack import Stack
from wane.models.manifest import Rounding, StateError
from wane.models.parity import HEADROOM, Run, Tensors
from wane.models.reference import Reference, State
from wane.models.weights import Weights

Tokens = NDArray[np.int64]

SAFETY = HEADROOM
"""The factor by which the largest measured errors are multiplied. The checks of a bundle expect that the bound of a
whole run is at least this many times the error of their own runs. In a model that forgets at once, this is an error of
one step."""

ROW_STEPS = 1 << 16
"""The approximate number of measured steps. This number divided by the length of the sequences is the number of rows.
"""

ROWS = (48, 768)
"""The smallest and the largest number of rows. Each row is a sequence of tokens."""

LONGEST_HOLD, LONGEST_PAST = 4096, 128

GREEDY, CHOICES = 16, 32
"""The number of rows whose tokens are chosen to make the state large, and the number of candidates for each of these
tokens."""

SHARES = {"held": 8, "cycles of two": 2, "cycles of three": 2, "random": 2, "given": 2}
"""The number of rows of each kind among every sixteen rows. "held" stands for a repeated token, and "given" for the
caller's tokens."""

AT_ONCE, LOGITS_AT_ONCE = 4096, 1 << 26
"""The largest number of rows, and of logits, in one batch when a step with every token of the vocabulary is measured.
"""

WITH_LOGITS = 16
"""The number of rows of a batch whose logits' errors are measured."""


def measure_rounding(
    architecture: Architecture, weights: Weights, layers: list[Layer], run: Run, diameter: float, given: list[int]
) -> Rounding | None:
    """Measures the rounding of a model's graphs. Returns None if a layer is not contractive, because then no theorem
    bounds the rounding, and if the rounding is bounded without measurements.

    `run` runs a graph. diameter: the largest distance D of two rows of the output matrix. given: real tokens.
    """
    factor = max((layer.bound.factor for layer in layers), default=1.0)
    if not factor < 1 or has_readout(architecture):
        return None
    return _Measuring(architecture, weights, layers, run, diameter).rounding(given, factor)


@dataclass(slots=True)
class _Seen:
    """The largest errors of one step so far. step: for each state tensor, the largest error of a unit and the largest
    2-norm error. output: the largest 2-norm error of `hidden`, 0 in a plain network. logits: the largest difference
    between the greatest and the least error of a row's logits. steps: the number of measured steps."""

    step: dict[str, tuple[float, float]] = field(default_factory=dict)
    output: float = 0.0
    logits: float = 0.0
    steps: int = 0


class _Measuring:
    def __init__(
        self, architecture: Architecture, weights: Weights, layers: list[Layer], run: Run, diameter: float
    ) -> None:
        self._architecture = architecture
        self._weights = weights
        self._layers = layers
        self._run = run
        self._diameter = max(diameter, 1e-30)
        self._reference = Reference(architecture, weights)
        self._random = np.random.default_rng(2)
        self._residual = architecture.residual
        self._names = [architecture.layer_states(layer) for layer in range(len(layers))]
        self._flat = [name for names in self._names for name in names]
        self._seen = _Seen()

    def rounding(self, given: list[int], factor: float) -> Rounding:
        hold = min(math.ceil(4 / (1 - factor)), LONGEST_HOLD)
        past = min(max(hold, 16), LONGEST_PAST)
        rows = min(max(ROW_STEPS // (past + hold), ROWS[0]), ROWS[1])
        tokens = np.concatenate([self._sequences(given, rows, past, hold), self._greedy(past + hold)])
        rows = len(tokens)
        state, front = self._zero(rows), self._reference.zero_state(rows)
        for column in tokens.T:
            _, state, front = self._measure(column, state, front)
        seen = self._seen
        step = {name: StateError(box=SAFETY * box, ball=SAFETY * ball) for name, (box, ball) in seen.step.items()}
        output = SAFETY * (seen.output + seen.logits / self._diameter)
        states, carried = carry(Stack(self._architecture, self._weights, self._layers), step)
        return Rounding(
            sequences="all",
            steps=seen.steps,
            safety=SAFETY,
            step=step,
            output=output,
            states=states,
            carried=carried + output,
        )

    def _sequences(self, given: list[int], rows: int, past: int, hold: int) -> Tokens:
        """Returns the tokens of all rows: (rows, past + hold). In a row that repeats a token, `hold` repetitions follow
        `past` other tokens."""
        size, random = self._architecture.vocabulary_size, self._random
        count = {kind: rows * share // 16 for kind, share in SHARES.items()}
        held = self._worth_holding(count["held"] // 2, past)
        pasts = random.integers(size, size=(2, 1, past)), random.integers(size, size=(2, len(held), 1))
        parts = [
            np.concatenate([np.broadcast_to(each, (len(held), past)), np.tile(held[:, None], (1, hold))], axis=1)
            for each in (pasts[0][0], pasts[1][0])
        ]
        for kind, length in (("cycles of two", 2), ("cycles of three", 3)):
            cycles = random.integers(size, size=(count[kind], length))
            cycles[::2, 0] = np.resize(held, len(cycles[::2]))
            parts.append(cycles[:, np.arange(past + hold) % length])
        parts.append(random.integers(size, size=(count["random"], past + hold)))
        parts.append(np.resize(np.array(given, dtype=np.int64), (count["given"], past + hold)))
        tokens: Tokens = np.concatenate(parts).astype(np.int64)
        spare = rows - len(tokens)
        return np.concatenate([tokens, random.integers(size, size=(max(spare, 0), past + hold))])[:rows]

    def _greedy(self, steps: int) -> Tokens:
        """Returns tokens (GREEDY, steps). Each token is chosen so that the 2-norm of some units of the state becomes as
        large as possible.

        These units are all units, those of one state tensor, random units, or one of the units with the largest bounds.
        The candidates are the best tokens of the previous step and random tokens.
        """
        size, random = self._architecture.vocabulary_size, self._random
        state, chosen = self._reference.zero_state(GREEDY), []
        weights = {name: random.integers(2, size=(GREEDY, 1, *state[name].shape[1:])) for name in self._flat}
        for index, name in enumerate(self._flat):
            weights[name][: len(self._flat) + 1] = 0
            weights[name][[0, index + 1]] = 1
        reach = {
            name: bound
            for names, layer in zip(self._names, self._layers, strict=True)
            for name, bound in zip(names, layer.bound.reach, strict=True)
        }
        for row in range(GREEDY // 2, GREEDY):
            name = self._flat[-1 - row % len(self._flat)]
            for each in weights.values():
                each[row] = 0
            weights[name][row, 0, np.argsort(-reach[name])[(row - GREEDY // 2) % len(reach[name])]] = 1
        count = min(size, CHOICES)
        best = np.tile(np.arange(size), (GREEDY, 1)) if size <= CHOICES else random.integers(size, size=(GREEDY, count))
        for _ in range(steps):
            tried = best
            if size > CHOICES:
                tried = np.concatenate(
                    [best[:, : count // 2], random.integers(size, size=(GREEDY, count // 2))], axis=1
                )
            repeated = {name: np.repeat(value, count, axis=0) for name, value in state.items()}
            _, after = self._reference.advance(tried.ravel(), repeated)
            lengths = np.zeros((GREEDY, count))
            for name, weight in weights.items():
                lengths += (weight * after[name].reshape(GREEDY, count, -1) ** 2).sum(axis=2)
            best = np.take_along_axis(tried, np.argsort(-lengths, axis=1), axis=1)
            first = np.arange(GREEDY) * count + lengths.argmax(axis=1)
            state = {name: value[first] for name, value in after.items()}
            chosen.append(best[:, 0])
        return np.stack(chosen, axis=1)

    def _worth_holding(self, count: int, past: int) -> Tokens:
        """Returns up to `count` tokens for repetition: a third whose steps reduce the difference of two states least, a
        third whose steps have the largest errors, and random tokens.

        Measures one step with every token from two states, one after random tokens and one after a repeated token. The
        steps of a token reduce the difference least if they leave the two states farthest apart. In cells with gates,
        such a token causes large gates.
        """
        size = self._architecture.vocabulary_size
        pasts = self._random.integers(size, size=(2, past))
        pasts[1] = pasts[1, 0]
        state, front = self._zero(2), self._reference.zero_state(2)
        for column in pasts.T:
            _, state, front = self._measure(column, state, front)
        kept, rounded = np.zeros(size), np.zeros(size)
        at_once = max(1, min(AT_ONCE, LOGITS_AT_ONCE // size))
        for start in range(0, size, at_once):
            tokens = np.arange(start, min(start + at_once, size))
            ends = []
            for row in range(2):
                alone = {name: np.repeat(value[row : row + 1], len(tokens), axis=0) for name, value in state.items()}
                exact = {name: np.repeat(value[row : row + 1], len(tokens), axis=0) for name, value in front.items()}
                errors, after, _ = self._measure(tokens, alone, exact)
                ends.append(np.concatenate([after[name].astype(np.float64) for name in self._flat], axis=1))
                rounded[tokens] = np.maximum(
                    rounded[tokens], sum(np.square(each).sum(axis=1) for each in errors.values())
                )
            kept[tokens] = np.linalg.norm(ends[0] - ends[1], axis=1)
        if size <= count:
            return np.arange(size)
        third = count // 3
        chosen = np.unique(np.concatenate([np.argsort(-kept)[:third], np.argsort(-rounded)[:third]]))
        others = np.setdiff1d(np.arange(size), chosen)
        return np.concatenate([chosen, self._random.choice(others, count - len(chosen), replace=False)])

    def _measure(self, tokens: Tokens, state: Tensors, front: State) -> tuple[dict[str, Matrix], Tensors, State]:
        """Measures one step of every row.

        state: the float32 state that the graph returned last. front: the oracle's state, of which only the tensors of
        the convolution blocks are read. Returns the errors of the units by state tensor, the graph's next state, and
        the oracle's.
        """
        before = {name: value.astype(np.float64) for name, value in state.items()} | {
            name: value for name, value in front.items() if name not in self._flat
        }
        outputs = self._run("step", {"tokens": tokens, **state})
        hidden, exact = self._reference.advance(tokens, before)
        seen, errors = self._seen, {}
        for name in self._flat:
            errors[name] = np.abs(outputs[f"next.{name}"].astype(np.float64) - exact[name])
            box, ball = seen.step.get(name, (0.0, 0.0))
            length = float(np.linalg.norm(errors[name], axis=1).max())
            seen.step[name] = max(box, float(errors[name].max())), max(ball, length)
        if self._residual:  # in a plain network, `hidden` is a state, which is measured above
            off = np.linalg.norm(outputs["hidden"].astype(np.float64) - hidden, axis=1)
            seen.output = max(seen.output, float(off.max()))
        own = outputs["hidden"][:WITH_LOGITS].astype(np.float64)
        off = outputs["logits"][:WITH_LOGITS].astype(np.float64) - self._reference.logits(own)
        seen.logits = max(seen.logits, float(np.ptp(off, axis=1).max()))
        seen.steps += len(tokens)
        return errors, {name: outputs[f"next.{name}"] for name in state}, exact

    def _zero(self, rows: int) -> Tensors:
        return {name: value.astype(np.float32) for name, value in self._reference.zero_state(rows).items()}
