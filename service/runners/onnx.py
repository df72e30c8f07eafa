"""Runs a bundle's graphs on onnxruntime with states in the memory of the host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import onnxruntime

from wane.models.bundle import Bundle, BundleError
from wane.models.manifest import Role
from wane.service.runners.runner import TOP_IDS, Array, DeviceError, Feeds, Shapes, StateMemory

logger = logging.getLogger("wane.runner")

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
CUDA_DEVICE = 0

FIRST_REGION_BYTES = 64 * 2**20
"""The size in bytes of the shared arena's first allocation. Its unused pages take no memory."""

_sharing = threading.Lock()


class OnnxRunner:
    """A `Runner` of a bundle's graphs from states in the memory of the host. There is one onnxruntime inference session
    for each graph. The graphs refer to offsets in the bundle's weights file, so the runs use exactly the verified
    bytes."""

    def __init__(self, bundle: Bundle, device: Literal["auto", "cpu", "cuda"], threads: int) -> None:
        """Opens every graph of `bundle`. `threads` is the number of threads that one run uses.

        Raises DeviceError if `device` is cuda and onnxruntime cannot use CUDA. If `device` is auto, uses CUDA if it
        works, and logs a warning if the CUDA provider is installed but does not start. Raises BundleError if
        onnxruntime cannot open a graph.
        """
        with _sharing:
            _share_arena()
        available = CUDA in onnxruntime.get_available_providers()
        if device == "cuda" and not available:
            raise DeviceError(
                "device is cuda, but this onnxruntime has no CUDA provider: "
                "install onnxruntime-gpu instead of onnxruntime, or choose cpu or auto"
            )
        self._sessions: dict[Role, onnxruntime.InferenceSession] = {}
        self._outputs: dict[Role, list[str]] = {}
        wants_cuda = device != "cpu" and available
        for role in bundle.manifest.graphs:
            try:
                session = self._open(bundle, role, wants_cuda, threads)
            except Exception as error:  # onnxruntime and onnx have many kinds of errors, without a common class
                reason = str(error).partition("\n")[0]
                raise BundleError(f"{bundle.graph_path(role)}: onnxruntime cannot open the graph: {reason}") from error
            if wants_cuda and session.get_providers()[0] != CUDA:
                # onnxruntime drops a provider that fails to start. It reports the failure only on stderr.
                if device == "cuda":
                    raise DeviceError(
                        "device is cuda, but onnxruntime's CUDA provider did not start: check the driver and the "
                        "CUDA and cuDNN libraries, or choose cpu or auto"
                    )
                logger.warning("the CUDA provider is installed but did not start: running on the CPU")
                wants_cuda = False
            self._sessions[role] = session
            self._outputs[role] = [output.name for output in session.get_outputs()]
        shapes = {output.name: output.shape for output in self._sessions["step"].get_outputs()}
        self.top: int = shapes[TOP_IDS][1] if TOP_IDS in shapes else 0
        self.device = "cuda" if wants_cuda else "cpu"

    def _open(self, bundle: Bundle, role: Role, cuda: bool, threads: int) -> onnxruntime.InferenceSession:
        return open_session(bundle.graph_path(role), cuda, threads)

    def outputs(self, role: Role) -> Sequence[str]:
        return self._outputs[role]

    def close(self) -> None:
        self._sessions.clear()

    def memory(self, shapes: Shapes, capacity: int) -> StateMemory:
        return StateMemory(shapes, capacity)

    def run(self, role: Role, feeds: Feeds) -> Mapping[str, Array]:
        names = self._outputs[role]
        return dict(zip(names, self._sessions[role].run(names, dict(feeds)), strict=True))


@cache
def _share_arena() -> None:
    """Registers one memory arena for the intermediate values of all CPU graphs. onnxruntime accepts one arena per
    process.

    Without a shared arena each graph has its own arena, and the memory of an arena stays at the size of the graph's
    largest run.
    """
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    growth = onnxruntime.OrtArenaCfg({"initial_chunk_size_bytes": FIRST_REGION_BYTES})
    onnxruntime.create_and_register_allocator(place, growth)


def open_session(
    model: Path | bytes,
    cuda: bool,
    threads: int,
    weights: Path | None = None,
    cuda_options: Mapping[str, str] = MappingProxyType({}),
) -> onnxruntime.InferenceSession:
    """Opens an inference session for one graph, which is a file or the bytes of a file. weights: the folder of the
    weights file, if `model` is bytes. cuda_options: more options of onnxruntime's CUDA provider."""
    options = onnxruntime.SessionOptions()
    # A run is a chain of small matrix products. More than two threads cost more in synchronisation than they gain.
    # Parallelism comes from batching and replicas.
    options.intra_op_num_threads = threads
    # The graphs are chains, without operators that could run in parallel.
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # Idle threads sleep. Several models share the cores, and spinning threads would block cores that other models need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if not cuda:
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Allocates weights outside the arena, so that closing a graph frees them.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    # Hides warnings about graph rewrites, which matter only to the code that exports models. Errors are raised anyway.
    options.log_severity_level = 3
    # Disables TensorFloat-32. It keeps ten mantissa bits of each factor, too few for the certified agreement and
    # bounds.
    exact = {"device_id": CUDA_DEVICE, "use_tf32": "0"}
    providers: list[Any] = [(CUDA, {**exact, **cuda_options}), CPU] if cuda else [CPU]
    return onnxruntime.InferenceSession(model, options, providers=providers)
