"""Tests of the imports between the packages. `a > b` means that `a` may import `b`, and that `b` must not import `a`.
`a -> b` means that `a` may import `b`.

    service:  cli > workers > server > app > api > registry > engine > chunked > batching > sessions > state > runners
              > auth > net > deadline > observability > types > settings > errors

    service  -> the light part of models (no torch), never training; its commands `compare` and `report` -> client
    client   -> httpx and its anyio, and websockets for streams: it is also a distribution of its own
    training -> models, never service; `rankings/replay` -> client
    research -> benchmarks; nothing but tests imports research
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("service", "models", "training", "client")
PROGRAMS = ("benchmarks", "deploy", "examples", "research")
ENTRY = ("wane/__init__.py", "wane/__main__.py", "wane/arguments.py", "wane/cli.py")
MOST_FILES = 25
SERVICE_LINES, SERVICE_FILES = 27_640, 124
"""The largest numbers of lines and of files with code in `service/`. Lower them when the service shrinks. The aim is
17,000 lines in 80 files."""

ROOMS = (
    "cli",
    "workers",
    "server",
    "app",
    "api",
    "registry",
    "engine",
    "chunked",
    "batching",
    "sessions",
    "state",
    "runners",
    "auth",
    "net",
    "deadline",
    "observability",
    "types",
    "settings",
    "errors",
)
"""The folders and modules of `service/`. Each may import only the ones that follow it in this list. The modules of a
folder may also import one another."""

LIGHT_MODELS = (
    "wane.models.transitions",
    "wane.models.cache_mixture",
    "wane.models.cache_statistics",
    "wane.models.architecture",
    "wane.models.layer_parts",
    "wane.models.layer_registry",
    "wane.models.event_files",
    "wane.models.manifest",
    "wane.models.bundle",
    "wane.models.vocabulary",
    "wane.models.reference",
    "wane.models.certificate",
    "wane.models.weights",
    "wane.models.parity",
)
TORCH_MODELS = (
    "models/cells/",
    "models/networks",
    "models/constraints/",
    "models/parallel_scan",
    "models/export/",
)

ONLY_IN = {
    "fastapi": ("service/app", "service/api/"),
    "starlette": ("service/app", "service/api/", "service/auth/guard", "service/workers/"),
    "uvicorn": ("service/server",),
    "httptools": ("service/net/connection", "service/cli/load"),
    "httpx": ("client/", "service/cli/connect"),
    "wane.client": ("client/", "service/cli/", "training/rankings/replay"),
    "redis": ("service/sessions/stores/redis",),
    "hiredis": ("service/sessions/stores/redis",),
    "rich": ("service/cli/", "training/"),
    "matplotlib": ("service/cli/render", "training/"),
    "pyarrow": ("models/event_files/parquet",),
    "prometheus_client": ("service/observability/continued", "service/observability/metrics", "service/workers/totals"),
    "opentelemetry": ("service/observability/tracing",),
    "threadpoolctl": ("service/server",),
    "onnxruntime": ("service/runners/onnx", "models/export/", "models/imported/", "training/"),
    "onnx": ("models/export/", "models/imported/", "models/slot_graphs", "training/"),
    "torch": (*TORCH_MODELS, "training/"),
    "wane.training": ("training/",),
    "wane.service": ("service/",),
    "wane.service.server": ("service/cli/serve", "service/workers/"),
    "wane.service.app": ("service/server", "service/workers/"),
}
"""The packages and modules that only certain files may import, each with the path prefixes of these files."""


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """Returns the path of a file relative to the checkout, without its suffix, such as `service/api/routes/predict`."""
    return path.relative_to(ROOT).with_suffix("").as_posix()


def module_of(path: Path) -> str:
    """Returns the dotted module name of a file, such as `wane.service.api.body`. For an `__init__.py`, returns the name
    of its package."""
    return f"wane.{name_of(path)}".replace("/", ".").removesuffix(".__init__")


@cache
def imports(path: Path) -> list[str]:
    """Returns every module that a file imports, including imports inside functions and imports only for the type
    checker. Only the files of `client/` may use relative imports, because two packages contain them: `wane.client` and
    `wane_client`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = node.level == 1 and path.parent == ROOT / "client"
            assert (node.level == 0 or relative) and node.module is not None, (
                f"{path}: relative imports are not allowed"
            )
            module = f"wane.client.{node.module}" if relative else node.module
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_restricted_package_is_imported_only_by_the_allowed_files(package: str) -> None:
    importers = {
        name_of(path)
        for path in sources()
        for module in imports(path)
        if module == package or module.startswith(f"{package}.")
    }
    strangers = {name for name in importers if not name.startswith(ONLY_IN[package])}
    assert not strangers
    assert importers, f"no file imports {package}: remove it from ONLY_IN"


