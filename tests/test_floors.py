"""Who may import whom: downward only. A floor that is not tested is not there.

__main__ -> server -> app -> middleware, routes -> engine -> runners, stores
everyone -> settings, metrics, errors, engine.{mode,requests,answers,scores,generated,compared,standing}
service  -> the light part of models (no torch), never training
training -> models, never service
research -> benchmarks; nothing else imports research
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("service", "models", "training")
OUTSIDE = ("benchmarks", "deploy", "examples")

LIGHT_MODELS = (
    "models.manifest",
    "models.bundle",
    "models.vocabulary",
    "models.reference",
    "models.certificate",
    "models.weights",
    "models.parity",
)
TORCH_MODELS = (
    "models/cells",
    "models/networks",
    "models/constraints",
    "models/parallel_scan",
    "models/export/",
)
HTTP = (
    "service/app",
    "service/direct",
    "service/fast_path",
    "service/guard",
    "service/middleware",
    "service/routes/",
    "service/schemas",
    "service/underway",
)
CLIENTS = ("service/client", "service/compare", "service/console", "service/merged", "service/plot")

ONLY_IN = {
    "fastapi": HTTP,
    "starlette": HTTP,
    "uvicorn": (
        "service/corked",
        "service/patient_http",
        "service/patient_websocket",
        "service/server",
        "service/whole_http",
    ),
    "httpx": ("service/client",),
    "redis": ("service/stores/redis",),
    "rich": ("service/__main__", "service/console", "training/"),
    "matplotlib": ("service/plot", "training/"),
    "prometheus_client": ("service/histogram", "service/metrics"),
    "opentelemetry": ("service/tracing",),
    "threadpoolctl": ("service/arithmetic",),
    "onnxruntime": ("service/runners/onnx", "models/export/", "training/"),
    "onnx": ("models/export/", "training/"),
    "torch": (*TORCH_MODELS, "training/"),
    "training": ("training/",),
    "service": ("service/",),
    "service.app": ("service/server",),
    "service.server": ("service/__main__",),
    "service.fast_path": ("service/app", "service/server", "service/whole_http"),
    "service.underway": ("service/fast_path", "service/whole_http"),
    "service.routes": ("service/app", "service/fast_path", "service/routes/", "service/underway"),
    "service.schemas": ("service/fast_path", "service/routes/"),
    "service.documents": ("service/documents/", "service/app", "service/client", "service/routes/"),
    "service.middleware": ("service/app", "service/fast_path", "service/routes/", "service/underway"),
    "service.runners": ("service/runners/", "service/engine/", "service/__main__"),
    "service.stores": ("service/stores/", "service/engine/", "service/__main__"),
}
"""Where a package or module may be imported, by path prefix."""

NEVER = {
    "service/engine/": HTTP,
    "service/runners/": (*HTTP, "service/engine/engine", "service/engine/catalog", "service/engine/changes"),
    "service/stores/": (
        *HTTP,
        "service/engine/engine",
        "service/engine/catalog",
        "service/engine/changes",
        "service/runners/",
    ),
    "service/routes/": ("service/runners/", "service/stores/", "service/server", *CLIENTS),
    **dict.fromkeys(CLIENTS, ("service/engine/", "service/runners/", "service/stores/", "service/server", *HTTP)),
}
"""What the files under a prefix may not import, by path prefix: nobody looks up."""


def sources(packages: Iterable[str] = PACKAGES) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """`service/routes/predict` for that file, whatever its suffix and wherever the checkout."""
    return path.relative_to(ROOT).with_suffix("").as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function; those for the type checker too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    importers = {
        name_of(path)
        for path in sources()
        for module in imports(path)
        if module == package or module.startswith(f"{package}.")
    }
    strangers = {name for name in importers if not name.startswith(ONLY_IN[package])}
    assert not strangers
    assert importers, f"nobody imports {package}: the rule is out of date"


@pytest.mark.parametrize("importer", NEVER)
def test_nobody_imports_upward(importer: str) -> None:
    forbidden = NEVER[importer]
    upward = {
        (name_of(path), module)
        for path in sources()
        if name_of(path).startswith(importer)
        for module in imports(path)
        if module.replace(".", "/").startswith(forbidden)
    }
    assert not upward


def test_the_service_sees_only_the_light_part_of_models() -> None:
    used = {
        module
        for path in sources()
        if name_of(path).startswith("service/")
        for module in imports(path)
        if module.startswith("models")
    }
    assert {module for module in used if not module.startswith(LIGHT_MODELS)} == set()


def test_only_research_and_tests_import_research() -> None:
    importers = {
        name_of(path)
        for path in sources((*PACKAGES, *OUTSIDE))
        if any(module == "research" or module.startswith("research.") for module in imports(path))
    }
    assert importers == set()


def modules_loaded_by(*names: str) -> set[str]:
    """The top-level packages that are loaded once these modules are imported, in a process of its own."""
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_importing_all_of_the_service_brings_neither_torch_nor_training() -> None:
    names = [name_of(path).replace("/", ".").removesuffix(".__init__") for path in sources()]
    loaded = modules_loaded_by(*(name for name in names if name.startswith("service")))
    assert {"service", "models", "onnxruntime"} <= loaded
    assert not loaded & {"torch", "training", "onnx", "matplotlib"}


def test_importing_the_light_part_of_models_brings_neither_torch_nor_onnx_nor_a_framework() -> None:
    loaded = modules_loaded_by(*LIGHT_MODELS)
    assert not loaded & {"torch", "onnx", "onnxruntime", "fastapi", "service", "training"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_s_init_imports_nothing(package: str) -> None:
    assert list(imports(ROOT / package / "__init__.py")) == []
