"""Checks that the graphs compute the same function as the oracle, so that proofs about the weights hold for the
predictions.

A graph's float32 outputs are compared with those of the float64 oracle. The difference of log-probabilities is
absolute. The difference of hidden and state tensors is divided by the tensor's greatest absolute value if this value is
above 1. Float32 rounding causes differences of about 1e-6. A wrong order of gates causes differences of about 1. The
tolerance is the difference that is allowed after a thousand streamed tokens. Graphs that multiply in int8 have a wider
tolerance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture
from wane.models.certificate.request import RequestBound
from wane.models.manifest import Certificate, Precision, Readout, Role, Rounding
from wane.models.reference import Reference, State

TOLERANCE = 1e-4

TOLERANCE_INT8 = 0.2
"""The tolerance for graphs that multiply in int8. Their rounding causes differences of some hundredths in
probabilities.

The logarithms of small probabilities may differ by more than 1, so probabilities are compared instead. This check
detects wrong graphs only, not imprecise ones.
"""

HEADROOM = 2.0
"""`rounding.carried` must be at least this many times the measured distance of `hidden` from the oracle."""

PIECE = 8
"""`compare_bits` splits a sequence into two pieces. The first has this number of tokens more than the reach of the
convolution blocks, and the second has this number of tokens."""

Tensors = dict[str, NDArray[Any]]
Run = Callable[[Role, Tensors], Tensors]
"""A function that runs the graph of a role. Its arguments are the role and the inputs by name. It returns all outputs
by name."""

RADIUS = "radius"
STREAM = "stream"
NORMS = "norms"
HIDDENS = "hiddens"
EVERY_NORMS = "every_norms"
"""An output of `scan` that bundles of schema 3 lack: `hidden` after every token."""
TOP = ("top_logits", "top_ids", "log_sum_exp")
"""The optional outputs of a graph with logits. A graph has all three of them, or none."""

Expected = dict[str, NDArray[np.float64]]

ANSWERS: dict[Role, tuple[str, ...]] = {
    "step": ("logits", "hidden"),
    "window": ("logits", "hidden"),
    "advance": ("hidden",),
    "scan": ("logprobs", "hidden"),
    "head": ("logits",),
}
"""The outputs of each graph, without the next state, which all graphs except `head` return."""


class StepGraph:
    """The graph `step` in the place of the oracle, for graphs of which no weights are known. It has the methods of
    `Reference` that the checks call."""

    def __init__(self, architecture: Architecture, run: Run) -> None:
        self.architecture = architecture
        self._run = run

    def zero_state(self, batch: int) -> State:
        """See `Reference`."""
        return {tensor.name: np.zeros((batch, *tensor.shape)) for tensor in self.architecture.state_tensors()}

    def advance(self, tokens: NDArray[np.int64], state: State) -> tuple[NDArray[np.float64], State]:
        """See `Reference`. Raises ParityError."""
        try:
            outputs = self._run("step", {"tokens": tokens, **_float32(state)})
            after = {name: outputs[f"next.{name}"].astype(np.float64) for name in state}
            return outputs["hidden"].astype(np.float64), after
        except Exception as error:  # onnxruntime's errors have no common class
            raise ParityError(f"step: the graph cannot run: {error}") from error

    def logits(self, hidden: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Reference`. Raises ParityError."""
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(np.float32)
        try:
            found = self._run("head", {"hidden": flat})["logits"].astype(np.float64)
        except Exception as error:
            raise ParityError(f"head: the graph cannot run: {error}") from error
        return found.reshape(*hidden.shape[:-1], -1)


class ParityError(Exception):
    """Raised if a graph differs from the oracle. The message names graph, output, difference and tolerance."""


class RoundingError(ParityError):
    """Raised if the graphs are correct, but their rounding exceeds the bounds in the certificate."""