def room(module: str) -> str | None:
    """Returns the folder or module of `service/` that contains the module with this dotted name or path."""
    parts = module.replace("/", ".").removeprefix("wane.").split(".")
    return parts[1] if parts[0] == "service" and len(parts) > 1 else None


def test_every_folder_of_the_service_has_a_floor() -> None:
    rooms = {room(name_of(path)) for path in sources() if name_of(path).startswith("service/")}
    assert rooms == {*ROOMS, "__init__"}


def test_no_module_of_the_service_imports_a_higher_floor() -> None:
    floors = {name: floor for floor, name in enumerate(ROOMS)}
    upward = {
        (name_of(path), module)
        for path in sources()
        for module in imports(path)
        if (above := room(module)) in floors and (here := room(name_of(path))) in floors
        if floors[here] > floors[above]
    }
    assert not upward


def test_there_are_no_circular_imports() -> None:
    names = {module_of(path): path for path in sources()}
    graph = {name: {module for module in imports(path) if module in names} - {name} for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


PRIVATE = ("uvicorn.protocols", "uvicorn._", "websockets")
"""Modules that the package must not import. uvicorn's protocol classes and the modules of websockets change with every
release. The service uses websockets only through uvicorn; the client uses its public clients."""


def test_the_package_imports_no_private_module_of_its_server() -> None:
    found = {(name_of(path), module) for path in sources() for module in imports(path) if module.startswith(PRIVATE)}
    public = ("websockets.asyncio.client", "websockets.exceptions")
    assert {
        (name, module) for name, module in found if name != "client/servers" or not module.startswith(public)
    } == set()


def test_the_client_needs_only_httpx_anyio_and_websockets() -> None:
    """The client is also a distribution of its own, so it imports nothing of the package `wane`."""
    paths = [path for path in sources() if name_of(path).startswith("client/")]
    imported = {module for path in paths for module in imports(path) if not module.startswith("wane.client.")}
    assert {module.split(".")[0] for module in imported} - set(sys.stdlib_module_names) == {
        "anyio",
        "httpx",
        "websockets",
    }
    loaded = modules_loaded_by("wane.client")
    assert "httpx" in loaded and not loaded & {"numpy", "onnxruntime", "pydantic", "websockets", "wane.service"}


def test_only_torch_is_pinned_to_one_version_and_all_others_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    versions = {one.partition(";")[0].strip() for group in groups for one in group}
    assert {one.partition("==")[0] for one in versions if "==" in one} == {"torch"}
    assert {one for one in versions if "<" not in one and "==" not in one} == set()


def test_no_folder_has_too_many_files() -> None:
    folders = {path.parent for folder in (*PACKAGES, *PROGRAMS, "tests") for path in (ROOT / folder).rglob("*.py")}
    counts = {name_of(folder): len(list(folder.glob("*.py"))) for folder in folders if not mirrors(folder)}
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def test_the_service_does_not_grow() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "service").rglob("*.py")]
    assert sum(text.count("\n") for text in texts) <= SERVICE_LINES
    assert sum(bool(text) for text in texts) <= SERVICE_FILES


def test_each_field_of_an_answer_is_declared_once() -> None:
    """A second declaration of an answer is a class or a list of names that has most of its fields. `Finish`, the answer
    of a generation, has half of them."""
    answer = declared("service/types/answer.py", "Answer")
    assert len(answer) >= 18
    again = [
        (name_of(path), ast.unparse(node)[:60])
        for path in sources()
        if name_of(path).startswith("service/")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.stmt | ast.expr)
        if len(answer & (annotated(node) if isinstance(node, ast.ClassDef) else listed(node))) > len(answer) / 2
        if not (isinstance(node, ast.ClassDef) and node.name == "Answer")
    ]
    assert again == []


