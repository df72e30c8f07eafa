"""Part 1: the chip, its driver, the versions, the bandwidth of copies and the rates of matrix products. Needs torch."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.part import Device, Figures, Part, spread, timed

FORMATS = ("float32", "tf32", "bf16")
"""The number formats of products. `tf32` stores float32 and multiplies with ten mantissa bits."""

QUERY = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime_gpu", "pydantic", "fastapi", "tokenizers")


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32 in torch's products and in cuDNN."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def describe(device: Device) -> Figures:
    """Returns the names and the versions of the machine."""
    found: Figures = {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {},
    }
    from importlib import metadata

    for name in PACKAGES:
        try:
            found["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["packages"][name] = None
    if device == "cuda":
        chip = torch.cuda.get_device_properties(0)
        found |= {
            "chip": chip.name,
            "memory_bytes": chip.total_memory,
            "multiprocessors": chip.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
        }
        if shutil.which("nvidia-smi"):
            asked = subprocess.run(
                ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=False,
            )
            found["nvidia_smi"] = dict(zip(QUERY.split(","), asked.stdout.strip().split(", "), strict=False))
    return found


def bandwidth(device: Device, size: int) -> Figures:
    """Returns the bytes per second of a copy of `size` bytes within the device's memory (read and written bytes both
    count), and of copies between it and the host's pinned memory."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"within": spread(2 * size / s for s in timed(device, lambda: target.copy_(source), 10))}
    if device == "cuda":
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["to_device"] = spread(size / s for s in timed(device, lambda: target.copy_(pinned), 5))
        found["to_host"] = spread(size / s for s in timed(device, lambda: pinned.copy_(source), 5))
    return found


def matrix_rate(device: Device, form: str, size: int) -> dict[str, float]:
    """Returns the floating-point operations per second of the product of two square matrices of `size` rows."""
    kind = torch.bfloat16 if form == "bf16" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(left)
    with tf32(form == "tf32"):
        return spread(2 * size**3 / s for s in timed(device, lambda: torch.mm(left, right, out=out), 10))


def roofline(part: Part) -> Figures:
    """Returns the measured bandwidth (bytes/s) and rates (operations/s) of part 1. Measures them if part 1 has not run
    on this device."""
    record = part.read("chip")
    if record.get("device") != part.device or set(record.get("rates", {})) != set(FORMATS):
        size = 256 if part.small else 8192
        record = {
            "bandwidth": bandwidth(part.device, 2**24 if part.small else 2**30),
            "rates": {form: matrix_rate(part.device, form, size) for form in FORMATS},
        }
    return {
        "bytes_per_s": record["bandwidth"]["within"]["median"],
        "rates": {form: rate["median"] for form, rate in record["rates"].items()},
    }


def run(part: Part) -> None:
    """Measures part 1."""
    part.keep(**describe(part.device))
    part.say(part.record.get("chip", "the CPU"))
    part.keep(bandwidth=bandwidth(part.device, 2**24 if part.small else 2**30))
    part.say(f"copies {part.record['bandwidth']['within']['median'] / 1e9:,.0f} GB/s")
    size = 256 if part.small else 8192
    part.keep(rates={}, matrix_size=size)
    for form in FORMATS:
        part.record["rates"][form] = matrix_rate(part.device, form, size)
        part.write()
        part.say(f"{form} {part.record['rates'][form]['median'] / 1e12:,.2f} TFLOP/s")
