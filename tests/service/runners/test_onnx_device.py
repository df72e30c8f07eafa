"""Tests of runs whose states stay on the device. On a machine with a GPU the tests also run on CUDA."""

from __future__ import annotations

import asyncio
import subprocess
import weakref
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from benchmarks.gpu.copies import Copies
from tests.models.bundles import export_words
from tests.models.random_models import architecture, random_weights
from tests.service.engine_harness import WIDTH, FixedProfile
from tests.service.runners.test_onnx import NoSession
from tests.service.shipped import PATHS, each_bundle, opened
from wane.models.bundle import Bundle, verify_graphs
from wane.models.manifest import Role
from wane.models.parity import log_softmax
from wane.models.reference import Reference
from wane.service.batching import batch
from wane.service.batching.batch import ColumnBatch, Row, Work
from wane.service.batching.cost_model import warm_up
from wane.service.engine.engine import Engine
from wane.service.engine.score import RESIDUAL
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners import onnx_device
from wane.service.runners.onnx import CPU, CUDA, OnnxRunner
from wane.service.runners.onnx_device import (
    GRAPH_ID,
    MOST_CAPTURES,
    PLACED,
    UNCAPTURED,
    DeviceOutputs,
    DeviceRunner,
    bucket,
    length_bucket,
    open_runner,
)
from wane.service.runners.outputs import FEW, Outputs
from wane.service.runners.runner import HIDDEN, NEXT, DeviceError, Runner, output_name
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.state.pool import RESERVED, START, ZERO, StatePool
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import PredictRequest, ScoreRequest, StepRequest

LOGPROB = 1e-4  # the tolerance of float32 log-probabilities, as in `models/parity.py`
SLOTS = 24

Device = Literal["cpu", "cuda"]


def has_gpu() -> bool:
    """Returns whether onnxruntime has the CUDA provider and the machine has a GPU."""
    if CUDA not in onnxruntime.get_available_providers():
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")
    except OSError:
        return False


on_cuda = pytest.mark.skipif(not has_gpu(), reason="no GPU, or this onnxruntime has no CUDA provider")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])


@lru_cache(maxsize=2)
def on_device(path: Path, device: Device = "cpu") -> tuple[Bundle, DeviceRunner]:
    """Returns a bundle and its runner, with padded batches. Tests share them."""
    bundle = opened(path)[0]
    return bundle, DeviceRunner(bundle, device, threads=1)


def make_pool(bundle: Bundle, runner: Runner) -> StatePool:
    manifest = bundle.manifest
    hidden = manifest.architecture.hidden
    floats = hidden + sum(int(np.prod(tensor.shape)) for tensor in manifest.state)
    return StatePool(manifest.state, hidden, 4 * SLOTS * floats, runner.memory)


def run(works: list[Work], pool: StatePool, runner: Runner) -> list[Row]:
    """Runs a batch. Fails if an item fails."""
    rows = batch.run(works, pool, runner, pool.memory.room(len(works)))
    found = [row for row in rows if isinstance(row, Row)]
    assert len(found) == len(works), rows
    return found


def random_tokens(bundle: Bundle, *shape: int, seed: int = 1) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(bundle.manifest.vocabulary.size, size=shape)


# The graphs


@each_device
@each_bundle
def test_the_graphs_agree_with_the_oracle(path: Path, device: Device) -> None:
    bundle, runner = on_device(path, device)
    verify_graphs(bundle, lambda role, feeds: dict(runner.run(role, feeds)))
    assert list(runner.outputs("step")) == list(opened(path)[1].outputs("step"))


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (65, 128)])
def test_a_bucket_is_the_next_power_of_two(rows: int, padded: int) -> None:
    assert bucket(rows) == padded


@pytest.mark.parametrize(("tokens", "padded"), [(1, 1), (7, 7), (9, 10), (16, 16), (17, 20), (64, 64), (129, 160)])
def test_a_sequence_becomes_at_most_a_quarter_longer(tokens: int, padded: int) -> None:
    assert length_bucket(tokens) == padded
    assert all(length <= length_bucket(length) <= 1.25 * length for length in range(1, 2000))


