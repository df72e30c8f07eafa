"""Whether the graphs compute what the oracle computes: the tie between a statement about weights and an answer.

Differences are absolute, in float32 against the float64 oracle: of log-probabilities as they are, of hidden and of
state tensors per unit of their greatest magnitude, where that is above 1. Float32 alone makes about 1e-6 of them here,
a wrong gate order about 1; the tolerance is the promise made of streaming a thousand tokens. Graphs that multiply in
int8 have a wider one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.request import RequestBound
from wane.models.manifest import Architecture, Certificate, Precision, Role, Rounding
from wane.models.reference import Reference, State

TOLERANCE = 1e-4

TOLERANCE_INT8 = 0.2
"""Where graphs multiply in int8: rounding makes some hundredths, and of log-probabilities, which are then compared as
probabilities, more than 1 where they are small. It tells wrong graphs; how good right ones are, agreement tells."""

HEADROOM = 2.0
"""`rounding.carried` must be this many times the distance of `hidden` from the oracle that is seen here."""

PIECE = 8
"""Tokens in each of the two pieces of a sequence in `compare_bits`, beyond what a front sees."""

Tensors = dict[str, NDArray[Any]]
Run = Callable[[Role, Tensors], Tensors]
"""Runs a graph: the inputs by name, then all outputs by name."""

RADIUS = "radius"
TOP = ("top_logits", "top_ids", "log_sum_exp")
"""What a graph may put out beside logits: all three, or none."""

Expected = dict[str, NDArray[np.float64]]

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


class RoundingError(ParityError):
    """Graphs that compute what the oracle does, but round more than is said of them."""


def rounding_seen(outputs: Tensors, expected: Mapping[str, NDArray[np.floating]], diameter: float) -> float:
    """How far `logits` and `hidden`, (B, V) and (B, H), are from those expected, as the 2-norm at `hidden`.

    Where that is more, it is what the logits differ by among themselves over `diameter`, D: total variation <=
    tanh(D (e + it) / 4) then counts the output layer's rounding too.
    """
    apart = np.linalg.norm(outputs["hidden"].astype(np.float64) - expected["hidden"], axis=1)
    off = outputs["logits"].astype(np.float64) - expected["logits"]
    return max(float(apart.max()), float(np.ptp(off, axis=1).max()) / max(diameter, 1e-30))


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log-probabilities (..., V) of logits (..., V), in float64."""
    shifted = logits.astype(np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def check_graphs(
    reference: Reference,
    run: Run,
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    start: State,
    certificate: Certificate | None = None,
    bound: Callable[[], RequestBound] | None = None,
    precision: Precision = "float32",
) -> float:
    """Holds every graph against the oracle, on tokens (B, T) of which the first `lengths` (B) of each row count.

    From the zero state and from `start`; whole and in two pieces; in a batch, row by row, and token by token.
    `certificate`: what it says of rounding is held against `window`, and `step` from the zero state.
    `bound`: of the same weights, made where a graph puts out radii: none may be smaller than what is proved.
    `precision`: what the graphs multiply in. Returns the worst difference; raises ParityError beyond the tolerance, and
    RoundingError where only the certificate says less than HEADROOM times what is seen.
    """
    return _Check(reference, run, tokens, lengths, precision).all(start, certificate, bound)


class _Check:
    def __init__(
        self,
        reference: Reference,
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
        if certificate is not None and certificate.rounding is not None:
            _check_rounding("window, a batch", *windowed, certificate.rounding, certificate.head_diameter)
            for step in self._token_by_token(zeros, uncut):
                _check_rounding("step, a stream", *step, certificate.rounding, certificate.head_diameter)
            self._one_step_at_a_time(certificate.rounding)
        return self._worst

    def _oracle(self, state: State) -> Expected:
        """What every output should be after every token, (B, T, ...), from `state` on.

        The oracle goes along the tokens once, and through its output layer, which is most of its work, for all at once.
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
        """What the sequence graphs should put out where the first `lengths` tokens count."""
        expected = {name: value[np.arange(len(lengths)), lengths - 1] for name, value in every.items()}
        counts = np.arange(self._tokens.shape[1]) < lengths[:, None]
        return expected | {"logprobs": np.where(counts, every["logprobs"], 0.0)}

    def _in_pieces(self, start: State, every: Expected) -> None:
        """`advance` over the first half, then `scan` over the second from where that ended: all positions count."""
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
        self._compare("scan", "the second half", feeds, expected | {"logprobs": every["logprobs"][:, half:]})

    def _token_by_token(self, start: State, every: Expected) -> Iterator[tuple[Tensors, Expected]]:
        """`step`, fed with its own state, beside the oracle, fed with its own: what it puts out, and should."""
        fed = _float32(start)
        for t in range(self._tokens.shape[1]):
            expected = {name: value[:, t] for name, value in every.items()}
            feeds: Tensors = {"tokens": self._tokens[:, t], **fed}
            outputs = self._compare("step", f"token {t} of a stream", feeds, expected)
            fed = {name: outputs[f"next.{name}"] for name in fed}
            yield outputs, expected

    def _one_step_at_a_time(self, rounding: Rounding) -> None:
        """Holds each step's error, from the state that `step` itself left, to what the certificate says of one step.

        Rows of random tokens, and the same with one token held in each.
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
                        f"step: one step's error in {name} is {box:.3g} in a unit and {ball:.3g} in the 2-norm, and "
                        f"the certificate's rounding.step says {bound.box:.3g} and {bound.ball:.3g}"
                    )

    def _compare(self, role: Role, case: str, feeds: Tensors, expected: Expected) -> Tensors:
        """Runs a graph and holds its outputs against `expected`, which may hold more than this role puts out."""
        try:
            outputs = self._run(role, feeds)
        except Exception as error:  # whatever the runtime raises: inputs of other names, shapes or types, an operator
            raise ParityError(f"{role}, {case}: the graph cannot be run: {error}") from error
        after = () if role == "head" else tuple(f"next.{name}" for name in self._reference.zero_state(0))
        for name in ANSWERS[role] + after:
            if name not in outputs:
                raise ParityError(f"{role}, {case}: the graph has no output {name}")
            dtype = getattr(outputs[name], "dtype", "none")  # a sequence or a map is no tensor
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
            if not difference <= self._tolerance:  # also where it is not a number
                raise ParityError(
                    f"{role}, {case}: {name} differs from the oracle by {difference:.3g}, tolerance {self._tolerance:g}"
                )
            self._worst = max(self._worst, difference)
        if any(name in outputs for name in TOP):
            _check_top(f"{role}, {case}", outputs)
        return outputs


def _check_radius(case: str, radii: NDArray[Any] | None, rows: int, row: int, least: float) -> None:
    """`least`: infinite where nothing is proved; then a graph may say nothing else."""
    if radii is None or radii.shape != (rows,) or radii.dtype != np.float32:
        raise ParityError(f"window, {case}: {RADIUS} is not one float32 number a row")
    found = float(radii[row])
    if not found >= least:  # also where it is not a number
        raise ParityError(f"window, {case}: {RADIUS} is {found:.9g}, and the least that is proved is {least:.9g}")


def _check_top(case: str, outputs: Tensors) -> None:
    """Holds what is read off logits against the logits: the largest and their ids exactly, equals by id."""
    for name in ("logits", *TOP):
        if name not in outputs:
            raise ParityError(f"{case}: the graph has no output {name}, but others of {', '.join(TOP)}")
    logits = outputs["logits"].astype(np.float64)
    top, ids, total = (outputs[name] for name in TOP)
    of_all = total.astype(np.float64)
    if top.ndim != 2 or top.shape[1] < 1 or ids.dtype != np.int64:
        raise ParityError(f"{case}: top_logits has shape {top.shape}, top_ids dtype {ids.dtype}")
    order = np.argsort(-logits, axis=1, kind="stable")[:, : top.shape[1]]
    if not np.array_equal(ids, order):
        raise ParityError(f"{case}: top_ids are not those of the largest logits, in falling order")
    if not np.array_equal(top, np.take_along_axis(logits, order, axis=1)):
        raise ParityError(f"{case}: top_logits are not the logits of top_ids")
    expected = logits[:, 0] - log_softmax(logits)[:, 0]
    if of_all.shape != expected.shape or not np.abs(of_all - expected).max() <= TOLERANCE:
        raise ParityError(f"{case}: log_sum_exp is not that of the logits")


def _check_rounding(case: str, outputs: Tensors, expected: Expected, rounding: Rounding, diameter: float) -> None:
    seen = rounding_seen(outputs, expected, diameter)
    if not seen * HEADROOM <= rounding.carried:
        raise RoundingError(
            f"{case}: hidden is {seen:.3g} from the oracle in the 2-norm, and the certificate's rounding.carried, "
            f"which has to be {HEADROOM:g} times that, is {rounding.carried:.3g}"
        )
    for name, bound in rounding.states.items():
        off = outputs[f"next.{name}"].astype(np.float64) - expected[f"next.{name}"]
        length = float(np.linalg.norm(off, axis=1).max())
        if not length <= bound.ball:
            raise RoundingError(
                f"{case}: {name} is {length:.3g} from the oracle in the 2-norm, and the certificate's "
                f"rounding.states.{name}.ball is {bound.ball:.3g}"
            )


def _after(state: State) -> State:
    return {f"next.{name}": value for name, value in state.items()}


def _float32(state: State) -> Tensors:
    return {name: value.astype(np.float32) for name, value in state.items()}


@dataclass(frozen=True, slots=True)
class Bits:
    """Whether graphs that are to give the same answer to the same tokens do so bit for bit on this machine.

    differ: where they do not, or None. digest: of the bits of one stream; machines of one kind have the same.
    """

    differ: str | None
    digest: bytes


def compare_bits(architecture: Architecture, run: Run, batch: int) -> Bits:
    """Runs every graph over the same tokens.

    From the zero state, over tokens that the vocabulary offers and one that is held: `step` by step in a batch of
    `batch` rows, and one of them alone; as a `window`; by `advance` and by `scan`, in two pieces each; `head` of what
    they end in. `log_sum_exp` is not compared: a sum over the vocabulary may be taken in another order in another
    batch, which moves log-probabilities by a bit.
    """
    front = 0 if architecture.front is None else architecture.front.reach
    time, half = front + 2 * PIECE, front + PIECE
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
                return Bits(f"{case}: {name} is not bit for bit what step gives in a batch of {batch}", digest.digest())
    return Bits(None, digest.digest())
