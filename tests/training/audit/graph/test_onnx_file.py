"""Tests of files that are read and run for the first time in processes of their own."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.training.audit.graph.language_models import LanguageModel, keras_model, node, random, read
from wane.training.errors import ForeignError


def test_a_file_is_read_checked_and_compared(tmp_path: Path) -> None:
    notes = read(keras_model("GRU", 1, tmp_path)).notes
    assert notes[-1].startswith("checked with onnxruntime: dense differs by at most")


@pytest.mark.parametrize("data", [b"\x08\x08\x12\x07pytorch", b"\xff" * 100], ids=["no graph", "no message"])
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(ForeignError, match=r"model.onnx: is not an ONNX file"):
        read(tmp_path / "model.onnx")


def test_a_file_that_onnxruntime_cannot_run_is_refused(tmp_path: Path) -> None:
    graph = LanguageModel()
    graph.weights["unread"] = random(3, 4)
    graph.after.append(node("MatMul", "product", "unread", "fails"))  # the rows have another length
    with pytest.raises(ForeignError, match="onnxruntime cannot"):
        read(graph.save(tmp_path))


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    graph = LanguageModel()
    model = onnx.load(graph.save(tmp_path))
    onnx.external_data_helper.convert_model_to_external_data(model, location="weights.bin", size_threshold=64)
    (tmp_path / "inside").mkdir()
    onnx.save(model, tmp_path / "inside" / "model.onnx")
    assert (read(tmp_path / "inside" / "model.onnx").weights["embedding.weight"] == graph.weights["table"]).all()
    for entry in [one for tensor in model.graph.initializer for one in tensor.external_data]:
        entry.value = "../weights.bin" if entry.key == "location" else entry.value
    (tmp_path / "inside" / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ForeignError, match="must be a file inside the folder"):
        read(tmp_path / "inside" / "model.onnx")