def rounding_seen(outputs: Tensors, expected: Mapping[str, NDArray[np.floating]], diameter: float) -> float:
    """Returns the error of `logits` (B, V) and `hidden` (B, H) as a 2-norm error of `hidden`.

    The result is the larger of two numbers: the 2-norm error of `hidden`, and the greatest minus the least error of the
    logits, divided by `diameter`, D. With this error added to e, the bound of the distance of `hidden`, the bound of
    the total variation, tanh(D (e + error) / 4), includes the output layer's rounding.
    """
    apart = np.linalg.norm(outputs["hidden"].astype(np.float64) - expected["hidden"], axis=1)
    off = outputs["logits"].astype(np.float64) - expected["logits"]
    return max(float(apart.max()), float(np.ptp(off, axis=1).max()) / max(diameter, 1e-30))


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns the log-probabilities (..., V) of logits (..., V), in float64."""
    shifted = logits.astype(np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def check_graphs(
    reference: Reference | StepGraph,
    run: Run,
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    start: State,
    certificate: Certificate | None = None,
    bound: Callable[[], RequestBound] | None = None,
    precision: Precision = "float32",
) -> float:
    """Compares every graph with the oracle, on tokens (B, T). Row b has `lengths[b]` tokens, and the rest of the row is
    padding.

    The graphs run from the zero state and from `start`, on whole sequences and in two pieces, in a batch, row by row,
    and token by token.

    certificate: if given, its rounding is compared with the measured rounding of `window`, and of `step` from the zero
        state.
    bound: a function that returns the `RequestBound` of the same weights. It is called if a graph returns radii. No
        radius may be below the radius that the `RequestBound` proves.
    precision: the number format in which the graphs multiply.

    Returns the largest difference. Raises ParityError if this difference exceeds the tolerance. Raises RoundingError if
    the certificate's rounding is less than HEADROOM times the measured one.
    """
    return _Check(reference, run, tokens, lengths, precision).all(start, certificate, bound)


class _Check:
    def __init__(
        self,
        reference: Reference | StepGraph,
        run: Run,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        precision: Precision,
    ) -> None:
        self._precision = precision
        self._tolerance = TOLERANCE if precision == "float32" else TOLERANCE_INT8
        self._reference = reference
        self._run = run
        self._tokens = tokens
        self._lengths = lengths
        self._targets = np.roll(tokens, -1, axis=1)
        self._worst = 0.0

    def all(self, start: State, certificate: Certificate | None, bound: Callable[[], RequestBound] | None) -> float:
        batch = len(self._tokens)
        zeros = self._reference.zero_state(batch)
        uncut = self._oracle(zeros)
        expected = self._at(uncut, self._lengths)
        outputs = self._compare("window", "a batch", {"tokens": self._tokens, "lengths": self._lengths}, expected)
        windowed = outputs, expected
        request = bound() if bound is not None and RADIUS in outputs else None
        for row in range(batch):
            alone = slice(row, row + 1), slice(0, self._lengths[row])
            feeds: Tensors = {"tokens": self._tokens[alone], "lengths": self._lengths[alone[0]]}
            found = self._compare("window", f"row {row} alone", feeds, {k: v[alone[0]] for k, v in expected.items()})
            if request is not None:
                least = float(request(self._tokens[alone]).radius[0])
                _check_radius(f"row {row} of a batch", outputs.get(RADIUS), batch, row, least)
                _check_radius(f"row {row} alone", found.get(RADIUS), 1, 0, least)

        every = self._oracle(start)
        expected = self._at(every, self._lengths)
        feeds = {"tokens": self._tokens, "lengths": self._lengths, **_float32(start)}
        self._compare("advance", "a batch", feeds, expected)
        self._compare("scan", "a batch", {**feeds, "targets": self._targets}, expected)
        self._in_pieces(start, every)
        for _ in self._token_by_token(start, every):
            pass
        hidden = expected["hidden"].astype(np.float32)
        self._compare(
            "head", "a batch", {"hidden": hidden}, {"logits": self._reference.logits(hidden.astype(np.float64))}
        )
        if certificate is not None and certificate.readout is not None:
            self._check_readout(certificate.readout, windowed[0])
        if certificate is not None and certificate.rounding is not None:
            _check_rounding("window, a batch", *windowed, certificate.rounding, certificate.head_diameter)
            for step in self._token_by_token(zeros, uncut):
                _check_rounding("step, a stream", *step, certificate.rounding, certificate.head_diameter)
            self._one_step_at_a_time(certificate.rounding)
        return self._worst

    def _check_readout(self, readout: Readout, outputs: Tensors) -> None:
        """Compares the rounding of `hidden` with the certificate's bound of one evaluation. The oracle computes it from
        the graph's state and stream."""
        if STREAM not in outputs:
            return
        state = outputs[f"next.{self._reference.architecture.layer_states(0)[0]}"].astype(np.float64)
        assert isinstance(self._reference, Reference), "an imported graph has a readout: this is a bug"
        hidden = self._reference.readout(outputs[STREAM].astype(np.float64), [state])
        apart = np.linalg.norm(outputs["hidden"] - hidden, axis=1)
        for row, norms in enumerate(outputs[NORMS].tolist()):
            bound = readout.between(norms, runs=1)
            seen = float(apart[row])
            if not seen * HEADROOM <= bound:
                raise RoundingError(
                    f"window, row {row}: hidden is {seen:.3g} away from the oracle in the 2-norm, but the "
                    f"certificate's readout, which must be at least {HEADROOM:g} times this distance, is {bound:.3g}"
                )

    def _oracle(self, state: State) -> Expected:
        """Returns the expected value of every output after every token, (B, T, ...), starting from `state`.

        Runs the oracle once over the tokens. The output layer takes most of the time, and is computed for all tokens at
        once.
        """
        steps = []
        for column in self._tokens.T:
            hidden, state = self._reference.advance(column, state)
            steps.append({"hidden": hidden, **_after(state)})
        every = {name: np.stack([step[name] for step in steps], axis=1) for name in steps[0]}
        logits = self._reference.logits(every["hidden"])
        chosen = np.take_along_axis(log_softmax(logits), self._targets[..., None], axis=2)[..., 0]
        return {**every, "logits": logits, "logprobs": chosen}

    def _at(self, every: Expected, lengths: NDArray[np.int64]) -> Expected:
        """Returns the expected outputs of the graphs that read sequences, for rows of `lengths` tokens."""
        expected = {name: value[np.arange(len(lengths)), lengths - 1] for name, value in every.items()}
        counts = np.arange(self._tokens.shape[1]) < lengths[:, None]
        expected["logprobs"] = np.where(counts, every["logprobs"], 0.0)
        expected[HIDDENS] = np.where(counts[..., None], every["hidden"], 0.0)
        return expected

    def _in_pieces(self, start: State, every: Expected) -> None:
        """Runs `advance` over the first half of each row, then `scan` over the second half from the resulting state,
        and compares both with the oracle. No row has padding."""
        batch, time = self._tokens.shape
        half = time // 2
        if half == 0:
            return
        expected = self._at(every, np.full(batch, half))
        feeds: Tensors = {"tokens": self._tokens[:, :half], "lengths": np.full(batch, half), **_float32(start)}
        outputs = self._compare("advance", "the first half", feeds, expected)
        feeds = {name: outputs[f"next.{name}"] for name in start}
        feeds |= {"tokens": self._tokens[:, half:], "targets": self._targets[:, half:]}
        feeds["lengths"] = np.full(batch, time - half)
        expected = self._at(every, np.full(batch, time))
        second = {"logprobs": every["logprobs"][:, half:], HIDDENS: every["hidden"][:, half:]}
        self._compare("scan", "the second half", feeds, expected | second)

    def _token_by_token(self, start: State, every: Expected) -> Iterator[tuple[Tensors, Expected]]:
        """Runs `step` and the oracle token by token, each from its own previous state. Yields the outputs of `step` and
        the expected values."""
        fed = _float32(start)
        for t in range(self._tokens.shape[1]):
            expected = {name: value[:, t] for name, value in every.items()}
            feeds: Tensors = {"tokens": self._tokens[:, t], **fed}
            outputs = self._compare("step", f"token {t} of a stream", feeds, expected)
            fed = {name: outputs[f"next.{name}"] for name in fed}
            yield outputs, expected

    def _one_step_at_a_time(self, rounding: Rounding) -> None:
        """Compares the error of each step with the certificate's error of one step. `step` and the oracle both start
        from the state that `step` returned last.

        The rows are random tokens, and repetitions of one token.
        """
        tokens = np.concatenate([self._tokens, np.repeat(self._tokens[:, :1], self._tokens.shape[1], axis=1)])
        exact = self._reference.zero_state(len(tokens))
        fed = _float32(exact)
        for column in tokens.T:
            own = {name: fed[name].astype(np.float64) if name in rounding.step else exact[name] for name in fed}
            _, exact = self._reference.advance(column, own)
            outputs = self._run("step", {"tokens": column, **fed})
            fed = {name: outputs[f"next.{name}"] for name in fed}
            for name, bound in rounding.step.items():
                off = np.abs(fed[name].astype(np.float64) - exact[name])
                box, ball = float(off.max()), float(np.linalg.norm(off, axis=1).max())
                if not (box <= bound.box and ball <= bound.ball):
                    raise RoundingError(
                        f"step: one step's error in {name} is {box:.3g} in a unit and {ball:.3g} in the 2-norm, but "
                        f"the certificate's rounding.step is {bound.box:.3g} and {bound.ball:.3g}"
                    )

    def _compare(self, role: Role, case: str, feeds: Tensors, expected: Expected) -> Tensors:
        """Runs a graph and compares its outputs with `expected`, which may contain values of outputs that this graph
        does not have."""
        try:
            outputs = self._run(role, feeds)
        # onnxruntime raises a bare Exception for a missing operator, and for a wrong name, shape or type of an input.
        except Exception as error:
            raise ParityError(f"{role}, {case}: the graph cannot run: {error}") from error
        after = () if role == "head" else tuple(f"next.{name}" for name in self._reference.zero_state(0))
        every = (HIDDENS,) if HIDDENS in outputs else ()
        for name in ANSWERS[role] + every + after:
            if name not in outputs:
                raise ParityError(f"{role}, {case}: the graph has no output {name}")
            dtype = getattr(outputs[name], "dtype", "none")  # an output that is a sequence or a map has no dtype
            if dtype != np.float32:
                raise ParityError(f"{role}, {case}: {name} has dtype {dtype}, expected float32")
            wanted, got = expected[name], outputs[name].astype(np.float64)
            if got.shape != wanted.shape:
                raise ParityError(f"{role}, {case}: {name} has shape {got.shape}, expected {wanted.shape}")
            scale = 1.0
            if name == "logits":
                wanted, got = log_softmax(wanted), log_softmax(got)
            if name not in ("logits", "logprobs"):
                scale = max(1.0, float(np.abs(wanted).max()))
            elif self._precision == "int8":
                wanted, got = np.exp(wanted), np.exp(got)
            difference = float(np.abs(wanted - got).max()) / scale
            if not difference <= self._tolerance:  # this condition also holds for NaN
                raise ParityError(
                    f"{role}, {case}: {name} differs from the oracle by {difference:.3g}, tolerance {self._tolerance:g}"
                )
            self._worst = max(self._worst, difference)
        if EVERY_NORMS in outputs:
            last = outputs[EVERY_NORMS][np.arange(len(feeds["lengths"])), feeds["lengths"] - 1]
            if not np.array_equal(last, outputs[NORMS]):
                raise ParityError(f"{role}, {case}: {EVERY_NORMS} after the last token differs from {NORMS}")
        if any(name in outputs for name in TOP):
            _check_top(f"{role}, {case}", outputs)
        return outputs


