"""Small models of every kind of recurrent cell, with their certificates. The numpy oracle runs the models, so no model
needs graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.models.random_models import architecture, random_weights
from tests.models.rounding import rounding
from tests.service.engine_harness import InOrder, make_manifest, name_vocabulary
from wane.models.architecture import Architecture
from wane.models.certificate import certify
from wane.models.certificate.admissible import has_readout
from wane.models.certificate.request import RequestBound
from wane.models.layer_registry import Kind
from wane.models.manifest import Manifest, Role
from wane.models.reference import Reference, State
from wane.models.vocabulary import Vocabulary
from wane.models.weights import head_weight
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import DirectionProof, MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners.runner import ERROR, EVERY_NORMS, NEXT, NORMS, RADIUS, STREAM, Array, Shapes, StateMemory
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings

# The certificates claim two limits for rounding errors. ROUNDING is the limit of the distance between the hidden
# vectors of two runs. OF_STATES is the limit of the error of a state. The real rounding errors are smaller: the runner
# rounds the oracle's states and outputs to float32, the values are of order 10, and the relative rounding error is
# about 1e-7, so the rounding error is about 1e-6.
ROUNDING, OF_STATES = 2e-5, 1e-5
NAMES = tuple("abcdefghi")


class OracleRunner:
    """A runner that computes the outputs of the graphs with the numpy oracle. If `beside` is true, the graph "window"
    also outputs the radius, which bounds the error of `hidden`. For gated cells, this graph then also outputs the first
    layer's input and the error bounds of the states."""

    device = "cpu"
    top = 0

    def __init__(self, architecture: Architecture, weights: Mapping[str, NDArray[np.float32]], beside: bool) -> None:
        self._reference = Reference(architecture, weights)
        self._radius = RequestBound(architecture, weights) if beside else None
        self._gated = architecture.fading[-1].input_gated
        self._weights = weights
        self._has_readout = has_readout(architecture)
        self._names = [tensor.name for tensor in architecture.state_tensors()]

    def outputs(self, role: Role) -> Sequence[str]:
        """Returns the names of the outputs of a graph. The graph "step" does not output the largest logits."""
        if role == "step":
            return ["logits", "hidden", *([NORMS] if self._has_readout else [])]
        if role == "scan":
            return ["logprobs", "hidden"]
        assert role == "window"
        names = ["logits", "hidden"]
        if self._radius is not None:
            names += [RADIUS, STREAM] if self._gated else [RADIUS]
        return names

    def memory(self, shapes: Shapes, capacity: int) -> StateMemory:
        return StateMemory(shapes, capacity)

    def close(self) -> None:
        """Does nothing."""

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if role == "head":
            return {"logits": _float32(self._reference.logits(feeds["hidden"].astype(np.float64)))}
        batch = range(len(feeds["tokens"]))
        rows = [self._row(role, {name: value[row] for name, value in feeds.items()}) for row in batch]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        tokens = feeds["tokens"].reshape(-1)[: feeds.get("lengths", 1)]
        state: Mapping[str, NDArray[np.floating]] = self._reference.zero_state(1)
        if role != "window":
            state = {name: feeds[name][None] for name in self._names}
        logprobs, norms = np.zeros(feeds["tokens"].size, np.float32), list[Array]()
        for index, token in enumerate(tokens):
            stream, _ = self._reference.stream(np.array([token]), state)
            hidden, after = self._reference.advance(np.array([token]), state)
            state = {name: _float32(value) for name, value in after.items()}
            if role == "scan":
                logits = self._reference.logits(hidden)[0]
                logprobs[index] = logits[feeds["targets"][index]] - np.logaddexp.reduce(logits)
                norms += [self._norms(stream, after[self._names[-1]])] if self._has_readout else []
        outputs = {"hidden": _float32(hidden[0]), "logits": _float32(self._reference.logits(hidden)[0])}
        outputs |= {NEXT + name: value[0] for name, value in state.items()}
        if self._has_readout:
            outputs[NORMS] = self._norms(stream, after[self._names[-1]])
        if role == "window" and self._radius is not None:
            bound = self._radius(tokens[None])
            readout, apart = self._radius.readout, self._radius.states_apart
            # The graphs include the rounding in the bounds of the errors. This sum is close enough for these tests.
            off = 0.0 if readout is None else readout.between(outputs[NORMS].tolist())
            outputs[RADIUS] = np.nextafter(np.float32(bound.radius[0] + off), np.float32(np.inf))
            if self._gated:
                outputs[STREAM] = _float32(bound.stream[0])
                for name, step in zip(self._names[-len(bound.steps) :], bound.steps, strict=True):
                    box = step.error[0].box[0] + (0.0 if apart is None else apart)
                    outputs[ERROR + name] = np.nextafter(_float32(box), np.float32(np.inf))
        if role == "scan":
            outputs["logprobs"] = logprobs
            if norms:
                outputs[EVERY_NORMS] = np.stack([*norms, *[norms[-1]] * (len(logprobs) - len(norms))])
        return outputs

    def _norms(self, stream: NDArray[np.float64], state: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns the output `norms` of one row. stream: (1, H). state: (1, units)."""
        x = stream + state @ self._weights["layers.0.mix.weight"].T
        epsilon = self._reference.architecture.norm_epsilon
        found = [x.mean(), 1 / np.sqrt(x.var() + epsilon)]
        if self._reference.architecture.fading[0].feed_forward:
            x = self._reference._above_cell(self._reference.architecture.placed(finite=False)[0], stream, state)
            found.append(1 / np.sqrt(x.var() + epsilon))
        return _float32(np.array(found))


class Small:
    """A model with eleven tokens and six units, its engine, and the predictions of the full-history model. The
    full-history model is the numpy reference with the same weights. It reads all tokens of a session, starting from the
    zero state."""

    def __init__(
        self,
        cell: Kind,
        block: str,
        layers: int,
        seed: int,
        recurrent: float,
        *,
        beside: bool,
        keep: int = 24,
        kind: str = "words",
        **fields: object,
    ) -> None:
        """`kind` is the kind of the vocabulary. `keep` is the largest window, and also the number of tokens that the
        store keeps for a session. `fields` has further fields of the architecture. `beside`: see OracleRunner."""
        self.architecture = architecture(cell, block, layers, **fields)
        self.weights = random_weights(self.architecture, seed, recurrent=recurrent, driven=0.5)
        self.vocabulary: Vocabulary = name_vocabulary(kind, NAMES)
        states = [tensor.name for tensor in self.architecture.state_tensors() if tensor.name.startswith("layers.")]
        of_runs = rounding(ROUNDING, states=states, state=OF_STATES)
        self.manifest: Manifest = make_manifest(
            self.vocabulary,
            architecture=self.architecture,
            state=self.architecture.state_tensors(),
            window=8,
            max_window=keep,
            certificate=certify(self.architecture, self.weights, keep, of_runs),
        )
        # With the default budget, the state pool would have room for millions of these small states.
        self.settings = Settings(session_history_tokens=keep, max_batch_size=4, state_budget_bytes=2**22)
        self.reference = Reference(self.architecture, self.weights)
        self._past: list[tuple[int, NDArray[np.float64], State]] = []
        margin, runner = MarginProof(self.weights), OracleRunner(self.architecture, self.weights, beside)
        self.engine = Engine(
            self.manifest,
            self.vocabulary,
            margin,
            runner,
            MemoryStore(keep, 3600, 2**20),
            self.settings,
            Metrics(),
            throughput=InOrder(),
            direction=DirectionProof.of(
                self.manifest, self.weights, lambda: RequestBound(self.architecture, self.weights), margin, runner
            ),
        )
        self.engine.warm_up()

    @property
    def head(self) -> NDArray[np.float32]:
        """The output layer's weight (V, H)."""
        return head_weight(self.weights)

    def uninterrupted(self, tokens: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the distribution (V) and the hidden vector (H) of the full-history model after `tokens`, in
        float64."""
        input_ids = [self.vocabulary.eos_id, *tokens]
        while self._past and [token for token, _, _ in self._past] != input_ids[: len(self._past)]:
            self._past.pop()
        for token in input_ids[len(self._past) :]:
            state = self._past[-1][2] if self._past else self.reference.zero_state(1)
            self._past.append((token, *self.reference.advance(np.array([token]), state)))
        hidden = self._past[-1][1]
        logits = self.reference.logits(hidden)[0]
        weights = np.exp(logits - logits.max())
        return weights / weights.sum(), hidden[0]


def _float32(values: NDArray[np.floating]) -> NDArray[np.float32]:
    rounded: NDArray[np.float32] = values.astype(np.float32)
    return rounded
