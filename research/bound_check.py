"""Checks the bounds of one random model against random and adversarial histories."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from research.adversary import Adversary
from research.histories import (
    Tokens,
    after,
    climbed_histories,
    distances,
    distances_from,
    greedy_histories,
    random_histories,
)
from wane.models.architecture import Architecture
from wane.models.certificate import certify
from wane.models.certificate.cells.gated import GatedLayer
from wane.models.certificate.cells.lru import LruLayer
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.layers import build_layers
from wane.models.certificate.request import RequestBound
from wane.models.certificate.rounding import UNITS, worst_case
from wane.models.certificate.stack import Stack, state_error_curve
from wane.models.certificate.top1 import Top1
from wane.models.certificate.total_variation import head_diameter
from wane.models.export.export import WEIGHTS, opened_step
from wane.models.export.roles import build_graph
from wane.models.export.rounding import measure_rounding
from wane.models.layer_registry import FADING, KINDS
from wane.models.manifest import Certificate
from wane.models.parity import Run, Tensors
from wane.models.reference import Reference, State
from wane.models.weights import Weights, encode_weights, tensor_extents, weight_shapes

PAST, LAST = 24, 24
RANDOM, CLIMBED, ROUNDS = 12, 4, 3
ASCENDED, FLIPS, SOFTENING, STATES = 8, 6, 6, 6
WINDOWS = (24, 8)
DIRECTIONS, PUSHED = 4, 4
SHOWN = (1, 2, 4, 8, 16, 24)
LONG, REPEATED, KEPT = 2000, 12, 64
FRONT_ROUNDING = 1e-9
FLOAT64 = 1e-14  # the rounding tolerance of total variations, in float64
DTYPES: dict[str, type[np.float64 | np.float32]] = {"float64": np.float64, "float32": np.float32}

OF_WINDOWS = ("of_radius", "of_lead", "of_top1", "of_variation")
"""The keys of the numbers of violations of a window's bounds, one for each kind of bound."""

Floats = NDArray[np.float64]
Found = dict[str, object]


def random_model(seed: int) -> tuple[Architecture, Weights]:
    """Returns a random model. Consecutive seeds give models with different kinds of cell."""
    generator = np.random.default_rng(seed)
    cell = FADING[seed % len(FADING)]
    residual = bool(generator.random() < 0.4)
    layers = int(generator.choice([1, 1, 2, 3]))
    hidden = int(generator.integers(2, 13))
    if cell == "lru":  # real and imaginary parts
        hidden += hidden % 2
    fields: dict[str, object] = {"embedding": hidden, "vocabulary_size": int(generator.integers(3, 9))}
    layer: dict[str, object] = {"kind": cell, "units": hidden}
    stack: list[dict[str, object]] = []
    if residual:
        fields["norm_epsilon"] = float(generator.choice([1e-5, 0.01, 0.25]))
        layer |= {"block": "residual", "feed_forward": int(generator.choice([0, 8]))}
        if generator.random() < 0.25:
            kernel = int(generator.integers(2, 4))
            stack.append(
                {"kind": "convolution", "block": "front", "units": hidden, "kernel_size": kernel, "feed_forward": 6}
            )
        if generator.random() < 0.25:
            units = int(generator.integers(2, 13))
            layer["units"] = units + units % 2 if cell == "lru" else units
    caps: list[float] = [1.0] * layers
    if KINDS[cell].input_gated and generator.random() < 0.7:
        caps = generator.uniform(0.3, 0.98, layers).tolist()
    stack += [layer | ({"gate_cap": cap} if KINDS[cell].input_gated else {}) for cap in caps]
    architecture = Architecture.model_validate(fields | {"layers": stack})
    recurrent, driven = 10 ** generator.uniform(-1.3, 0.4), 10 ** generator.uniform(-1, 0.5)
    between = 10 ** generator.uniform(-1.5, 0)
    weights = {}
    for name, shape in weight_shapes(architecture).items():
        values = generator.normal(size=shape)
        if "weight_hh" in name:
            values *= recurrent / np.sqrt(shape[1])
        elif ".cell." in name and len(shape) == 2:
            values *= driven / np.sqrt(shape[1])
        elif "norm.weight" in name:
            values = 1 + 0.3 * values
        elif name != "embedding.weight":
            values *= between / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return architecture, weights