def _check_radius(case: str, radii: NDArray[Any] | None, rows: int, row: int, least: float) -> None:
    """Raises ParityError if a radius is below `least`, the proved radius. `least` is infinite if no finite radius is
    proved."""
    if radii is None or radii.shape != (rows,) or radii.dtype != np.float32:
        raise ParityError(f"window, {case}: {RADIUS} is not one float32 number per row")
    found = float(radii[row])
    if not found >= least:  # this condition also holds for NaN
        raise ParityError(f"window, {case}: {RADIUS} is {found:.9g}, below the proved radius, {least:.9g}")


def _check_top(case: str, outputs: Tensors) -> None:
    """Checks the top outputs against the logits: the largest values and their ids exactly, with ties ordered by id."""
    for name in ("logits", *TOP):
        if name not in outputs:
            raise ParityError(f"{case}: the graph has some of the outputs {', '.join(TOP)}, but not {name}")
    logits = outputs["logits"].astype(np.float64)
    top, ids, total = (outputs[name] for name in TOP)
    of_all = total.astype(np.float64)
    if top.ndim != 2 or top.shape[1] < 1 or ids.dtype != np.int64:
        raise ParityError(
            f"{case}: top_logits has shape {top.shape}, and top_ids has dtype {ids.dtype}; expected (B, K) and int64"
        )
    order = np.argsort(-logits, axis=1, kind="stable")[:, : top.shape[1]]
    if not np.array_equal(ids, order):
        raise ParityError(f"{case}: top_ids are not the ids of the largest logits in descending order")
    if not np.array_equal(top, np.take_along_axis(logits, order, axis=1)):
        raise ParityError(f"{case}: top_logits are not the logits of top_ids")
    expected = logits[:, 0] - log_softmax(logits)[:, 0]
    if of_all.shape != expected.shape or not np.abs(of_all - expected).max() <= TOLERANCE:
        raise ParityError(f"{case}: log_sum_exp does not match the logits")


