"""A small model, and a fake runner that computes it. Tests can pause the runs of the runner, list the runs, and make
them fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.caches import RandomTables
from tests.models.rounding import LAYERS, rounding
from wane.models.architecture import Architecture
from wane.models.bundle_checks import TOP
from wane.models.certificate.total_variation import head_diameter, total_variation
from wane.models.layer_registry import Lstm
from wane.models.manifest import SCHEMA_VERSION, Certificate, Manifest, Provenance, Role
from wane.models.vocabulary import EOS, UNK, Vocabulary
from wane.service.batching.cost_model import CostModel
from wane.service.chunked.layout import ThroughputProfile
from wane.service.engine.engine import Engine
from wane.service.engine.forward import PIECE_TOKENS
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners.runner import (
    HIDDENS,
    LOG_SUM_EXP,
    RADIUS,
    STREAM,
    TOP_IDS,
    TOP_LOGITS,
    Array,
    Runner,
    Shapes,
    StateMemory,
)
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import Store
from wane.service.settings import Settings
from wane.service.state.pool import StatePool
from wane.service.types.answer import Answer

HIDDEN = 4
MANIFEST_FIELDS = ("window", "max_window", "certificate", "cache", "start", "unknown")
TIMEOUT_S = 120.0  # the longest time that a test waits for another thread


ROUNDING = rounding(1e-6, states=("layers.0.h", "layers.0.c"))
CONTRACTIVE = Certificate(contractive=True, reason="no curve", layers=LAYERS, rounding=ROUNDING)


def listed(answer: Answer) -> list[tuple[int, float]]:
    """Returns pairs of a predicted token and its log-probability, in the order of the answer."""
    return [(one.token_id, one.logprob) for one in answer.predictions]


def known(values: Sequence[float | None]) -> list[float]:
    """Returns the values. Fails if any value is None."""
    found = [value for value in values if value is not None]
    assert len(found) == len(values)
    return found


def host_arrays(pool: StatePool) -> dict[str, Array]:
    """Returns the arrays of a pool whose states are in the memory of the host."""
    assert type(pool.memory) is StateMemory
    return pool.memory.arrays


def byte_vocabulary() -> Vocabulary:
    """Returns a vocabulary. `<eos>` has the id 0, `<unk>` has the id 1, and a token for every byte follows."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([EOS, UNK, *characters])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary("bpe", tokenizer.to_str())


