"""The loader checks an imported bundle that somebody hands around before onnxruntime opens its graphs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.models.bundles import WORDS
from tests.models.imported.graphs import gru, node
from wane.cli import main
from wane.models import bundle as bundle_module
from wane.models.bundle import IMPORTED, Bundle, BundleError, CertificateError, verify_graphs
from wane.models.parity import Run
from wane.service.runners.onnx import OnnxRunner


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "names.txt").write_text("\n".join(WORDS))
    command = ["import", str(gru(folder / "gru.onnx")), "--vocabulary", str(folder / "names.txt")]
    assert main([*command, "--bundles", str(folder)]) == 0
    return folder / "gru"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest, and then states the present hashes of all files."""
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    change(found)
    found["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in found["files"]}
    path.write_text(json.dumps(found))


def graph(folder: Path, name: str, change: Callable[[onnx.ModelProto], object]) -> None:
    """Changes a graph and its hash."""
    model = onnx.load(folder / name, load_external_data=False)
    change(model)
    (folder / name).write_bytes(model.SerializeToString())
    manifest(folder, lambda _: None)


def unhashed(model: onnx.ModelProto) -> None:
    tensor = next(each for each in model.graph.initializer if each.data_location == TensorProto.EXTERNAL)
    next(each for each in tensor.external_data if each.key == "location").value = "more.bin"


def unhashed_within(model: onnx.ModelProto) -> None:
    inner = TensorProto(name="inner", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    inner.external_data.add(key="location", value="more.bin")
    inner.external_data.add(key="length", value="16")
    body = next(each for each in model.graph.node if each.op_type == "Scan").attribute[0].g
    body.initializer.append(inner)


def endless(model: onnx.ModelProto) -> None:
    body = helper.make_graph([], "body", [], [])
    model.graph.node.append(node("Loop", ["tokens", "", "hidden"], ["again"], name="spin", body=body))


def radius(model: onnx.ModelProto) -> None:
    model.graph.node.append(node("Identity", ["log_sum_exp"], ["radius"]))
    model.graph.output.append(helper.make_tensor_value_info("radius", TensorProto.FLOAT, ["B"]))


def another_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["B"]))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("step.onnx", lambda model: setattr(model.graph.node[0], "domain", "evil"), "the operator set 'evil'"),
        ("scan.onnx", endless, "node spin (Loop) has no constant number of iterations"),
        ("head.onnx", unhashed, "more.bin"),
        ("window.onnx", unhashed_within, "its weights are in 'more.bin', which has no hash"),
        ("window.onnx", radius, "its outputs are"),
        ("advance.onnx", another_input, "its inputs are"),
    ],
)
def test_a_graph_that_was_changed_is_refused(
    copy: Path, name: str, change: Callable[[onnx.ModelProto], object], reason: str
) -> None:
    Bundle.read(copy)
    (copy / "more.bin").write_bytes(bytes(4096))
    graph(copy, name, change)
    with pytest.raises(BundleError) as failure:
        Bundle.read(copy)
    assert name in str(failure.value) and reason in str(failure.value)


@pytest.mark.parametrize("name", ["window.onnx", "head.onnx"])
def test_a_graph_that_differs_from_the_step_is_refused(copy: Path, name: str) -> None:
    """The graphs have no oracle: they are compared with `step`."""

    def doubled(model: onnx.ModelProto) -> None:
        (last,) = [each for each in model.graph.node if each.op_type == "Gemm"]
        last.attribute.append(helper.make_attribute("alpha", 2.0))

    verify_graphs(Bundle.read(copy), graphs(copy))
    graph(copy, name, doubled)
    with pytest.raises(BundleError, match="differs from the oracle"):
        verify_graphs(Bundle.read(copy), graphs(copy))


def graphs(folder: Path) -> Run:
    runner = OnnxRunner(Bundle.read(folder), "cpu", 1)
    return lambda role, feeds: dict(runner.run(role, feeds))


def test_a_large_graph_is_refused(copy: Path) -> None:
    (copy / "step.onnx").write_bytes(bytes(8 * 2**20 + 1))
    manifest(copy, lambda _: None)
    with pytest.raises(BundleError, match="more than the limit of 8,388,608"):
        Bundle.read(copy)


def test_a_certificate_of_an_imported_graph_does_not_hold(copy: Path) -> None:
    manifest(copy, lambda found: found["certificate"].update(contractive=True, certified=True))
    with pytest.raises(CertificateError, match="certificate"):
        Bundle.read(copy)
    assert Bundle.open(copy).weights() == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found["architecture"].update(width=0), "width"),
        (lambda found: found["architecture"]["tensors"][0].update(name="hidden"), "start with 'state.'"),
        (lambda found: found["architecture"]["tensors"][0].update(shape=[2**27]), "a session's state has"),
        (lambda found: found["state"].append({"name": "state.x", "shape": [1]}), "does not list the state tensors"),
        (lambda found: found.update(precision="int8"), "neither a cache nor another precision"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    copy: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    manifest(copy, change)
    with pytest.raises(BundleError, match="manifest") as failure:
        Bundle.read(copy)
    assert reason in str(failure.value)


def test_without_the_package_onnx_the_error_says_what_to_install(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(bundle_module, "find_spec", lambda name: None if name == "onnx" else find(name))
    with pytest.raises(BundleError, match=r"pip install '\.\[onnx\]'"):
        Bundle.read(copy)


def test_the_weights_are_stored_once_and_shared_by_the_graphs(made: Path) -> None:
    bundle = Bundle.read(made)
    assert bundle.manifest.certificate == IMPORTED
    shared: dict[str, set[tuple[str, ...]]] = {}
    for role in bundle.manifest.graphs:
        for tensor in onnx.load(bundle.graph_path(role), load_external_data=False).graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                shared.setdefault(tensor.name, set()).add(tuple(entry.value for entry in tensor.external_data))
            else:
                assert np.prod(tensor.dims) < 64
    assert "weights/W" in shared and all(len(places) == 1 for places in shared.values())
