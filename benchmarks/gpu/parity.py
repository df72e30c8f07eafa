"""Part 4: the graphs of the shipped bundles on the device, against the numpy oracle. Also counts the bytes that a step
copies between the host and the device, and checks that the states stay there. Needs onnxruntime, onnx and the bundles.
"""

from __future__ import annotations

import numpy as np
import onnxruntime

from benchmarks.gpu.copies import Copies
from benchmarks.gpu.part import Figures, Part, Skipped
from benchmarks.summary import BUNDLES
from wane.models.bundle import Bundle, BundleError, verify_graphs
from wane.service.runners.onnx_device import IN_SLOTS, DeviceRunner
from wane.service.state.pool import ZERO, StatePool

BATCH = 8


def run(part: Part) -> None:
    """Measures part 4."""
    paths = [
        path.parent
        for path in sorted(BUNDLES.glob("*/manifest.json"))
        if (path.parent / "weights.safetensors").exists()
    ]
    if not paths:
        raise Skipped("needs the shipped bundles: this copy has no weights in models/bundles")
    for path in paths[:1] if part.small else paths:
        bundle = Bundle.open(path)
        runner = DeviceRunner(bundle, part.device, threads=1)
        part.add("bundles", _parity(bundle, runner, part))
        runner.close()


def _parity(bundle: Bundle, runner: DeviceRunner, part: Part) -> Figures:
    """Returns the largest difference from the oracle, or the error that says where it is too large, and the bytes that
    a step of BATCH sessions copies."""
    found: Figures = {"model": bundle.manifest.name, "version": bundle.manifest.version, "device": runner.device}
    try:
        found["largest_difference"] = verify_graphs(bundle, lambda role, feeds: dict(runner.run(role, feeds)))
    except BundleError as error:
        found["error"] = str(error)
    hidden = bundle.manifest.architecture.hidden
    pool = StatePool(bundle.manifest.state, hidden, 2**22, runner.memory)
    slots = np.array([pool.acquire() for _ in range(BATCH)])
    states = {name: value for name, value in pool.memory.gather(slots).items() if name.startswith(IN_SLOTS)}
    found["states_on"] = sorted(
        {value.device_name() for value in states.values() if isinstance(value, onnxruntime.OrtValue)}
    )
    runner.run("step", {"tokens": np.zeros(BATCH, np.int64), **pool.memory.gather([ZERO] * BATCH)})
    with Copies() as copies:
        outputs = runner.run("step", {"tokens": np.zeros(BATCH, np.int64), **pool.memory.gather(slots)})
        pool.write(slots, outputs)
        to_device, to_host = copies.take()
    found |= {"batch": BATCH, "bytes_to_device": to_device, "bytes_to_host": to_host, "state_bytes": pool.slot_bytes}
    part.say(f"{found['model']}: {found.get('error') or format(found['largest_difference'], '.1e')}")
    return found
