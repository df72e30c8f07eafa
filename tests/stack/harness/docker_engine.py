"""Provides Docker for the tests: a running engine, and stand-ins for the base images, because some machines cannot pull
the base images.

A stand-in is built from Debian 12. Its Python, Redis, HAProxy and Prometheus have the versions of the tags in
service/Dockerfile and docker-compose.yml. A stand-in has the paths, the user and the stop signal of the official image,
as far as these two files rely on them. The stand-in for Python also has the wheels of the project's dependencies, so
that a build needs no network. Docker keeps the stand-ins. They are rebuilt when their contents change.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.stack.local import ROOT
from tests.service.sessions.stores.redis_server import program

PREFIX = "wane-stand-in"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "haproxy", "prometheus", "python3-pip", "python3-venv", "redis-server", "wget")
RECIPES = {
    "redis": "RUN install --directory --owner=redis --group=redis /data\nWORKDIR /data\nVOLUME /data",
    "haproxy": "USER haproxy\nSTOPSIGNAL SIGUSR1",
    "prometheus": "RUN install --directory --owner=nobody /prometheus\nWORKDIR /prometheus\nUSER nobody",
}
PYTHON_RECIPE = """
COPY wheels /wheels
RUN ln -s python3 /usr/bin/python && printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
"""
FOR_OLDER_PYTHON = "async-timeout"
"""An additional requirement for Debian's Python 3.11.2. The package redis needs it if Python is older than 3.11.3."""

MOST_FILES = 16384
WAIT_S = 60.0
ASK_EVERY_S = 0.1
LOG_TAIL_CHARACTERS = 4000


def run(*command: str | Path, given: str | None = None, folder: Path = ROOT) -> str:
    """Runs a command, and returns its output. If the command fails, the test fails with the output."""
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr)[-LOG_TAIL_CHARACTERS:]
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}: {said}"
    return done.stdout.strip()


def docker(*arguments: str | Path, given: str | None = None) -> str:
    """Runs `docker` with these arguments."""
    return run("docker", *arguments, given=given)


def runs() -> bool:
    """Returns whether a Docker engine answers."""
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


@contextmanager
def engine(folder: Path) -> Iterator[None]:
    """Uses the running Docker engine, or starts one for the block. Writes the log of a started engine into the folder.
    Skips the test if no engine can run."""
    for name in ("docker", "docker-compose", "debootstrap"):
        program(name)
    if os.geteuid() != 0:
        pytest.skip("only root can run dockerd and debootstrap")
    if runs():
        yield
        return
    # dockerd cannot give containers a higher limit of open files than its own. It inherits the limit of this process,
    # which may be below MOST_FILES.
    files = min(MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    log = folder / "dockerd.log"
    with log.open("w") as said:
        command = [program("dockerd"), f"--default-ulimit=nofile={files}:{files}"]
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + WAIT_S
        while not runs():
            if process.poll() is not None:
                pytest.skip(f"dockerd cannot run here: {log.read_text()[-LOG_TAIL_CHARACTERS:]}")
            assert time.monotonic() < deadline, f"dockerd does not answer: {log.read_text()[-LOG_TAIL_CHARACTERS:]}"
            time.sleep(ASK_EVERY_S)
        yield
    finally:
        process.terminate()
        process.wait(WAIT_S)


@contextmanager
def tagged(image: str, name: str) -> Iterator[None]:
    """Gives an image another name during the block. If another image had this name before, the name is given back to
    that image after the block."""
    before = docker("images", "--quiet", "--filter", f"reference={name}")
    docker("tag", image, name)
    try:
        yield
    finally:
        if before:
            docker("tag", before, name)
        else:
            docker("rmi", name)


def stand_in(name: str) -> str:
    """Returns the name of the stand-in for a service's image. `name` is `redis`, `haproxy` or `prometheus`."""
    return _image(name, f"FROM {_debian()}\n{RECIPES[name]}\n")


def python_stand_in() -> str:
    """Returns the name of the stand-in for Python's image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    built, served = project["build-system"]["requires"], project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    wanted = [*built, *served, *extras["otel"], *extras["onnx"], FOR_OLDER_PYTHON]

    def download(folder: Path) -> None:
        run(sys.executable, "-m", "pip", "download", "--only-binary=:all:", f"--dest={folder / 'wheels'}", *wanted)

    return _image("python", f"FROM {_debian()}\n{PYTHON_RECIPE}", download, " ".join(wanted))


def _debian() -> str:
    """Returns the name of the base image of all stand-ins: Debian with the programs of every stand-in."""
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE]

    def make(image: str) -> None:
        with TemporaryDirectory() as folder:
            root, packed = Path(folder) / "root", Path(folder) / "root.tar"
            # The mounts of debootstrap disappear with its mount namespace.
            run("unshare", "--mount", *bootstrap, root)
            run(
                "tar",
                f"--directory={root}",
                "--exclude=./var/cache/apt/archives/*",
                "--create",
                f"--file={packed}",
                ".",
            )
            docker("import", packed, image)

    return _kept("debian", " ".join(bootstrap), make)


def _image(name: str, recipe: str, prepare: Callable[[Path], None] = lambda folder: None, contents: str = "") -> str:
    """Returns the name of an image, which is built if necessary. `recipe` is the text of its Dockerfile. `prepare`
    writes the other files of the build context, and `contents` describes them."""

    def make(image: str) -> None:
        with TemporaryDirectory() as folder:
            prepare(Path(folder))
            (Path(folder) / "Dockerfile").write_text(recipe, encoding="utf-8")
            docker("build", "--tag", image, folder)

    return _kept(name, recipe + contents, make)


def _kept(name: str, made_of: str, make: Callable[[str], None]) -> str:
    """Returns the name of an image. Uses the existing image if `made_of`, which describes its contents, has not
    changed. Otherwise makes a new image, and removes the old one."""
    image = f"{PREFIX}/{name}:{sha256(made_of.encode()).hexdigest()[:16]}"
    there = docker("images", "--format={{.Repository}}:{{.Tag}}", f"{PREFIX}/{name}").split()
    if image not in there:
        make(image)
        for old in there:
            docker("rmi", "--force", old)
    return image
