"""Builds the source distribution and its wheel, installs the wheel in a new environment, and runs its `wane serve` in
an empty folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.service.live_server import TIMEOUT_S, LiveServer, environment
from wane.models.bundle import Bundle
from wane.service.api.routes.console import FOLDER

ROOT = Path(__file__).parents[1]
SOURCES = (
    "pyproject.toml",
    "setup.cfg",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "wane",
    "service",
    "models",
    "training",
    "client",
)
DELETED = "wane/service/deleted.py"
"""The path of a module that is only in the build folder, as if it had been deleted from the checkout after an earlier
build."""
BUNDLES = [Bundle.open(path.parent) for path in (ROOT / "models" / "bundles").glob("*/manifest.json")]
MODELS = {bundle.manifest.name for bundle in BUNDLES} - {"gated-stable"}
"""The models of the wheel. Benchmarks and research pages use gated-stable, too."""

CONSOLE = [path for path in FOLDER.rglob("*") if path.is_file()]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command, waits until it exits, and checks its exit status."""
    ended = subprocess.run(command, cwd=cwd, env=own_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended


def own_environment() -> dict[str, str]:
    """Returns this process's environment without variables that refer to the checkout."""
    return {name: value for name, value in environment().items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that contains tests."""
    checkout = tmp_path_factory.mktemp("source") / "checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "tests" / "test_wheel.py").touch()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, checkout / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, checkout / name)
    return checkout


@pytest.fixture(scope="module")
def client_site(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with only the distribution `wane-client` and its dependencies, installed from the
    folder `client/`."""
    left = checkout / "client" / "build" / "lib" / "wane_client" / "deleted.py"
    left.parent.mkdir(parents=True)
    left.touch()
    return environment_of(tmp_path_factory.mktemp("client"), checkout / "client")


@pytest.fixture(scope="module")
def source(checkout: Path, client_site: Path) -> Path:  # the build of the client has left files in the checkout
    """The unpacked source distribution."""
    folder = checkout.parent
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    left = source / "build" / "lib" / DELETED
    left.parent.mkdir(parents=True)
    left.touch()
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return environment_of(folder, wheel)


def environment_of(folder: Path, requirement: Path) -> Path:
    """Makes a virtual environment in `folder` with only a distribution and its dependencies."""
    site = folder / "site"
    run(sys.executable, "-m", "venv", "--without-pip", site, cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", site, "--quiet", "--disable-pip-version-check")
    run(*pip, "install", requirement, cwd=folder)
    return site


def installed(site: Path, name: str = "wane") -> list[str]:
    """The files of an installed distribution."""
    program = f"import importlib.metadata as m; print(*m.files({name!r}), sep='\\n')"
    return run(site / "bin" / "python", "-c", program, cwd=site).stdout.split()


@contextmanager
def served(site: Path, folder: Path) -> Iterator[LiveServer]:
    """Runs the wheel's `wane serve` in `folder`. Yields when the server is ready."""
    process = subprocess.Popen(
        [site / "bin" / "wane", "serve", "--port", "0"],
        cwd=folder,
        env=own_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    server = LiveServer(process)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def test_the_source_distribution_has_no_tests(source: Path) -> None:
    assert (source / "wane" / "cli.py").is_file()
    assert not (source / "tests").exists()


def test_the_wheel_has_only_wane_at_the_top(site: Path) -> None:
    files = installed(site)
    tops = {name.split("/")[0] for name in files if not name.startswith("..")}
    version = run(site / "bin" / "wane", "--version", cwd=site).stdout.split()[1]
    assert tops == {"wane", f"wane-{version}.dist-info"}
    assert "wane/py.typed" in files


def test_the_client_alone_is_installed_without_the_service(client_site: Path) -> None:
    program = """
import importlib.metadata, wane_client
print(*sorted(one.metadata["Name"].lower() for one in importlib.metadata.distributions()))
print(wane_client.Wane("http://127.0.0.1:9", deadline_s=1).session("a").position)
"""
    names, position = run(
        client_site / "bin" / "python", "-W", "error", "-c", program, cwd=client_site
    ).stdout.splitlines()
    assert {"wane-client", "httpx"} <= set(names.split())
    assert not set(names.split()) & {"wane", "onnxruntime", "numpy", "pydantic", "tokenizers", "websockets"}
    assert position == "0"


def test_both_distributions_have_the_clients_files_under_their_own_names(site: Path, client_site: Path) -> None:
    alone = {name for name in installed(client_site, "wane-client") if name.endswith((".py", ".typed"))}
    whole = {name for name in installed(site) if name.startswith("wane/client/") and not name.endswith(".pyc")}
    expected = {path.name for path in (ROOT / "client").iterdir() if path.suffix in (".py", ".typed")}
    assert alone == {f"wane_client/{name}" for name in expected}
    assert whole == {f"wane/client/{name}" for name in expected}


def test_the_wheel_has_no_files_of_an_earlier_build(site: Path) -> None:
    files = installed(site)
    assert "wane/service/settings.py" in files
    assert DELETED not in files


def test_the_wheel_has_one_model_of_each_family(site: Path) -> None:
    names = {name.split("/")[3] for name in installed(site) if name.startswith("wane/models/bundles/")} - {"README.md"}
    shipped = [bundle.manifest for bundle in BUNDLES if bundle.manifest.name in names]
    assert names == MODELS
    families = [(each.vocabulary.kind, *(layer.kind for layer in each.architecture.layers)) for each in shipped]
    assert len(set(families)) == len(families)


def test_the_wheel_serves_every_model_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    with served(site, tmp_path) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards.keys() == MODELS != set()
        assert len(CONSOLE) > 10
        for path in CONSOLE:
            assert client.get(f"/console/{path.relative_to(FOLDER).as_posix()}").content == path.read_bytes()
        for name, card in cards.items():
            events = card["vocabulary"]["kind"] == "events"
            sent = {"events": ["aisle-3/4", "popular/0"]} if events else {"input": "The history of the"}
            answer = client.post("/v1/predict", json={"model": name, **sent})
            assert answer.status_code == 200
            assert answer.json()["model"] == name and answer.json()["predictions"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "audit"])
def test_a_training_command_without_the_train_extra_says_what_to_install(site: Path, name: str) -> None:
    ended = run(site / "bin" / "wane", name, "--help", cwd=site, status=2)
    assert ended.stderr == f"error: wane {name} needs torch: in the checkout of Wane, run pip install '.[train]'\n"


def test_a_plot_without_matplotlib_is_rejected_before_the_measurement(site: Path, tmp_path: Path) -> None:
    command: list[str | Path] = [
        site / "bin" / "wane",
        "compare",
        "http://127.0.0.1:9",
        "--plot",
        str(tmp_path / "a.png"),
    ]
    ended = run(*command, cwd=site, status=2)
    assert ended.stderr == "error: --plot needs matplotlib: in the checkout of Wane, run pip install '.[plot]'\n"