def _check_rounding(case: str, outputs: Tensors, expected: Expected, rounding: Rounding, diameter: float) -> None:
    seen = rounding_seen(outputs, expected, diameter)
    if not seen * HEADROOM <= rounding.carried:
        raise RoundingError(
            f"{case}: hidden is {seen:.3g} away from the oracle in the 2-norm, but the certificate's rounding.carried, "
            f"which must be at least {HEADROOM:g} times this distance, is {rounding.carried:.3g}"
        )
    for name, bound in rounding.states.items():
        off = outputs[f"next.{name}"].astype(np.float64) - expected[f"next.{name}"]
        length = float(np.linalg.norm(off, axis=1).max())
        if not length <= bound.ball:
            raise RoundingError(
                f"{case}: {name} is {length:.3g} away from the oracle in the 2-norm, but the certificate's "
                f"rounding.states.{name}.ball is {bound.ball:.3g}"
            )


def _after(state: State) -> State:
    return {f"next.{name}": value for name, value in state.items()}


def _float32(state: State) -> Tensors:
    return {name: value.astype(np.float32) for name, value in state.items()}


@dataclass(frozen=True, slots=True)
class Bits:
    """Whether the graphs give bitwise equal outputs for the same tokens on this machine.

    differ: a message with the first difference, or None if all outputs are equal. digest: the hash of the last outputs
    of `step` for one sequence. It is equal on machines whose processors and libraries round alike.
    """

    differ: str | None
    digest: bytes