@each_device
@each_bundle
def test_slots_are_equal_to_those_of_the_host_after_runs_of_every_graph(path: Path, device: Device) -> None:
    """The comparison allows rounding differences, because the host's runner computes the same float32 products with
    another batch size."""
    bundle, there = on_device(path, device)
    here = opened(path)[1]
    tokens = random_tokens(bundle, 5, 12)
    runners: list[Runner] = [here, there]
    pools = [make_pool(bundle, runner) for runner in runners]
    found: list[list[Row]] = []
    for pool, runner in zip(pools, runners, strict=True):
        slots = [pool.acquire() for _ in range(6)]
        rows = run([Work("advance", tokens[0, :1], read=ZERO, write=START)], pool, runner)
        windows = [Work("window", tokens[row, : 4 + row], write=slots[row]) for row in range(3)]
        rows += run(windows, pool, runner)
        rows += run([Work("advance", tokens[3], read=slots[0], write=slots[3])], pool, runner)
        rows += run([Work("scan", tokens[4], tokens[3], read=slots[3], write=slots[4])], pool, runner)
        steps = [Work("step", (int(tokens[0, row]),), read=slots[row], write=slots[row]) for row in range(3)]
        rows += run([*steps, Work("step", (3,), read=START, write=None)], pool, runner)
        rows += run([Work("head", read=slots[1]), Work("head", read=slots[4])], pool, runner)
        pool.copy(slots[2], slots[5])
        found.append(rows)
    values, others = (pool.memory.read(range(SLOTS)) for pool in pools)
    for name, array in values.items():
        np.testing.assert_allclose(others[name], array, rtol=1e-4, atol=1e-4, err_msg=name)
        assert not others[name][ZERO].any() and not others[name][RESERVED + 6 :].any()
    for row, other in zip(*found, strict=True):
        assert (row.radius is None, row.trace is None) == (other.radius is None, other.trace is None)
        for name in ("logits", "logprobs", HIDDEN):
            one, two = row.output(name), other.output(name)
            assert (one is None) == (two is None) or name == HIDDEN
            if one is not None and two is not None:
                np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-4)
        if row.most:
            for count in (5, 16):
                one_top, two_top = row.largest(count), other.largest(count)
                assert one_top is not None and two_top is not None
                assert two_top.logprobs == pytest.approx(one_top.logprobs, abs=LOGPROB)
            assert other.length == pytest.approx(row.length, rel=1e-5)


def test_padding_changes_neither_an_answer_nor_a_slot() -> None:
    bundle, padded = on_device(PATHS[0])
    bare = OnnxRunner(bundle, "cpu", threads=1)
    pool, other = make_pool(bundle, padded), make_pool(bundle, bare)
    slots = np.array([pool.acquire() for _ in range(5)])
    for one in (pool, other):
        ones = {name: np.ones((SLOTS, *values.shape[1:])) for name, values in one.memory.read([ZERO]).items()}
        renamed = {name if name == HIDDEN else NEXT + name: values for name, values in ones.items()}
        one.memory.write(np.arange(SLOTS), renamed)
    tokens = random_tokens(bundle, 5)
    outputs = [
        runner.run("step", {"tokens": tokens, **one.memory.gather(slots)})
        for runner, one in ((padded, pool), (bare, other))
    ]
    for name in ("logits", "top_ids", HIDDEN):
        assert outputs[0][name].shape == outputs[1][name].shape
        np.testing.assert_allclose(outputs[0][name], outputs[1][name], rtol=1e-5, atol=1e-5)
    pool.write(slots, outputs[0])
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert all((values == 1).all() for values in pool.memory.read(untouched).values())
    assert all((values != 1).any() for values in pool.memory.read(slots).values())