def examine(seed: int) -> Found:
    """Checks the random model of `seed` with all of its histories, initial states and windows."""
    return _Examined(seed).found()


class _Examined:
    def __init__(self, seed: int) -> None:
        self.architecture, self.weights = random_model(seed)
        self.layers = build_layers(self.architecture, self.weights)
        self.exact = Reference(self.architecture, self.weights)
        self.adversary = Adversary(self.architecture, self.weights)
        self.generator = np.random.default_rng([seed, 1])
        self.bounded = all(np.isfinite(reach).all() for layer in self.layers for reach in layer.bound.reach)
        self.rounding = FRONT_ROUNDING

    def found(self) -> Found:
        factors = [layer.bound.factor for layer in self.layers]
        block, many = "residual" if self.architecture.residual else "plain", len(self.layers) > 1
        histories = self._histories()
        states, after_states = self._states(histories[-STATES:, PAST:])
        found: Found = {
            "cell": self.architecture.family,
            "stack": "front" if self.architecture.finite else f"{block}, {'more' if many else 'one'}",
            "stable": max(factors) < 1,
            "claims": self.bounded,
            "histories": len(histories),
            "states": len(after_states),
            "violations": 0,
        }
        if self.bounded:
            self._hold_to_curve(found, histories, states, after_states)
        if max(factors) < 1:
            self._hold_served(found, histories)
        self._hold_windows(found, histories, states)
        return found

    def _histories(self) -> Tokens:
        """Returns random and adversarial histories."""
        size = self.architecture.vocabulary_size
        random = random_histories(self.generator, size, RANDOM, PAST, LAST)
        greedy = greedy_histories(self.exact, size, PAST, LAST)
        climbed = climbed_histories(self.exact, self.generator, random[:CLIMBED], PAST, ROUNDS)
        start = random[-ASCENDED:].copy()
        start[: ASCENDED // 2] = self.adversary.softened(start[: ASCENDED // 2], PAST, SOFTENING)
        ascended = self.adversary.flipped(start, PAST, FLIPS)
        return np.concatenate([random, greedy, climbed, ascended])

    def _states(self, last: Tokens) -> tuple[State, Tokens]:
        """Returns reachable initial states, and the tokens that the runs from these states read. Returns no states if
        the cell's bounds do not cover every reachable state."""
        reach = reachable(self.architecture, self.layers)
        if reach is None:
            return {}, last[:0]
        states, last = self.adversary.states(reach, last, FLIPS, self.generator)
        if not self.architecture.finite:
            # Without convolution blocks the states are also checked in float32, so they are rounded to float32. The
            # factor keeps the rounded states within the reachable limits.
            states = {name: (value * (1 - 2.0**-20)).astype(np.float32).astype(float) for name, value in states.items()}
        return states, last

    def _hold_to_curve(self, found: Found, histories: Tokens, states: State, after_states: Tokens) -> None:
        stack = Stack(self.architecture, self.weights, self.layers)
        curve, violations = state_error_curve(stack, LAST), 0
        for name, dtype in DTYPES.items():
            rounding = worst_case(self.architecture, self.weights, stack, name)  # type: ignore[arg-type]
            if rounding is None:
                if name == "float32":
                    continue
                rounding = FRONT_ROUNDING
            reference = self.exact if name == "float64" else Reference(self.architecture, self.weights, dtype)
            apart = distances(reference, histories[:, :PAST], histories[:, PAST:])
            if len(after_states):
                apart = np.concatenate([apart, distances_from(reference, states, after_states)])
            violations += int((~(apart <= curve + rounding)).sum())
            found[f"{name}_passed_without_rounding"] = int((apart > curve).sum())
            if name == "float64":
                self.rounding = rounding
            if name == "float64" and found["stable"]:
                told = curve > 100 * max(rounding, UNITS["float64"])
                kinds = {
                    "random": apart[:RANDOM],
                    "adversarial": apart[RANDOM : len(histories)],
                    "state": apart[len(histories) :],
                }
                for kind, rows in kinds.items():
                    share = np.where(told, rows.max(axis=0, initial=0.0) / curve, np.nan)
                    found[kind] = [None if np.isnan(share[k - 1]) or not len(rows) else share[k - 1] for k in SHOWN]
        found["violations"] = violations

    def _hold_served(self, found: Found, histories: Tokens) -> None:
        """Checks the rounding term of the served graphs against float32 runs of thousands of steps.

        Two runs of the exported `step` graph read the same tokens. One run has read other tokens (a past) before, and
        the other run starts from the zero state. After k tokens the distance of the two runs must be at most e_k (the
        certificate's bound in exact arithmetic) plus the rounding of two runs. The distance between the run with a past
        and the same run in exact arithmetic must be at most the rounding of one run. The runs read four kinds of
        tokens: one repeated token after a past of one repeated token, for every pair of tokens; cycles of two and of
        three tokens; the adversary's histories, repeated; random tokens.
        """
        size, random = self.architecture.vocabulary_size, self.generator
        past, held = (each.ravel() for each in np.meshgrid(np.arange(size), np.arange(size)))
        cycles = [
            np.resize(random.integers(size, size=length), LONG) for length in (2, 3) for _ in range(REPEATED // 2)
        ]
        climbed = [np.resize(row, LONG) for row in histories[-REPEATED:, PAST:]]
        tokens = np.concatenate(
            [
                np.repeat(held[:, None], LONG, axis=1),
                np.stack(cycles + climbed),
                random.integers(size, size=(REPEATED, LONG)),
            ]
        )
        others = random.integers(size, size=(3 * REPEATED, KEPT))
        pasts = np.concatenate([np.repeat(past[:, None], KEPT, axis=1), others])
        data = encode_weights(self.weights)
        step = build_graph("step", self.architecture, WEIGHTS, tensor_extents(data))
        diameter = head_diameter(self.exact.head)
        with opened_step(step, data) as run:
            given = histories[0].tolist()
            rounding = measure_rounding(self.architecture, self.weights, self.layers, run, diameter, given)
            certificate = certify(self.architecture, self.weights, LONG, rounding, self.layers)
            assert certificate.has_rounding, "a layer is not contractive: this is a bug"
            apart, off, rounded = self._long_runs(run, pasts, tokens, certificate)
        growth = 1.0 if certificate.readout is None else (1 + certificate.readout.gate) ** np.arange(1, LONG + 1)
        limits = np.array(certificate.state_error) * growth + rounded
        found["served_pairs"] = len(tokens)
        found["served_above"] = int((~(apart <= limits)).any(axis=1).sum())
        found["served_sequences"], found["served_of_one"] = "own", None
        if certificate.rounding is not None:
            found["served_sequences"] = "all"
            found["served_above"] = int(str(found["served_above"])) + int(
                (~(off <= certificate.rounding.carried)).sum()
            )
            found["served_of_one"] = float(off.max() / certificate.rounding.carried)
        # At these positions e_k is small, so the limit of the distance is mostly the rounding of two runs.
        left = limits <= 1.5 * rounded
        found["served_of_two"] = float((apart / rounded)[left].max()) if left.any() else None

    def _long_runs(
        self, run: Run, pasts: Tokens, tokens: Tokens, certificate: Certificate
    ) -> tuple[Floats, Floats, Floats]:
        """Returns the distance (N, T) between the `hidden` of the two float32 runs of `_hold_served` after each token,
        for the run with the past, the largest distance (N) from the same run in exact arithmetic, and the served bound
        (N, T) of the rounding of the run without the past.
        """
        rows = len(tokens)
        exact = self.exact.zero_state(rows)
        zeros: Tensors = {name: value.astype(np.float32) for name, value in exact.items()}
        full, off, apart, rounded = zeros, np.zeros(rows), [], []
        for column in pasts.T:
            outputs = run("step", {"tokens": column, **full})
            full = {name: outputs[f"next.{name}"] for name in zeros}
            hidden, exact = self.exact.advance(column, exact)
            off = np.maximum(off, np.linalg.norm(np.float64(outputs["hidden"]) - hidden, axis=1))
        both = {name: np.concatenate([full[name], zeros[name]]) for name in zeros}
        for column in tokens.T:
            outputs = run("step", {"tokens": np.tile(column, 2), **both})
            both = {name: outputs[f"next.{name}"] for name in zeros}
            ends = outputs["hidden"].astype(np.float64)
            if certificate.readout is None:
                rounded.append(np.full(rows, certificate.between_runs()))
            else:
                rounded.append(certificate.readout.between_all(outputs["norms"][rows:]))
            apart.append(np.linalg.norm(ends[:rows] - ends[rows:], axis=1))
            hidden, exact = self.exact.advance(column, exact)
            off = np.maximum(off, np.linalg.norm(ends[:rows] - hidden, axis=1))
        return np.stack(apart, axis=1), off, np.stack(rounded, axis=1)

    def _hold_windows(self, found: Found, histories: Tokens, states: State) -> None:
        """Checks the bounds of a few windows: the radius, the bounds of the changes of leads (differences between two
        logits), the proved top-1 tokens, and the bound of the total variation."""
        request = RequestBound(self.architecture, self.weights, self.layers)
        top1 = Top1(self.architecture, self.weights, request)
        counts = dict.fromkeys(("windows", "window_pairs", "proved", *OF_WINDOWS), 0)
        tightest = {"radius": 0.0, "lead": 0.0, "variation": 0.0}
        for length in WINDOWS:
            window = histories[self.generator.integers(len(histories)), -length:]
            bound = request(window[None])
            logits = self.exact.logits(bound.hidden)[0]
            first, second = np.argsort(-logits, kind="stable")[:2]
            lead = self.exact.head[first] - self.exact.head[second]
            start = histories[-PUSHED:, :PAST]
            pushed = [self.adversary.flipped(start, PAST, 1, window, aim) for aim in (None, lead)]
            pasts = np.concatenate([histories[:, :PAST], *pushed])
            ends = after(self.exact, self.exact.zero_state(len(pasts)), pasts, window)
            if states:
                ends = np.concatenate([ends, after(self.exact, states, None, window)])
            apart = ends - bound.hidden[0]
            gaps = self.exact.head[first] - np.delete(self.exact.head, first, axis=0)
            gaps = np.concatenate([gaps, self.generator.normal(size=(DIRECTIONS, self.architecture.hidden))])
            moved = top1.moved(bound, gaps, np.zeros(len(gaps), np.intp))
            seen = np.abs(apart @ gaps.T).max(axis=0)
            lengths, farthest = np.linalg.norm(gaps, axis=1), np.linalg.norm(apart, axis=1).max()
            proved = bool(top1.proved(bound)[0])
            counts["windows"] += 1
            counts["window_pairs"] += len(ends)
            counts["proved"] += proved
            counts["of_radius"] += int(not farthest <= bound.radius[0] + self.rounding)
            counts["of_lead"] += int((~(seen <= moved + lengths * self.rounding)).sum())
            counts["of_top1"] += int(proved and (self.exact.logits(ends).argmax(axis=1) != first).any())
            shares = softmax(self.exact.logits(bound.hidden[0])), softmax(self.exact.logits(ends))
            varied = float(np.abs(shares[0] - shares[1]).sum(axis=1).max()) / 2
            off = float(np.tanh(head_diameter(self.exact.head) * self.rounding / 4)) + FLOAT64
            variation = float(top1.variation(bound)[0])
            counts["of_variation"] += int(not varied <= variation + off)
            if varied > 100 * off:
                tightest["variation"] = max(tightest["variation"], varied / variation)
            if farthest > 100 * self.rounding:
                tightest["radius"] = max(tightest["radius"], float(farthest / bound.radius[0]))
                tightest["lead"] = max(tightest["lead"], float((seen / moved).max()))
        found["request"] = counts
        found["tightest"] = tightest


def softmax(logits: Floats) -> Floats:
    """Returns the probabilities (..., V) of `logits`."""
    shares: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def reachable(architecture: Architecture, layers: list[Layer]) -> dict[str, tuple[Floats, Floats]] | None:
    """Returns the smallest and the largest reachable values of each state tensor of the recurrent layers. A run that
    starts within these limits stays within them.

    Returns None for linear and relu cells, which have no such limits.
    """
    if architecture.family in ("linear", "rnn_relu"):
        return None
    boxes = {}
    for index, layer in enumerate(layers):
        for name, reach in zip(architecture.fading[index].states, layer.bound.reach, strict=True):
            box = (layer.low, layer.high) if isinstance(layer, GatedLayer) else (-reach, reach)
            if isinstance(layer, LruLayer):  # the bound is of a complex unit's modulus
                box = (-reach / np.sqrt(2), reach / np.sqrt(2))
            boxes[f"layers.{index}.{name}"] = box
    return boxes