def listed(node: ast.AST) -> set[str]:
    """Returns the texts in a list, tuple, set or dict of the source code."""
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
    return {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def annotated(found: ast.ClassDef) -> set[str]:
    """Returns the names of the annotated fields of a class."""
    fields = (one for one in found.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one))
    return {one.target.id for one in fields if isinstance(one.target, ast.Name)}


def declared(path: str, name: str) -> set[str]:
    """Returns the names of the fields that the class `name` of a file declares."""
    classes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return annotated(next(one for one in classes if isinstance(one, ast.ClassDef) and one.name == name))


def mirrors(folder: Path) -> bool:
    """Returns whether a folder contains the tests of one folder of the package. The limit on the number of files does
    not apply to such a folder, because several test files may test one file of the package."""
    top, *rest = folder.relative_to(ROOT).parts
    return top == "tests" and bool(rest) and ROOT.joinpath(*rest).is_dir()


def test_the_folders_are_imported_only_through_the_package() -> None:
    checked = [path for folder in (*PACKAGES, *PROGRAMS, "tests") for path in (ROOT / folder).rglob("*.py")]
    checked += [ROOT / name for name in ENTRY]
    assert len(checked) > len(sources())
    strangers = {
        (path.relative_to(ROOT).as_posix(), module)
        for path in checked
        for module in imports(path)
        if module.split(".")[0] in PACKAGES
    }
    assert not strangers


def test_the_service_imports_only_the_light_part_of_models() -> None:
    used = {
        (name_of(path), module)
        for path in sources()
        if name_of(path).startswith("service/")
        for module in imports(path)
        if module.startswith("wane.models") and not module.startswith(LIGHT_MODELS)
    }
    # wane.models.slot_graphs needs the package onnx. Only the runner of a GPU calls the functions that import onnx.
    assert {importer for importer, module in used if module.startswith("wane.models.slot_graphs")} == {
        "service/runners/onnx_device"
    }
    assert {module for _, module in used if not module.startswith("wane.models.slot_graphs")} == set()


def test_the_package_imports_no_program() -> None:
    importers = {
        (path.relative_to(ROOT).as_posix(), module)
        for path in (*sources(), *(ROOT / name for name in ENTRY))
        for module in imports(path)
        if module.split(".")[0] in (*PROGRAMS, "tests")
    }
    assert importers == set()


def test_only_tests_import_research() -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("benchmarks", "deploy", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if any(module == "research" or module.startswith("research.") for module in imports(path))
    }
    assert importers == set()


def test_the_module_of_the_command_imports_only_the_standard_library_at_its_top() -> None:
    imported = {module.split(".")[0] for name in ENTRY for module in imports(ROOT / name)}
    assert imported - set(sys.stdlib_module_names) == {"wane"}


def modules_loaded_by(*names: str) -> set[str]:
    """Imports the named modules in a new process. Returns the names of the top-level packages that are then loaded. For
    a module of Wane, the name has two parts, such as `wane.service`."""
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = ended.stdout.split()
    return {name for name in loaded if name.count(".") == name.startswith("wane.")}


def test_importing_the_service_imports_neither_torch_nor_training() -> None:
    loaded = modules_loaded_by(*(name for path in sources() if (name := module_of(path)).startswith("wane.service")))
    assert {"wane.service", "wane.models", "onnxruntime"} <= loaded
    assert not loaded & {"torch", "wane.training", "onnx", "matplotlib"}


def test_importing_the_light_part_of_models_imports_no_torch_onnx_or_framework() -> None:
    light = [name for path in sources() if (name := module_of(path)).startswith(LIGHT_MODELS)]
    assert {"wane.models.reference.cells.lstm", "wane.models.certificate.cells.lstm"} <= set(light)
    loaded = modules_loaded_by(*light)
    assert not loaded & {"torch", "onnx", "onnxruntime", "fastapi", "wane.service", "wane.training"}


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "client"])
def test_a_packages_init_imports_nothing(package: str) -> None:
    assert imports(ROOT / package / "__init__.py") == []