def name_vocabulary(kind: str = "events", names: Sequence[str] = ("open", "read", "close")) -> Vocabulary:
    """Returns a vocabulary. `<eos>` has the id 0, `<unk>` has the id 1, and the names follow."""
    ids = {token: index for index, token in enumerate([EOS, UNK, *names])}
    tokenizer = Tokenizer(models.WordLevel(ids, UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Vocabulary("words" if kind == "words" else "events", tokenizer.to_str())


def make_manifest(vocabulary: Vocabulary, **changes: Any) -> Manifest:
    """Returns the manifest of an LSTM. In its certificate, `contractive` is true and `certified` is false. The manifest
    lists no files."""
    architecture = Architecture(vocabulary_size=vocabulary.size, embedding=HIDDEN, layers=(Lstm(units=HIDDEN),))
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": "fake",
        "version": "1",
        "architecture": architecture,
        "vocabulary": {
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "eos_id": vocabulary.eos_id,
            "sha256": vocabulary.sha256,
        },
        "state": architecture.state_tensors(),
        "window": 4,
        "max_window": 16,
        "opset": 18,
        "graphs": {},
        "weights": "weights.safetensors",
        "tokenizer": "tokenizer.json",
        "files": {},
        "certificate": CONTRACTIVE,
        "provenance": Provenance.model_construct(),  # engines do not read the provenance
    }
    return Manifest.model_validate(fields | changes)


class FakeRunner:
    """A runner for a model with the state (c, h). For the token x it computes c' = 0.9 c + E[x], h' = tanh(c') and
    logits = W h', where E is the embedding and W is the output layer's weight. The rows of a batch are computed
    independently, so a row's result is bitwise the same in every batch.

    `calls` lists the role and the tokens of every run, row by row. A run waits while `gate` is clear. A run sets `busy`
    when it begins. A run with the token `poison` raises an error. If a row has the token `hot`, the row's state becomes
    NaN. If `radius` is not None, every run of the graph "window" outputs this radius, and the engine can search for a
    proof with the directional bound. `decay` replaces the factor 0.9. With a `decay` of 1 or more, the influence of
    earlier tokens on the state does not shrink.
    """

    device = "cpu"

    def __init__(self, vocabulary_size: int) -> None:
        random = np.random.default_rng(7)
        self.embedding = random.normal(size=(vocabulary_size, HIDDEN)).astype(np.float32)
        self.head = random.normal(size=(vocabulary_size, HIDDEN)).astype(np.float32)
        self.calls: list[tuple[Role, list[list[int]]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()
        self.poison: int | None = None
        self.hot: int | None = None
        self.radius: float | None = None
        self.puts_out_top = True
        self.puts_out_hiddens = True
        self.decay = np.float32(0.9)

    def outputs(self, role: Role) -> Sequence[str]:
        """Returns the names of the outputs of a graph."""
        if role == "step" and not self.puts_out_top:
            return ["logits", "hidden"]
        if role == "step":
            return ["logits", "hidden", TOP_LOGITS, TOP_IDS, LOG_SUM_EXP]
        if role == "scan":
            return ["logprobs", "hidden", *([HIDDENS] if self.puts_out_hiddens else [])]
        assert role == "window"
        return ["logits", "hidden"] if self.radius is None else ["logits", "hidden", RADIUS, STREAM]

    @property
    def top(self) -> int:
        return min(TOP, len(self.head)) if self.puts_out_top else 0

    def memory(self, shapes: Shapes, capacity: int) -> StateMemory:
        return StateMemory(shapes, capacity)

    def close(self) -> None:
        """Does nothing."""

    def margin(self) -> MarginProof:
        """Returns the margin proof of the output layer."""
        return MarginProof({"head.weight": self.head, "head.bias": np.zeros(len(self.head), np.float32)})

    def certificate(self, max_window: int) -> Certificate:
        """Returns the certificate of the model that this runner computes. From c' = 0.9 c + E[x] it follows by
        induction that |c| <= max|E| / (1 - 0.9). The difference of two states is multiplied by 0.9 at every token."""
        reach = np.linalg.norm(np.abs(self.embedding).max(axis=0)) / (1 - 0.9)
        state_error = 1.001 * reach * 0.9 ** np.arange(1, max_window + 1)
        diameter = head_diameter(self.head.astype(np.float64))
        error_bound = total_variation(diameter, state_error + ROUNDING.between_runs)
        return Certificate(
            contractive=True,
            certified=bool(error_bound[-1] <= 1e-3),
            reason=None if error_bound[-1] <= 1e-3 else "the bound stays too large",
            layers=LAYERS,
            state_error=tuple(state_error.tolist()),
            error_bound=tuple(error_bound.tolist()),
            head_diameter=diameter,
            rounding=ROUNDING,
        )

    async def until_busy(self) -> None:
        """Waits until a run begins. Returns immediately if a run has begun since the last call of this method."""
        assert await asyncio.to_thread(self.busy.wait, TIMEOUT_S)
        self.busy.clear()

    def roles(self) -> list[Role]:
        """Returns the roles of the runs, in the order of the runs."""
        return [role for role, _ in self.calls]

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after the runner has read `tokens` one by one from the zero state."""
        state: dict[str, Array] = {name: np.zeros((1, HIDDEN), np.float32) for name in ("layers.0.h", "layers.0.c")}
        for token in tokens:
            state = self._step(np.array([token]), state)
        logits: NDArray[np.float32] = self._logits(state["layers.0.h"])[0]
        return logits

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        tokens = feeds.get("tokens")
        lengths = feeds.get("lengths")
        rows: list[list[int]] = []
        if tokens is not None:
            columns = tokens.reshape(len(tokens), -1)
            ends = lengths if lengths is not None else np.ones(len(columns), int)
            rows = [row[:end].tolist() for row, end in zip(columns, ends, strict=True)]
        self.calls.append((role, rows))
        self.busy.set()
        assert self.gate.wait(TIMEOUT_S), "the test has not set `gate`"
        if any(self.poison in row for row in rows):
            raise RuntimeError("a poisoned token")
        if role == "head":
            return self._with_top({"logits": self._logits(feeds["hidden"])})
        assert tokens is not None
        if role == "window":
            zero = np.zeros((len(tokens), HIDDEN), np.float32)
            state = {"layers.0.h": zero, "layers.0.c": zero}
        else:
            state = {name: feeds[name] for name in ("layers.0.h", "layers.0.c")}
        outputs: dict[str, Array] = {}
        if role == "step":
            state = self._step(tokens, state)
        else:
            assert lengths is not None
            logprobs = np.zeros(tokens.shape, np.float32)
            hiddens = np.zeros((*tokens.shape, HIDDEN), np.float32)
            for time in range(tokens.shape[1]):
                stepped = self._step(tokens[:, time], state)
                alive = (time < lengths)[:, None]
                state = {name: np.where(alive, stepped[name], state[name]) for name in state}
                if role == "scan":
                    logits = self._logits(state["layers.0.h"]).astype(np.float64)
                    logits -= logits.max(1, keepdims=True)
                    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
                    wanted = logits[np.arange(len(tokens)), feeds["targets"][:, time]]
                    logprobs[:, time] = np.where(alive[:, 0], wanted, 0)
                    hiddens[:, time] = np.where(alive, state["layers.0.h"], 0)
            if role == "scan":
                outputs["logprobs"] = logprobs
                if self.puts_out_hiddens:
                    outputs[HIDDENS] = hiddens
        outputs["hidden"] = state["layers.0.h"]
        outputs |= {f"next.{name}": value for name, value in state.items()}
        if role in ("step", "window"):
            outputs["logits"] = self._logits(state["layers.0.h"])
        if role in ("step", "window"):
            outputs = self._with_top(outputs)
        if role == "window" and self.radius is not None:
            outputs[RADIUS] = np.full(len(tokens), self.radius, np.float32)
            outputs[STREAM] = np.zeros((len(tokens), HIDDEN), np.float32)
        return outputs

    def _with_top(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Returns the outputs with the largest logits added. Returns them unchanged if `puts_out_top` is false, which
        imitates graphs from an earlier version of the export."""
        if not self.puts_out_top:
            return outputs
        logits = outputs["logits"]
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP].astype(np.int64)
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
        return outputs | {
            TOP_IDS: ids,
            TOP_LOGITS: np.take_along_axis(logits, ids, 1),
            LOG_SUM_EXP: (np.log(shifted.sum(axis=1)) + logits.max(axis=1)).astype(np.float32),
        }

    def _step(self, tokens: Array, state: Mapping[str, Array]) -> dict[str, Array]:
        cell = self.decay * state["layers.0.c"] + self.embedding[tokens]
        cell[tokens == self.hot] = np.nan
        return {"layers.0.h": np.tanh(cell), "layers.0.c": cell}

    def _logits(self, hidden: Array) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = (hidden[:, None, :] * self.head[None]).sum(-1)
        return logits


class FakeProof:
    """A replacement for an engine's directional proof. Every search succeeds, with the trivial bound 1.

    `asked` counts the searches. A search waits while `gate` is clear. A search sets `busy` when it begins.
    """

    def __init__(self, engine: Engine) -> None:
        engine.answer_builder.direction = self  # type: ignore[assignment]
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()

    def search(self, *_: object) -> tuple[bool, float]:
        self.asked += 1
        self.busy.set()
        assert self.gate.wait(TIMEOUT_S), "the test has not set `gate`"
        return True, 1.0

    async def until_busy(self) -> None:
        """Waits until a search begins. Returns immediately if a search has begun since the last call of this method."""
        assert await asyncio.to_thread(self.busy.wait, TIMEOUT_S)
        self.busy.clear()


class LinearCosts(CostModel):
    """A cost model that predicts one microsecond for every token of a run."""

    def __init__(self) -> None:
        super().__init__(PIECE_TOKENS)

    def run(self, role: Role, tokens: int) -> float:
        return tokens / 1e6


class InOrder(ThroughputProfile):
    """A throughput profile without measurements. With this profile, the engine runs no sequence in parallel chunks."""

    def measure(self, runner: Runner, pool: StatePool, manifest: Manifest, max_batch_size: int) -> Iterator[None]:
        return iter(())


WIDTH = 4
"""The number of parallel chunks with `FixedProfile`."""


class FixedProfile(InOrder):
    """A throughput profile in which WIDTH parallel chunks are fastest. The residual is the difference, at the start of
    a chunk, between the chunk's state and the end state of the previous chunk. `warm_ups` maps a limit of the residual
    to the number of warm-up tokens of each chunk."""

    def __init__(self, warm_ups: Mapping[float, int]) -> None:
        super().__init__()
        self._warm_ups = warm_ups
        self._paces = {"advance": {1: 1.0, WIDTH: 0.1}, "scan": {1: 1.0, WIDTH: 0.1}}

    def warm_up(self, residual: float) -> int | None:
        return self._warm_ups.get(residual)


class Clock:
    """A clock that stands still until a test sets `now_s`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class EngineHarness:
    """A warmed-up engine with the fake runner. Tests can read the engine's store, clock, metrics and runners."""

    def __init__(
        self,
        vocabulary: Vocabulary | None = None,
        store: Store | None = None,
        certified: bool = False,
        radius: float | None = None,
        cost_model: CostModel | None = None,
        throughput: ThroughputProfile | None = None,
        puts_out_top: bool = True,
        puts_out_hiddens: bool = True,
        clock: Clock | None = None,
        tables: RandomTables | None = None,
        **changes: Any,
    ) -> None:
        """`tables` are the transition tables of the model. `changes` has settings, and fields of the manifest (see
        MANIFEST_FIELDS). `max_window` sets the manifest's field, and `settings_max_window` sets the setting
        `max_window`. If `certified` is true, the manifest has the certificate of the fake runner's model. `radius` is
        the radius that the graph "window" outputs. `cost_model` predicts the times of runs. `throughput` is the profile
        that determines the parallel chunks of long sequences. `puts_out_top` is whether the graphs output the largest
        logits. If `puts_out_top` is false, the engine processes no step in columns (arrays for a batch of one-token
        steps). `puts_out_hiddens` is whether `scan` outputs `hiddens`. `clock` is the clock of `store`."""
        self.vocabulary = vocabulary or byte_vocabulary()
        self.tables = tables
        self.clock = clock or Clock()
        self.metrics = Metrics()
        of_manifest = {name: changes.pop(name) for name in list(changes) if name in MANIFEST_FIELDS}
        of_settings = {name.removeprefix("settings_"): value for name, value in changes.items()}
        # By default, the harness allows no runs on the event loop's thread: if a test paused such a run, the event loop
        # would block.
        self.settings = Settings(
            **{
                "session_history_tokens": 16,
                "max_batch_size": 8,
                "inline_batch_max_us": 0,
                # With the default of this setting, the state pool would have room for millions of these small states.
                "state_budget_bytes": 2**22,
                **of_settings,
            }
        )
        self.runner = FakeRunner(self.vocabulary.size)
        self.runner.radius = radius
        self.runner.puts_out_top = puts_out_top
        self.runner.puts_out_hiddens = puts_out_hiddens
        self.shadow_runner = FakeRunner(self.vocabulary.size)
        self.shadow_runner.radius = radius
        if certified:
            of_manifest["certificate"] = self.runner.certificate(of_manifest.get("max_window", 16))
        self.manifest = make_manifest(self.vocabulary, **of_manifest)
        self.store = store or MemoryStore(
            self.settings.session_history_tokens,
            self.settings.session_ttl_s,
            self.settings.session_budget_bytes,
            self.clock,
        )
        self.engine = Engine(
            self.manifest,
            self.vocabulary,
            self.runner.margin(),
            self.runner,
            self.store,
            self.settings,
            self.metrics,
            self.clock,
            cost_model or LinearCosts(),
            throughput or InOrder(),
            transitions=None if tables is None else tables.transitions,
            shadow_runner=self.shadow_runner if self.settings.shadow_rate else None,
        )
        self.engine.publish()
        self.engine.warm_up()
        self.runner.calls.clear()
        self.runner.busy.clear()

    def sample(self, name: str, **labels: str) -> float:
        """Returns the value of a Prometheus metric of this engine. Returns 0 if the metric has no value yet."""
        value = self.metrics.registry.get_sample_value(name, {"model": self.engine.name, **labels})
        return 0.0 if value is None else value


MakeHarness = Callable[..., EngineHarness]
