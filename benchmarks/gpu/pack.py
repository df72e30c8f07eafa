"""Carries the packages that torch's environment lacks to a machine without a network.

`pack` downloads wheels for that machine's Python, and writes them as one tar file in pieces: DIR/packages.000,
DIR/packages.001, ..., with the SHA-256 of each in DIR/pieces.json. `unpack` checks and joins the pieces, and installs
the wheels in a folder. This folder goes in PYTHONPATH, as scripts/gpu does. torch is not among the packages: the torch
that is installed there is used, with its CUDA libraries.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from benchmarks.gpu.part import Device

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
INDEX = "pieces.json"
MB = 10**6
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class PackError(Exception):
    """The packages cannot be packed or unpacked. The message names the file and what is wrong with it."""


def requirements(device: Device) -> list[str]:
    """Returns the service's dependencies, those of its CUDA extra, and onnx. For the CPU, onnxruntime remains."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["cuda"]
    found = [one for one in project["dependencies"] if device == "cpu" or not one.startswith("onnxruntime")]
    for one in extra:
        if one.startswith("onnxruntime-gpu"):
            # torch has the CUDA libraries. The wheels of the extra's own extras have the same again.
            found += [] if device == "cpu" else ["onnxruntime-gpu" + one.partition("]")[2]]
        else:
            found.append(one)
    return found


def pack(folder: Path, python: str, piece_mb: int, device: Device) -> None:
    """Writes the wheels for Python `python` on Linux x86_64 to `folder`, in pieces of at most `piece_mb` MB. Raises
    PackError."""
    if piece_mb < 1:
        raise PackError(f"--piece-mb {piece_mb} is not a positive number")
    if python.count(".") != 1 or not python.replace(".", "").isdecimal():
        raise PackError(f"--python {python} is not a version such as 3.12")
    if folder.exists() and any(folder.iterdir()):
        raise PackError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--dest", name, "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        command += [f"--platform={one}" for one in PLATFORMS]
        if subprocess.run([*command, *requirements(device)], check=False).returncode:
            raise PackError("pip could not download the wheels")
        files = sorted(wheels.iterdir())
        with tempfile.TemporaryFile() as whole:
            with tarfile.open(fileobj=whole, mode="w") as tar:
                for file in files:
                    tar.add(file, file.name)
            whole.seek(0)
            pieces: dict[str, str] = {}
            while piece := whole.read(piece_mb * MB):
                piece_name = f"packages.{len(pieces):03}"
                (folder / piece_name).write_bytes(piece)
                pieces[piece_name] = hashlib.sha256(piece).hexdigest()
        record = {"python": python, "machine": "x86_64", "wheels": [file.name for file in files], "pieces": pieces}
        (folder / INDEX).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in files)
    print(f"{folder}: {len(files)} wheels, {size / MB:,.0f} MB, in {len(pieces)} pieces")


def unpack(folder: Path, out: Path) -> None:
    """Checks the pieces in `folder`, and installs their wheels in the empty folder `out`, without a network. Raises
    PackError."""
    try:
        record = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackError(f"{folder / INDEX} cannot be read: {error}") from error
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if record["python"] != here or record["machine"] != platform.machine():
        raise PackError(
            f"{folder} has wheels for Python {record['python']} on {record['machine']}, but this is Python {here} on "
            f"{platform.machine()}"
        )
    if out.exists() and any(out.iterdir()):
        raise PackError(f"{out} is not empty")
    for name, expected in record["pieces"].items():
        if not (folder / name).exists():
            raise PackError(f"{folder / name} is missing")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            raise PackError(f"{folder / name} is damaged: its SHA-256 is not {expected}")
    with tempfile.TemporaryDirectory() as name:
        with tempfile.TemporaryFile() as whole:
            for piece in record["pieces"]:
                whole.write((folder / piece).read_bytes())
            whole.seek(0)
            with tarfile.open(fileobj=whole) as tar:
                tar.extractall(name, filter="data")
        wheels = [str(Path(name) / wheel) for wheel in record["wheels"]]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        if subprocess.run([*command, "--no-deps", f"--target={out}", *wheels], check=False).returncode:
            raise PackError(f"pip could not install the wheels in {out}")
    print(f"{out}: {len(wheels)} packages")
