"""Part 5: steps of sessions whose states stay on the device. Needs onnxruntime and onnx; without them only torch is
measured, which needs pydantic for the network's architecture.

A step reads the states of a batch from slots, computes the next states, the logits and their largest, and writes the
states to the slots. `runner` is the service's `DeviceRunner`, with and without CUDA graphs. Its time is that of the
call on the host, which ends when the largest logits are in the host's memory. `torch` is a torch network with the same
weights, which keeps the states on the device and copies the ids of the largest logits, with and without a CUDA graph.
`device_s` is the time of a step's kernels and copies on the device, from torch's profiler.

The roofline is the larger of two times: the products at the measured rate of part 1, and the bytes of weights, states
and logits at the measured bandwidth.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.chip import roofline, tf32
from benchmarks.gpu.part import Figures, Part, spread
from wane.models.architecture import Architecture
from wane.models.layer_registry import Convolution, Gated, Lstm
from wane.models.networks import Network

VOCABULARY = 256
REPEATS, WARM = 20, 3
BYTES = {"bf16": 2, "tf32": 4, "float32": 4}
BATCHES = (1, 16, 256, 1024, 4096, 8192, 16384)


def lstm(hidden: int) -> Architecture:
    """Returns one LSTM layer of `hidden` units, as in `benchmarks/bench/lstm256.py`."""
    return Architecture(vocabulary_size=VOCABULARY, embedding=hidden, layers=(Lstm(units=hidden),), tied=False)


MODELS = {
    "lstm-1024": lstm(1024),
    "lstm-256": lstm(256),
    "gated-stable": Architecture(  # that of training/experiments/gated-stable.toml
        vocabulary_size=2048,
        embedding=256,
        layers=(
            *(Convolution(units=256, block="front", kernel_size=4, feed_forward=192),) * 2,
            Gated(units=576, block="residual", feed_forward=416, gate_cap=0.95),
        ),
        norm_epsilon=1e-2,
    ),
    "lstm-2048": lstm(2048),
    "lstm-32": lstm(32),
}
"""The measured models, with random weights."""

PLAN: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("lstm-1024", (8192,)),
    ("lstm-256", (1,)),
    ("gated-stable", (1,)),
    *((name, BATCHES) for name in ("lstm-1024", "lstm-256", "lstm-2048")),
)
"""What is measured, in the order of its value."""

REHEARSED: tuple[tuple[str, tuple[int, ...]], ...] = (("lstm-32", (1, 16)), ("gated-stable", (1,)))


class Measured(NamedTuple):
    """seconds: the duration of each step on the host. device_s: the time on the device, None on a CPU."""

    seconds: list[float]
    device_s: float | None


Measure = Callable[[int], Measured]
"""Measures steps of a batch of the given size."""


def bound_s(network: Network, batch: int, form: str, limits: Figures) -> float:
    """Returns the shortest possible time of a step in seconds. The product of the embedding and the LSTM's input matrix
    is a table, made once."""
    table = {"embedding.weight"} | ({"layers.0.cell.weight_ih_l0"} if network.architecture.family == "lstm" else set())
    matrices = {name: tensor for name, tensor in network.named_parameters() if tensor.ndim == 2}
    if network.architecture.tied:
        matrices["head.weight"] = matrices["embedding.weight"]
    numbers = sum(tensor.numel() for name, tensor in matrices.items() if name not in table)
    states = sum(int(np.prod(tensor.shape)) for tensor in network.architecture.state_tensors())
    moved = BYTES[form] * numbers + 4 * batch * (2 * states + network.architecture.vocabulary_size)
    return float(max(2 * batch * numbers / limits["rates"][form], moved / limits["bytes_per_s"]))


def device_s(device: str, step: Callable[[], object]) -> float | None:
    """Returns the time of a step's kernels and copies on the device in seconds, on average; None on a CPU."""
    if device == "cpu":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEATS):
            step()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in found.key_averages())) / 1e6 / REPEATS


def measured(device: str, step: Callable[[], object]) -> Measured:
    """Measures a step that ends when its results are in the host's memory."""
    taken = []
    for index in range(REPEATS + WARM):
        begun = time.perf_counter()
        step()
        if index >= WARM:
            taken.append(time.perf_counter() - begun)
    return Measured(taken, device_s(device, step))


def run(part: Part) -> None:
    """Measures part 5."""
    has_runner = find_spec("onnxruntime") is not None and find_spec("onnx") is not None
    part.keep(roofline=roofline(part), steps=[])
    if not has_runner:
        part.keep(missing="onnxruntime and onnx: only torch was measured")
    done = set[tuple[str, int]]()
    for model, batches in REHEARSED if part.small else PLAN:
        torch.manual_seed(0)
        network = Network(MODELS[model]).eval().requires_grad_(False)
        wanted = [batch for batch in batches if (model, batch) not in done]
        for form in BYTES:
            for name, opened in _ways(network, form, part, has_runner):
                with ExitStack() as stack:
                    measure = stack.enter_context(opened)
                    for batch in wanted:
                        if part.left_s < 3:
                            part.keep(stopped="the time")
                            return
                        figures = {"model": model, "way": name, "batch": batch, "format": form}
                        part.add("steps", figures | _one(network, measure, batch, form, part.record["roofline"]))
        done |= {(model, batch) for batch in wanted}
        part.say(f"{model}, batches {', '.join(f'{batch:,}' for batch in wanted)}")