def compare_bits(architecture: Architecture, run: Run, batch: int) -> Bits:
    """Runs every graph over the same tokens and compares the bits of the outputs.

    All graphs read the same rows from the zero state: random tokens, and one row that repeats a token. `step` runs in a
    batch of `batch` rows, and with one row alone. So does `window`, which reads whole sequences. `advance` and `scan`
    read the sequences in two pieces, and `head` reads the last `hidden` of `step`. `log_sum_exp` is not compared,
    because another batch may sum the vocabulary in another order, which changes log-probabilities by a bit.
    """
    time, half = architecture.reach + 2 * PIECE, architecture.reach + PIECE
    tokens = np.random.default_rng(4).integers(architecture.vocabulary_size, size=(batch, time), dtype=np.int64)
    tokens[-1] = tokens[0, 0]
    shapes = {tensor.name: tensor.shape for tensor in architecture.state_tensors()}

    def zeros(rows: int) -> Tensors:
        return {name: np.zeros((rows, *shape), np.float32) for name, shape in shapes.items()}

    def steps(columns: NDArray[np.int64]) -> Tensors:
        state = zeros(len(columns))
        for column in columns.T:
            outputs = run("step", {"tokens": np.ascontiguousarray(column), **state})
            state = {name: outputs[f"next.{name}"] for name in shapes}
        return outputs

    def pieces(role: Role) -> Tensors:
        state = zeros(batch)
        for part in (tokens[:, :half], tokens[:, half:]):
            feeds: Tensors = {"tokens": part, "lengths": np.full(batch, part.shape[1]), **state}
            outputs = run(role, feeds | ({"targets": part} if role == "scan" else {}))
            state = {name: outputs[f"next.{name}"] for name in shapes}
        return outputs

    expected = steps(tokens)
    window: Tensors = {"tokens": tokens, "lengths": np.full(batch, time)}
    found: list[tuple[str, Tensors, slice]] = [
        ("window", run("window", window), slice(None)),
        ("advance", pieces("advance"), slice(None)),
        ("scan", pieces("scan"), slice(None)),
        ("head", run("head", {"hidden": expected["hidden"]}), slice(None)),
    ]
    rows = {row: steps(tokens[row : row + 1]) for row in (0, batch - 1)}
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(rows[0]):
        digest.update(rows[0][name].tobytes())
    for row, streamed in rows.items():
        alone = slice(row, row + 1)
        found.append(("step of one row", streamed, alone))
        found.append(
            ("window of one row", run("window", {name: value[alone] for name, value in window.items()}), alone)
        )
    for case, outputs, part in found:
        for name, value in outputs.items():
            if name in expected and name != TOP[-1] and not np.array_equal(value, expected[name][part]):
                return Bits(
                    f"{case}: {name} is not bitwise equal to that of step in a batch of {batch}", digest.digest()
                )
    return Bits(None, digest.digest())