def test_padded_runs_reuse_memory_that_no_result_uses() -> None:
    bundle, runner = on_device(PATHS[0])
    pool = make_pool(bundle, runner)
    tokens = random_tokens(bundle, 2, 3)

    def step(row: int) -> DeviceOutputs:
        found = runner.run("step", {"tokens": tokens[row], **pool.memory.gather([ZERO] * 3)})
        assert isinstance(found, DeviceOutputs)
        return found

    first = step(0)
    expected, part = first["logits"].copy(), first.part(np.array([1])).only(["logits"])
    second = step(1)
    addresses = [one.on_device["logits"].data_ptr() for one in (first, second)]
    assert addresses[0] != addresses[1]
    del first
    third = step(1)
    assert third.on_device["logits"].data_ptr() not in addresses, "the memory of `part` was overwritten"
    assert (part["logits"] == expected[1:2]).all()
    assert (third["logits"] == second["logits"]).all()
    del part
    assert step(0).on_device["logits"].data_ptr() == addresses[0]


@pytest.mark.parametrize("role", ["window", "advance", "scan"])
def test_sequences_are_padded_and_their_outputs_are_not(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, padded = on_device(PATHS[0])
    bare = OnnxRunner(bundle, "cpu", threads=1)
    tokens, lengths = random_tokens(bundle, 3, 9), np.array([9, 2, 5])
    seen: list[tuple[int, ...]] = []
    bind = onnxruntime.IOBinding.bind_cpu_input

    def recorded(binding: onnxruntime.IOBinding, name: str, values: NDArray[Any]) -> None:
        if name in ("tokens", "lengths", "targets", "slots"):
            seen.append(values.shape)
        bind(binding, name, values)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_cpu_input", recorded)
    found = []
    for runner in (padded, bare):
        feeds: dict[str, Any] = {"tokens": tokens, "lengths": lengths}
        if role != "window":
            feeds |= make_pool(bundle, runner).memory.gather([ZERO] * 3)
        if role == "scan":
            feeds["targets"] = tokens
        found.append(Outputs.of(runner.run(role, feeds)))
    assert set(seen) == {(4, 10), (4,)}
    for name in found[1]:
        one, other = found[0][name], found[1][name]
        assert one.shape == other.shape
        for row, length in enumerate(lengths):
            cut = (row, slice(length)) if name in PLACED else row
            np.testing.assert_allclose(one[cut], other[cut], rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(found[0].row(name, 1), one[1])
        assert (found[0].part(np.array([2, 0]))[name] == one[[2, 0]]).all()
    assert found[0].finite.all()


class ReplayingSession:
    """Stands in for a session of onnxruntime that captures CUDA graphs. A run with a new number is captured. A run with
    a known number reads and writes the memory of the captured run, whatever memory is bound to the new run."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.captured: dict[str, onnxruntime.IOBinding] = {}
        self.numbers: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions | None = None) -> None:
        number = "-1" if options is None else options.get_run_config_entry(GRAPH_ID)
        self.numbers.append(number)
        captured = binding if number == "-1" else self.captured.setdefault(number, binding)
        self._session.run_with_iobinding(captured)


def replaying(bundle: Bundle) -> tuple[DeviceRunner, dict[Role, ReplayingSession]]:
    """Returns a runner on the CPU whose sessions capture runs, and these sessions."""
    runner = DeviceRunner(bundle, "cpu", threads=1)
    sessions = {role: ReplayingSession(session) for role, session in runner._sessions.items()}
    runner._sessions.update(sessions)
    return runner, sessions


class UncapturedRunner(DeviceRunner):
    captures = False


def test_runs_that_repeat_captured_graphs_have_the_answers_and_states_of_other_runs() -> None:
    bundle = opened(PATHS[0])[0]
    captured, sessions = replaying(bundle)
    plain = UncapturedRunner(bundle, "cpu", threads=1)
    random = np.random.default_rng(4)
    answers: list[list[NDArray[Any]]] = []
    ends = []
    for runner in (captured, plain):
        random = np.random.default_rng(4)
        pool = make_pool(bundle, runner)
        slots = np.array([pool.acquire() for _ in range(8)])
        second = make_pool(bundle, runner).memory
        second.write(np.arange(8), {output_name(name): values for name, values in pool.memory.read(slots).items()})
        held: list[Outputs] = []  # results whose memory no other run may use
        found = []
        for turn in range(30):
            count = int(random.integers(1, 9))
            chosen = random.permutation(8)[:count]
            tokens = random.integers(bundle.manifest.vocabulary.size, size=count)
            memory, places = (second, chosen) if turn % 3 == 2 else (pool.memory, slots[chosen])
            outputs = runner.run("step", {"tokens": tokens, **memory.gather(places)})
            memory.write(places, outputs)
            heads = runner.run("head", memory.gather_hidden(places))
            found += [outputs["logits"], heads["logits"], outputs[HIDDEN]]
            held = [*held, outputs][-(turn % 4) :] if turn % 4 else []
        found += [outputs["logits"] for outputs in held]
        answers.append(found)
        ends.append(list(pool.memory.read(slots).values()) + list(second.read(range(8)).values()))
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)
    step = sessions["step"]
    assert len(step.numbers) == 30 and "-1" not in step.numbers
    assert 8 <= len(step.captured) <= 24, "four sizes, two memories, and one to three buffers of each"
    sizes = {number: binding.get_outputs()[0].shape()[0] for number, binding in step.captured.items()}
    assert set(sizes.values()) == {1, 2, 4, 8}


def test_only_a_bounded_number_of_runs_is_captured_and_no_loop() -> None:
    bundle = opened(PATHS[0])[0]
    runner, sessions = replaying(bundle)
    pool = make_pool(bundle, runner)
    shapes = {name: values.shape[1:] for name, values in pool.memory.read([ZERO]).items()}
    memories = [runner.memory(shapes, 2) for _ in range(MOST_CAPTURES + 3)]
    for memory in memories:
        runner.run("step", {"tokens": np.array([3]), **memory.gather([0])})
    assert sessions["step"].numbers == [*map(str, range(1, MOST_CAPTURES + 1)), "-1", "-1", "-1"]
    runner.run("step", {"tokens": np.array([3]), **memories[5].gather([1])})
    assert sessions["step"].numbers[-1] == "6", "the other slot of a memory repeats its graph"
    run([Work("advance", random_tokens(bundle, 4), read=ZERO, write=START)], pool, runner)
    run([Work("window", random_tokens(bundle, 4))], pool, runner)
    assert sessions["advance"].numbers == sessions["window"].numbers == ["-1"]


def test_a_graph_that_cannot_be_captured_runs_without_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """onnxruntime opens a session on the CPU if it refuses to capture a graph."""
    opened_with: list[tuple[bool, str]] = []

    class Refusing(NoSession):
        def __init__(self, path: Path, options: object, providers: list[Any]) -> None:
            (name, chosen), _ = providers
            self._provider = CPU if "enable_cuda_graph" in chosen else name
            opened_with.append(("enable_cuda_graph" in chosen, chosen["use_tf32"]))

        def get_providers(self) -> list[str]:
            return [self._provider]

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Refusing)
    runner = DeviceRunner(Bundle.read(PATHS[0]), "cuda", threads=1)
    assert runner.device == "cuda"
    assert opened_with.count((True, "0")) == 2, "step and head"
    assert opened_with.count((False, "0")) == 5 + 2, "every graph, and the two that take rows"
    assert "runs without CUDA graphs" in caplog.text
    assert next(runner._numbers["step"]) == UNCAPTURED


def test_the_inputs_of_a_padded_batch_have_equal_lengths() -> None:
    bundle, runner = on_device(PATHS[0])
    with pytest.raises(ValueError, match="slots has 2 items, but the batch has 3"):
        runner.run("step", {"tokens": np.arange(3), **make_pool(bundle, runner).memory.gather([ZERO] * 2)})


def test_a_closed_model_s_memory_is_freed_while_a_result_is_held() -> None:
    bundle = opened(PATHS[0])[0]
    runner = DeviceRunner(bundle, "cpu", threads=1)
    pool = make_pool(bundle, runner)
    (row,) = run([Work("step", (3,), read=ZERO)], pool, runner)
    kept = [
        weakref.ref(value) for value in pool.memory.gather([ZERO]).values() if isinstance(value, onnxruntime.OrtValue)
    ]
    sessions = [weakref.ref(session) for session in runner._sessions.values()]
    assert kept and sessions
    pool.memory.close()
    assert [value() for value in kept] == [None] * len(kept)
    runner.close()
    assert [session() for session in sessions] == [None] * len(sessions)
    assert row.largest(16) is not None


def test_a_row_with_a_state_that_is_not_finite_fails_alone() -> None:
    bundle, runner = on_device(PATHS[0])
    pool = make_pool(bundle, runner)
    slots = [pool.acquire() for _ in range(3)]
    poison = {
        name if name == HIDDEN else NEXT + name: values + np.nan for name, values in pool.memory.read([ZERO]).items()
    }
    pool.write(np.array([slots[1]]), poison)
    rows = batch.run([Work("step", (3,), read=slot) for slot in slots], pool, runner)
    assert [type(row) for row in rows] == [Row, FloatingPointError, Row]


def test_a_part_of_a_batch_writes_and_answers_its_own_rows() -> None:
    bundle, runner = on_device(PATHS[0])
    pool = make_pool(bundle, runner)
    slots = np.array([pool.acquire() for _ in range(3)])
    columns = ColumnBatch(slots, random_tokens(bundle, 3), np.zeros(3))
    batch.run_columns(columns, pool, runner, pool.memory.room(3))
    assert columns.failure is None
    whole = {name: columns.outputs[name] for name in ("logits", "top_ids", HIDDEN)}
    part = columns.outputs.part(np.array([False, True, True]))
    for name, values in whole.items():
        assert (part[name] == values[1:]).all()
        assert (part.row(name, 1) == values[2]).all()
    assert (part.lengths == columns.outputs.lengths[1:]).all()
    assert (part.top(2).ids == whole["top_ids"][1:, :2]).all()
    pool.write(slots[1:], part)
    assert (
        pool.memory.read(slots)[HIDDEN] == np.concatenate([np.zeros_like(whole[HIDDEN][:1]), whole[HIDDEN][1:]])
    ).all()


def test_a_packed_state_is_unpacked_in_the_memory_of_the_other_kind() -> None:
    bundle, there = on_device(PATHS[0])
    here = opened(PATHS[0])[1]
    pool, other = make_pool(bundle, there), make_pool(bundle, here)
    slot, to = pool.acquire(), other.acquire()
    run([Work("window", random_tokens(bundle, 9), write=slot)], pool, there)
    packed = pool.pack(slot)
    other.unpack(to, packed)
    assert other.pack(to) == packed
    back = pool.acquire()
    pool.unpack(back, packed)
    assert pool.pack(back) == packed
    pool.check_integrity()


def test_the_device_path_serves_cuda_and_the_host_path_serves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = opened(PATHS[0])[0]
    assert type(open_runner(bundle, "cpu", 1)) is OnnxRunner
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    assert type(open_runner(bundle, "auto", 1)) is OnnxRunner
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", NoSession)
    assert type(open_runner(bundle, "auto", 1)) is OnnxRunner  # falls back to the CPU, because CUDA does not start
    with pytest.raises(DeviceError, match="did not start"):
        open_runner(bundle, "cuda", 1)
    monkeypatch.setattr(onnx_device, "find_spec", lambda _: None)
    with pytest.raises(DeviceError, match="need the package onnx"):
        open_runner(bundle, "auto", 1)


@on_cuda
def test_the_service_keeps_states_on_the_gpu() -> None:
    runner = open_runner(opened(PATHS[0])[0], "cuda", 1)
    assert (type(runner), runner.device) == (DeviceRunner, "cuda")


# The engine


MakeEngine = Callable[[Bundle, DeviceRunner], Engine]


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    engines: list[Engine] = []

    def make(bundle: Bundle, runner: DeviceRunner) -> Engine:
        settings = Settings(max_batch_size=8, state_budget_bytes=2**20, inline_batch_max_us=0)
        store = MemoryStore(4096, settings.session_ttl_s, settings.session_budget_bytes)
        margin = MarginProof(bundle.weights())
        profile = FixedProfile({RESIDUAL: 128})
        engine = Engine(
            bundle.manifest, bundle.vocabulary, margin, runner, store, settings, Metrics(), throughput=profile
        )
        warm_up(runner, engine.state_cache, bundle.manifest, max_batch_size=8)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.drain()


def check(answer: Answer, expected: NDArray[np.float64]) -> None:
    """Compares an answer with the oracle's log-probabilities (V)."""
    found = {one.token_id: one.logprob for one in answer.predictions}
    assert found == pytest.approx({token: expected[token] for token in found}, abs=LOGPROB)
    assert max(found.values()) == pytest.approx(expected.max(), abs=LOGPROB)


@each_device
@each_bundle
async def test_answers_agree_with_the_oracle(path: Path, device: Device, make_engine: MakeEngine) -> None:
    bundle, runner = on_device(path, device)
    engine = make_engine(bundle, runner)
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    tokens = random_tokens(bundle, 3, 10, seed=2)
    sessions = [(await engine.create_session(mode=Mode.RECURRENT)).session for _ in tokens]
    start = np.full(len(tokens), bundle.vocabulary.eos_id)
    expected, _, state = reference.step(start, reference.zero_state(len(tokens)))
    every = [log_softmax(expected)]
    for column in tokens.T:
        expected, _, state = reference.step(column, state)
        every.append(log_softmax(expected))
    for found in every:  # a session's end is never listed
        found[:, list(bundle.vocabulary.unlisted)] = -np.inf

    async def step(session: str, *new: int) -> Answer:
        return await engine.submit(StepRequest(session, new))

    for index, column in enumerate(tokens.T[:6], 1):
        answers = await asyncio.gather(*[step(*one) for one in zip(sessions, column.tolist(), strict=True)])
        for answer, row in zip(answers, every[index], strict=True):
            check(answer, row)
            assert answer.state is StateSource.RESIDENT
    engine.state_cache.check_integrity(idle=True)
    engine.state_cache.drop(sessions[0])
    answer = await step(sessions[0], int(tokens[0, 6]))
    check(answer, every[7][0])
    assert answer.state is StateSource.REBUILT
    check(await step(sessions[1], *tokens[1, 6:].tolist()), every[10][1])
    for mode, window in ((Mode.WINDOW, 64), (Mode.RECURRENT, None)):
        answer = await engine.submit(PredictRequest(tuple(tokens[2].tolist()), mode=mode, window=window, top_k=20))
        check(answer, every[10][2])
    score = await engine.score(ScoreRequest(tuple(tokens[2].tolist())))
    wanted = [every[index][2, token] for index, token in enumerate(tokens[2].tolist())]
    assert list(score.logprobs) == pytest.approx(wanted, abs=LOGPROB)
    long = random_tokens(bundle, 1100, seed=3)
    score = await engine.score(ScoreRequest(tuple(long.tolist()), method=ScoreMethod.PARALLEL, cache=False))
    assert score.chunks == WIDTH
    state, wanted = reference.zero_state(1), []
    for before, token in pairwise([bundle.vocabulary.eos_id, *long.tolist()]):
        expected, _, state = reference.step(np.array([before]), state)
        wanted.append(log_softmax(expected)[0, token])
    # The states at the chunks' boundaries differ by up to RESIDUAL, which changes log-probabilities a little more.
    assert list(score.logprobs) == pytest.approx(wanted, abs=10 * LOGPROB)
    engine.state_cache.check_integrity(idle=True)


# Bytes between the host and the device


def random_bundle(path: Path, hidden: int) -> Bundle:
    """Makes a bundle of a model with random weights. `hidden` is the number of units in each layer."""
    model = architecture("lstm", layers=2, hidden=hidden, embedding=hidden)
    export_words(path, model, random_weights(model, seed=1))
    return Bundle.open(path)


def test_only_the_requested_number_of_largest_logits_is_copied() -> None:
    bundle, runner = on_device(PATHS[0])
    pool = make_pool(bundle, runner)
    tokens = random_tokens(bundle, 3)
    outputs = Outputs.of(runner.run("step", {"tokens": tokens, **pool.memory.gather([ZERO] * 3)}))
    with Copies() as copies:
        outputs.largest(1, 5)
        copies.take()
        found = outputs.largest(1, 9)  # copied for all rows at once, because the other rows probably need them, too
        assert copies.take() == (3 * 8 + 8, 3 * 9 * (4 + 8))
    assert found is not None and found.ids == outputs["top_ids"][1, :9].tolist()


async def test_steps_with_a_cache_copy_logits_but_no_states(make_engine: MakeEngine) -> None:
    path = next(path for path in PATHS if opened(path)[0].manifest.cache is not None)
    bundle, runner = on_device(path)
    engine = make_engine(bundle, runner)
    sessions = [(await engine.create_session(mode=Mode.RECURRENT)).session for _ in range(5)]
    for _ in range(2):
        with Copies() as copies:
            await asyncio.gather(*[engine.submit(StepRequest(session, (3,))) for session in sessions])
        to_device, to_host = copies.take()
    # Tokens, slots and the summary are those of the padded batch of eight. The commit and the logits are of five rows.
    vocabulary, most = bundle.vocabulary.size, runner.top
    indexes = 2 * 5 * 8  # of the rows whose logits and ids are copied, and the number of ids
    of_norms = 5 * 8  # the indexes of the rows of `norms`
    assert to_device == 8 * 16 + 5 * 16 + indexes + of_norms + 8
    assert to_host == 8 * (16 + FEW * (4 + 8)) + 5 * (
        4 * vocabulary + (4 + 8) * most + 4 * bundle.manifest.architecture.norm_columns
    )


async def test_the_copied_bytes_do_not_depend_on_the_size_of_the_states(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    counted: list[dict[str, tuple[int, int]]] = []
    for hidden in (8, 72):
        bundle = random_bundle(tmp_path / str(hidden), hidden)
        engine = make_engine(bundle, DeviceRunner(bundle, "cpu", threads=1))
        session = (await engine.create_session(mode=Mode.RECURRENT)).session
        await engine.submit(StepRequest(session, (3,)))
        found: dict[str, tuple[int, int]] = {}
        with Copies() as copies:
            await engine.submit(StepRequest(session, (3,)))
            found["step"] = copies.take()
            await engine.submit(StepRequest(session, (3, 4, 5)))
            found["step of three tokens"] = copies.take()
            engine.state_cache.drop(session)
            await engine.submit(StepRequest(session, (3,)))
            found["rebuilt session"] = copies.take()
            await engine.submit(PredictRequest((3, 4, 5), mode=Mode.WINDOW))
            found["window"] = copies.take()
            await engine.score(ScoreRequest((3, 4, 5, 6)))
            found["scan"] = copies.take()
            await engine.submit(PredictRequest(session=session))
            found["head"] = copies.take()
            score = await engine.score(ScoreRequest((3, 4, 5, 6) * 300, method=ScoreMethod.PARALLEL))
            assert (score.chunks, score.rounds) == (WIDTH, 1)
            to_device, to_host = copies.take()
            # The states before and after each run of 16 tokens are copied, one more for the shapes, and the last one
            # is written back.
            slot_bytes = engine.state_cache.slot_bytes
            found["parallel chunks"] = to_device - slot_bytes, to_host - (2 * 1200 // 16 + 1) * slot_bytes
            slot = engine.state_cache.slot_of(session)
            assert slot is not None
            assert len(engine.state_cache.pack(slot)) == engine.state_cache.slot_bytes
            assert copies.take() == (8, engine.state_cache.slot_bytes)
        counted.append(found)
    assert counted[0] == counted[1]
    few = FEW * (4 + 8)
    assert counted[0]["step"] == (4 * 8, few + 4 + 4 + 8)
