"""The command `wane import`: what it finds in a graph of one step, and what it refuses with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.models.bundles import WORDS
from tests.models.imported.graphs import (
    FLOAT,
    INT64,
    UNITS,
    VOCABULARY,
    Weights,
    gru,
    lonely,
    lstm,
    matrix_memory,
    node,
    save,
    value,
)
from wane.cli import main
from wane.models.bundle import Bundle
from wane.models.imported.graph_file import GraphError, real_inputs
from wane.models.imported.signature import find_inputs, find_outputs


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(WORDS))
    return path


def imports(graph: Path, names: Path, *options: str) -> Path:
    """Runs the command, and returns the bundle's folder."""
    bundles = names.parent / "bundles"
    assert main(["import", str(graph), "--vocabulary", str(names), "--bundles", str(bundles), *options]) == 0
    return bundles / graph.stem


def refuses(capsys: pytest.CaptureFixture[str], graph: Path, names: Path, *options: str) -> str:
    """Runs the command, asserts that it is refused, and returns the message."""
    bundles = names.parent / "bundles"
    command = ["import", str(graph), "--vocabulary", str(names), "--bundles", str(bundles), *options]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert not (bundles / graph.stem).exists()
    return message


def test_the_command_says_what_the_model_lacks(tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = imports(gru(tmp_path / "cell.onnx"), names, "--name", "mine", "--window", "5", "--attribution", "me")
    bundle = Bundle.read(folder.with_name("mine"))
    manifest = bundle.manifest
    assert (manifest.name, manifest.window, manifest.provenance.attribution) == ("mine", 5, "me")
    printed = capsys.readouterr().out
    for words in (
        "states h [6]",
        "differs from onnxruntime on cell.onnx by at most",
        "not certified: it is an imported graph",
        "error_bound is null where tokens were left out",
        "auto runs all tokens",
        "rebuilt from the whole kept history",
    ):
        assert words in printed
    assert manifest.certificate.reason is not None and manifest.certificate.reason in printed
    stored = json.loads((bundle.path / "manifest.json").read_text())["architecture"]
    assert stored == {
        "kind": "imported",
        "vocabulary_size": VOCABULARY,
        "width": UNITS,
        "tensors": [{"name": "state.h", "shape": [6], "dtype": "float32"}],
        "rows": "together",
    }
    assert str(tmp_path) not in manifest.provenance.command


def test_a_batch_of_one_is_lifted_or_the_rows_run_one_by_one(
    tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imports(gru(tmp_path / "lifted.onnx", 1), names)
    assert "its batch of 1 was lifted" in capsys.readouterr().out
    imports(lonely(tmp_path / "alone.onnx"), names)
    printed = capsys.readouterr().out
    assert "the rows of a batch run one by one: it has a fixed batch of 1" in printed and "Reshape" in printed


def test_states_of_one_shape_are_ambiguous(tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = lstm(tmp_path / "lstm.onnx")
    message = refuses(capsys, graph, names)
    for words in ("shapes alone do not tell", "h: 'hn', 'cn'", "--state h=hn --state c=cn --logits logits"):
        assert words in message
    assert "no output 'no'" in refuses(capsys, graph, names, "--state", "h=no")
    assert "the states are 'h', 'c'" in refuses(capsys, graph, names, "--state", "x=hn")
    assert "IN=OUT" in refuses(capsys, graph, names, "--state", "h")
    assert "'h' of shape" in refuses(capsys, graph, names, "--state", "h=logits")
    imports(graph, names, "--state", "h=hn")  # one pair leaves one output for the other state


def test_the_vocabulary_must_fit(tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = gru(tmp_path / "gru.onnx")
    names.write_text("\n".join([*WORDS, "more"]))
    message = refuses(capsys, graph, names)
    assert "[B, 12] for a vocabulary of 12 tokens" in message and "'logits' float32[3, 11]" in message
    assert main(["import", str(graph), "--bundles", str(tmp_path / "bundles")]) == 2
    assert "give either --vocabulary NAMES or --tokenizer" in capsys.readouterr().err


def test_an_event_model_without_a_start_token_gets_one_that_is_never_predicted(tmp_path: Path, names: Path) -> None:
    names.write_text("\n".join(f"item/{n}" for n in range(VOCABULARY)))
    folder = imports(gru(tmp_path / "gru.onnx"), names, "--events", "--eos", "none")
    bundle = Bundle.read(folder)
    assert (bundle.manifest.start, bundle.vocabulary.size) == ("zero", VOCABULARY + 1)
    from wane.service.runners.onnx import OnnxRunner

    runner = OnnxRunner(bundle, "cpu", 1)
    # The added token is read as the last one. Without this, it would fail the whole batch.
    outputs = runner.run("step", {"tokens": np.array([3, VOCABULARY]), "state.h": np.zeros((2, 6), np.float32)})
    assert outputs["logits"].shape == (2, VOCABULARY + 1)
    assert (outputs["logits"][:, -1] == outputs["logits"][:, :-1].min(axis=1) - 300).all() and np.isfinite(
        outputs["log_sum_exp"]
    ).all()


def test_a_token_that_the_graph_cannot_read_is_found(
    tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding has a row less than the vocabulary. The sample of random tokens may not show it."""
    path = gru(tmp_path / "gru.onnx")
    model = onnx.load(path)
    matrix = next(tensor for tensor in model.graph.initializer if tensor.name == "embedding")
    matrix.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(matrix)[:-1], "embedding"))
    path.write_bytes(model.SerializeToString())
    assert "cannot r" in refuses(capsys, path, names)  # "cannot read" or "cannot run"


def test_an_existing_bundle_is_not_replaced(tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = gru(tmp_path / "gru.onnx")
    folder = imports(graph, names)
    before = (folder / "manifest.json").read_bytes()
    command = ["import", str(graph), "--vocabulary", str(names), "--bundles", str(folder.parent)]
    assert main(command) == 2
    assert "use --replace or a higher --version" in capsys.readouterr().err
    assert (folder / "manifest.json").read_bytes() == before
    assert main([*command, "--version", "2"]) == 0


def test_logits_that_are_not_finite_are_refused(
    tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = Weights()
    nodes = [*w.embedded(), node("Add", ["x", "h"], ["h.next"]), *w.head("h.next")]
    w["bias"][3] = -np.inf
    inputs = [value("tokens", INT64, ["B"]), value("h", FLOAT, ["B", 6])]
    outputs = [value("logits", FLOAT, ["B", VOCABULARY]), value("h.next", FLOAT, ["B", 6])]
    assert "not finite" in refuses(capsys, save(tmp_path / "m.onnx", nodes, inputs, outputs, w), names)


def test_an_old_operator_set_is_refused(tmp_path: Path, names: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = Weights()
    nodes = [*w.embedded(), node("Add", ["x", "h"], ["h.next"]), *w.head("h.next")]
    inputs = [value("tokens", INT64, ["B"]), value("h", FLOAT, ["B", 6])]
    outputs = [value("logits", FLOAT, ["B", VOCABULARY]), value("h.next", FLOAT, ["B", 6])]
    message = refuses(capsys, save(tmp_path / "m.onnx", nodes, inputs, outputs, w, opset=11), names)
    assert "the operator set 11" in message


def inputs_of(*declared: tuple[str, int, Any]) -> onnx.GraphProto:
    return helper.make_graph([], "g", [value(*each) for each in declared], [])


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ([("tokens", INT64, ["B"])], "has no state"),
        ([("x", FLOAT, ["B"]), ("h", FLOAT, ["B", 6])], "which input has the tokens"),
        ([("a", INT64, ["B"]), ("b", INT64, ["B"])], "Name it with --tokens"),
        ([("tokens", INT64, ["B", "T"]), ("h", FLOAT, ["B", 6])], "one step reads one token of each row"),
        ([("tokens", INT64, [4]), ("h", FLOAT, [4, 6])], "export the graph for a batch of 1"),
        ([("tokens", INT64, ["B"]), ("h", FLOAT, ["B", "past", 6])], "must have one free axis"),
        ([("tokens", INT64, ["B"]), ("h", FLOAT, [6])], "must have one free axis"),
        ([("tokens", INT64, [1]), ("h", FLOAT, [1, "past"])], "a state of a session has one size"),
        ([("tokens", INT64, ["B"]), ("h", TensorProto.BFLOAT16, ["B", 6])], "which no session can hold"),
        ([("tokens", INT64, ["B"]), ("h", FLOAT, None)], "has no shape"),
    ],
)
def test_inputs_that_no_session_can_serve_are_refused(declared: list[Any], reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        find_inputs(inputs_of(*declared), None)


def test_the_tokens_are_found_by_their_name_or_given() -> None:
    graph = inputs_of(("count", INT64, ["B"]), ("input_ids", INT64, ["B"]))
    assert find_inputs(graph, None).tokens.name == "input_ids"
    assert find_inputs(graph, "count").tokens.name == "count"
    with pytest.raises(GraphError, match="has no input 'x'"):
        find_inputs(graph, "x")


def test_the_axis_of_the_batch_is_the_free_one_or_the_one_of_the_tokens_name() -> None:
    graph = inputs_of(("tokens", INT64, ["B"]), ("h", FLOAT, [2, "other", 6]), ("c", FLOAT, ["B", 2, 6]))
    assert [port.axis for port in find_inputs(graph, None).states] == [1, 0]
    graph = inputs_of(("tokens", INT64, [1]), ("h", FLOAT, [2, 1, 6]), ("v", FLOAT, [6]))
    assert [port.axis for port in find_inputs(graph, None).states] == [1, None]


def test_an_output_that_is_no_state_is_ignored_and_one_that_may_be_is_ambiguous() -> None:
    inputs = find_inputs(inputs_of(("tokens", INT64, ["B"]), ("h", FLOAT, ["B", 6])), None)
    rows = inputs.probe()
    outputs: dict[str, Any] = {"y": np.zeros((rows, 11), np.float32), "h.next": np.zeros((rows, 6), np.float32)}
    outputs["attention"] = np.zeros((rows, 9), np.float32)
    assert find_outputs(inputs, outputs, 11, {}, None).after == ("h.next",)
    outputs["features"] = np.zeros((rows, 6), np.float32)
    with pytest.raises(GraphError, match=r"h: 'h\.next', 'features'"):
        find_outputs(inputs, outputs, 11, {}, None)
    assert find_outputs(inputs, outputs, 11, {"h": "h.next"}, None).logits == "y"


def test_logits_and_a_state_of_one_shape_need_names() -> None:
    inputs = find_inputs(inputs_of(("tokens", INT64, ["B"]), ("h", FLOAT, ["B", 11])), None)
    outputs: dict[str, Any] = {name: np.zeros((inputs.probe(), 11), np.float32) for name in ("y", "z")}
    with pytest.raises(GraphError, match="shapes alone do not tell"):
        find_outputs(inputs, outputs, 11, {}, None)
    found = find_outputs(inputs, outputs, 11, {}, "z")
    assert (found.logits, found.after) == ("z", ("y",))


def test_initialisers_among_the_inputs_are_not_states() -> None:
    graph = inputs_of(("tokens", INT64, ["B"]), ("h", FLOAT, ["B", 6]), ("w", FLOAT, [6]))
    graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(6, np.float32), "w"))
    assert [each.name for each in real_inputs(graph)] == ["tokens", "h"]


def test_the_command_needs_no_torch(tmp_path: Path, names: Path) -> None:
    command = ["import", str(gru(tmp_path / "gru.onnx")), "--vocabulary", str(names), "--bundles", str(tmp_path / "b")]
    code = f"import sys; sys.modules['torch'] = None; from wane.cli import main; sys.exit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_states_of_two_ranks_keep_their_shapes(tmp_path: Path, names: Path) -> None:
    bundle = Bundle.read(imports(matrix_memory(tmp_path / "memory.onnx"), names))
    assert {tensor.name: tensor.shape for tensor in bundle.manifest.state} == {"state.C": (6, 6), "state.n": (6,)}
    # The output layer is a product and a sum, so that a session's state is kept with the product's input.
    assert bundle.manifest.architecture.hidden == UNITS