def _one(network: Network, measure: Measure, batch: int, form: str, limits: Figures) -> Figures:
    """Returns the figures of one way and one size, or the error of a way that this device or version cannot run."""
    try:
        found = measure(batch)
    except Exception as error:  # onnxruntime's classes of errors have no common base
        return {"error": str(error).strip().splitlines()[0][:300]}
    bound, taken = bound_s(network, batch, form, limits), spread(found.seconds)
    return {"seconds": taken, "device_s": found.device_s, "bound_s": bound, "share": bound / taken["median"]}


Ways = Iterator[tuple[str, Any]]


def _ways(network: Network, form: str, part: Part, has_runner: bool) -> Ways:
    """Yields the name of each way to run a step, and a context manager of its `Measure`."""
    for captured in (True, False) if has_runner else ():
        yield f"runner{', CUDA graphs' if captured else ''}", _runner(network, form, part, captured)
    for captured in (True, False) if part.device == "cuda" else (False,):
        yield f"torch{', CUDA graph' if captured else ''}", nullcontext(_torch(network, form, part, captured))


@contextmanager
def _runner(network: Network, form: str, part: Part, captured: bool) -> Iterator[Measure]:
    """Opens the service's runner on the step's graph alone. An error of onnxruntime is raised by the measurement."""
    from benchmarks.gpu.precision import in_bf16
    from wane.models.export.roles import build_graph
    from wane.models.weights import encode_weights, tensor_extents
    from wane.service.runners.onnx_device import DeviceRunner
    from wane.service.runners.runner import HIDDEN

    class Runner(DeviceRunner):
        cuda_options: Mapping[str, str] = {"use_tf32": "1"} if form == "tf32" else {}
        captures = captured

        def _graph(self, bundle: Any, role: Any) -> bytes:
            graph = super()._graph(bundle, role)
            return in_bf16(graph) if form == "bf16" else graph

    model, opened = network.architecture, list[DeviceRunner]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = encode_weights({key: value.cpu().numpy() for key, value in network.weights().items()})
        (folder / "weights.safetensors").write_bytes(data)
        graph = build_graph("step", model, "weights.safetensors", tensor_extents(data), None, "float32")
        (folder / "step.onnx").write_bytes(graph)
        graphs = {"step": "step.onnx"}
        manifest = SimpleNamespace(graphs=graphs, state=model.state_tensors(), name=model.family, imported=False)
        bundle = cast("Any", SimpleNamespace(manifest=manifest, path=folder, graph_path=lambda _: folder / "step.onnx"))
        shapes = {tensor.name: tensor.shape for tensor in manifest.state} | {HIDDEN: (model.hidden,)}

        def measure(batch: int) -> Measured:
            if not opened:
                opened.append(Runner(bundle, part.device, 1))
            memory = opened[0].memory(shapes, batch)
            slots = np.random.default_rng(0).permutation(batch)
            tokens = np.random.default_rng(1).integers(model.vocabulary_size, size=batch)

            def step() -> None:
                memory.write(slots, opened[0].run("step", {"tokens": tokens, **memory.gather(slots)}))

            try:
                return measured(part.device, step)
            finally:
                memory.close()

        try:
            yield measure
        finally:
            for runner in opened:
                runner.close()


def _torch(network: Network, form: str, part: Part, captured: bool) -> Measure:
    """Returns the function that measures a step in torch."""
    device = part.device

    @torch.no_grad()
    def measure(batch: int) -> Measured:
        network.to(device)
        states = [torch.zeros(batch, *tensor.shape, device=device) for tensor in network.architecture.state_tensors()]
        tokens = torch.randint(network.architecture.vocabulary_size, (1, batch), device=device)
        slots = torch.randperm(batch, device=device)
        ids = torch.empty(batch, 16, dtype=torch.int64, device=device)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16) if form == "bf16" else nullcontext():
                hidden, after = network(tokens, [state[slots] for state in states])
                logits = network.logits(hidden[0]).float()
            ids.copy_(logits.topk(16).indices)
            for state, new in zip(states, after, strict=True):
                state[slots] = new.to(state.dtype)

        with tf32(form == "tf32"):
            replay: Callable[[], object] = step
            if captured:
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    for _ in range(WARM):
                        step()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                replay = graph.replay

            def whole() -> None:
                replay()
                ids.cpu()

            found = measured(device, whole)
        network.cpu()
        return found

    return measure
