"""Tests that graphs become models whose numbers are those of onnxruntime, and that other graphs are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper

from tests.models.imported.graphs import FLOAT, INT32, value
from tests.training.audit.graph.language_models import (
    KINDS,
    UNITS,
    VOCABULARY,
    WIDTH,
    LanguageModel,
    keras_model,
    node,
    random,
    read,
)
from wane.models.reference import Reference
from wane.training.audit.foreign_model import ForeignModel
from wane.training.audit.graph import check, onnx_file, recurrent, values
from wane.training.audit.graph import graph as graph_module
from wane.training.errors import ForeignError


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and runs files in this process, because starting three for each file would take most of the time.
    `test_onnx_file.py` has tests with processes."""
    monkeypatch.setattr(onnx_file, "check_apart", lambda path: None)
    monkeypatch.setattr(check, "run_apart", run)


TOKENS = np.random.default_rng(3).integers(VOCABULARY, size=(17, 3))
"""Three sequences of 17 tokens, time-major."""


def own(model: ForeignModel, tokens: NDArray[np.int64] = TOKENS) -> NDArray[np.float64]:
    """Returns the logits (T, B, V) of the imported model."""
    reference = Reference(model.architecture, model.weights)
    state, found = reference.zero_state(tokens.shape[1]), []
    for column in tokens:
        logits, _, state = reference.step(column, state)
        found.append(logits)
    return np.stack(found)


def theirs(path: Path, feeds: dict[str, Any] | None = None) -> Any:
    """Returns the first output of the file."""
    return next(iter(run(path, feeds or {"tokens": TOKENS}).values()))


def run(path: Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outputs of the file by name."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("operator", "function"), KINDS)
def test_the_numbers_are_those_of_onnxruntime(tmp_path: Path, operator: str, function: str, layers: int) -> None:
    graph = LanguageModel(operator, layers, **({"activations": [function]} if function else {}))
    path = graph.save(tmp_path)
    model = read(path)
    assert [layer.kind for layer in model.architecture.layers] == [KINDS[operator, function]] * layers
    assert model.tensors["layers.0.cell.weight_ih_l0"] == "W0"
    assert model.assumptions == ()
    assert any(note.startswith("checked with onnxruntime: logits differs by at most") for note in model.notes)
    assert np.abs(own(model) - theirs(path)).max() < 1e-5


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
def test_a_graph_in_the_layout_of_keras_is_read(tmp_path: Path, operator: str, layers: int) -> None:
    path = keras_model(operator, layers, tmp_path)
    model = read(path)
    assert [layer.kind for layer in model.architecture.layers] == [operator.lower()] * layers
    assert "the Softmax at the end of the graph is dropped: Wane computes probabilities from logits" in model.notes
    logits = own(model)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    found = theirs(path, {"input_1": TOKENS.T.astype(np.float32)})
    assert np.abs(probabilities - found.swapaxes(0, 1)).max() < 1e-5


def zeros_are_given(graph: LanguageModel) -> None:
    graph.weights["start"] = np.zeros((1, 3, UNITS), np.float32)
    graph.inputs = [value("tokens", helper.TensorProto.INT64, ["time", 3])]
    graph.given(5, "start")
    graph.given(6, "start")


def states_are_inputs(graph: LanguageModel) -> None:
    graph.inputs += [value(name, FLOAT, [1, "batch", UNITS]) for name in ("h", "c")]
    graph.given(5, "h")
    graph.given(6, "c")


def states_of_all_layers_are_one_input(graph: LanguageModel) -> None:
    graph.inputs.append(value("h", FLOAT, [2, "batch", UNITS]))
    graph.weights |= {"0": np.array([0]), "1": np.array([1])}
    graph.before.append(helper.make_node("Split", ["h"], ["ha", "hb"], axis=0, num_outputs=2))
    graph.before.append(node("Slice", "h", "0", "1", "0", "hc"))
    graph.given(5, "hb")
    graph.given(6, "hc")


def peepholes_are_zeros(graph: LanguageModel) -> None:
    graph.weights["P"] = np.zeros((1, 3 * UNITS), np.float32)
    graph.given(7, "P")


def no_bias(graph: LanguageModel) -> None:
    graph.recurrent.input[:] = graph.recurrent.input[:3]


def functions_are_named(graph: LanguageModel) -> None:
    graph.recurrent.attribute.append(helper.make_attribute("activations", ["sigmoid", "Tanh", "TANH"]))


def classes_are_one_hot(graph: LanguageModel) -> None:
    graph.weights |= {"depth": np.array(VOCABULARY), "values": np.array([0, 1], np.float32)}
    graph.before = [node("OneHot", "tokens", "depth", "values", "hot"), node("MatMul", "hot", "table", "embedded")]


def one_hot_enters_the_layer(graph: LanguageModel) -> None:
    classes_are_one_hot(graph)
    graph.before = [node("OneHot", "tokens", "depth", "values", "embedded")]
    graph.weights["W0"] = random(1, 4 * UNITS, VOCABULARY)


def one_hot_has_a_bias(graph: LanguageModel) -> None:
    one_hot_enters_the_layer(graph)
    graph.weights["shift"] = random(VOCABULARY)
    graph.before = [node("OneHot", "tokens", "depth", "values", "hot"), node("Add", "hot", "shift", "embedded")]


def the_embedding_is_scaled_and_shifted(graph: LanguageModel) -> None:
    graph.weights |= {"scale": np.float32(1.7), "shift": random(WIDTH)}
    graph.before = [
        node("Gather", "table", "tokens", "rows"),
        node("Mul", "rows", "scale", "scaled"),
        node("Sub", "scaled", "shift", "embedded"),
    ]


def a_projection_follows_the_layer(graph: LanguageModel) -> None:
    graph.weights |= {
        "P": random(UNITS, 4),
        "Pb": random(4),
        "out": random(4, VOCABULARY),
        "temperature": random(1) + 2,
    }
    graph.after = [
        node("MatMul", graph.top, "P", "p"),
        node("Add", "p", "Pb", "q"),
        node("MatMul", "q", "out", "o"),
        node("Add", "o", "bias", "hot"),
        node("Div", "hot", "temperature", "logits"),
    ]


def a_gemm_reads_flat_rows(graph: LanguageModel) -> None:
    graph.weights |= {"flat": np.array([-1, UNITS]), "out": random(VOCABULARY, UNITS), "shape": np.array([0, -1, 11])}
    graph.weights |= {"three": np.array([3]), "classes": np.array([VOCABULARY])}
    graph.after = [
        node("Reshape", graph.top, "flat", "rows"),
        node("Gemm", "rows", "out", "bias", "y", transB=1, alpha=0.5, beta=2.0),
        node("Shape", graph.top, "size"),
        node("Slice", "size", "zero", "two", "sizes"),
        node("Concat", "sizes", "classes", "full", axis=0),
        node("Reshape", "y", "full", "logits"),
    ]
    graph.weights |= {"zero": np.array([0]), "two": np.array([2])}


def only_the_last_token_is_an_output(graph: LanguageModel) -> None:
    graph.weights["last"] = np.array(-1)
    graph.after.insert(0, node("Gather", graph.top, "last", "final", axis=0))
    graph.after[1].input[0] = "final"


def the_final_state_is_read(graph: LanguageModel) -> None:
    graph.weights["zero"] = np.array([0])
    graph.after.insert(0, node("Squeeze", "h0", "zero", "final"))
    graph.after[1].input[0] = "final"


def a_slice_has_the_last_token(graph: LanguageModel) -> None:
    graph.weights |= {"start": np.array([-1]), "end": np.array([2**63 - 1]), "axis": np.array([0])}
    graph.after.insert(0, node("Slice", graph.top, "start", "end", "axis", "final"))
    graph.after[1].input[0] = "final"


def dropout_and_casts(graph: LanguageModel) -> None:
    graph.inputs = [value("tokens", INT32, ["time", "batch"])]
    graph.before = [
        node("Cast", "tokens", "whole", to=helper.TensorProto.INT64),
        node("Gather", "table", "whole", "rows"),
        node("Dropout", "rows", "kept"),
        node("Identity", "kept", "embedded"),
    ]


def the_state_is_an_output_too(graph: LanguageModel) -> None:
    graph.outputs.append(value("h0", FLOAT, None))


def the_probabilities_are_an_output_too(graph: LanguageModel) -> None:
    graph.outputs.append(value("probabilities", FLOAT, None))
    graph.after.append(node("Softmax", "logits", "probabilities", axis=-1))


def a_log_softmax_ends_the_graph(graph: LanguageModel) -> None:
    graph.after[-1] = node("Add", "bias", "product", "raw")
    graph.after.append(node("LogSoftmax", "raw", "logits", axis=2))


def the_weights_are_moved_in_the_graph(graph: LanguageModel) -> None:
    graph.weights |= {"turned": graph.weights["out"].T, "zero": np.array([0])}
    graph.weights["W0"] = graph.weights["W0"][0]
    graph.before += [node("Transpose", "turned", "out", perm=[1, 0]), node("Unsqueeze", "W0", "zero", "W")]
    del graph.weights["out"]
    graph.given(1, "W")


EQUAL: list[Callable[[LanguageModel], None]] = [
    a_gemm_reads_flat_rows,
    a_log_softmax_ends_the_graph,
    a_projection_follows_the_layer,
    a_slice_has_the_last_token,
    classes_are_one_hot,
    dropout_and_casts,
    functions_are_named,
    no_bias,
    one_hot_enters_the_layer,
    one_hot_has_a_bias,
    only_the_last_token_is_an_output,
    peepholes_are_zeros,
    states_are_inputs,
    states_of_all_layers_are_one_input,
    the_embedding_is_scaled_and_shifted,
    the_final_state_is_read,
    the_probabilities_are_an_output_too,
    the_state_is_an_output_too,
    the_weights_are_moved_in_the_graph,
    zeros_are_given,
]


@pytest.mark.parametrize("change", EQUAL, ids=lambda change: change.__name__)
def test_other_ways_to_write_the_same_model_are_read(tmp_path: Path, change: Callable[[LanguageModel], None]) -> None:
    graph = LanguageModel()
    change(graph)
    path = graph.save(tmp_path)
    tokens = TOKENS.astype(np.int32 if change is dropout_and_casts else np.int64)
    layers = 2 if change is states_of_all_layers_are_one_input else 1
    states = {one.name: np.zeros((layers, 3, UNITS), np.float32) for one in graph.inputs[1:]}
    logits = own(read(path))
    if change is a_log_softmax_ends_the_graph:
        logits = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = theirs(path, {"tokens": tokens} | states)
    assert np.abs((logits if len(found) > 3 else logits[-1]) - found).max() < 1e-5


def test_one_hot_tokens_may_be_the_input(tmp_path: Path) -> None:
    graph = LanguageModel("GRU")
    graph.inputs = [value("classes", FLOAT, ["time", 1, VOCABULARY])]
    graph.before = [node("MatMul", "classes", "table", "embedded")]
    path = graph.save(tmp_path)
    found = theirs(path, {"classes": np.eye(VOCABULARY, dtype=np.float32)[TOKENS[:, :1]]})
    assert np.abs(own(read(path), TOKENS[:, :1]) - found).max() < 1e-5


def test_an_output_layer_that_equals_the_embedding_is_tied(tmp_path: Path) -> None:
    graph = LanguageModel("GRU")
    graph.weights["table"] = np.ascontiguousarray(graph.weights["out"].T)
    graph.weights["W0"] = random(1, 3 * UNITS, UNITS)
    model = read(graph.save(tmp_path))
    assert model.architecture.tied and "head.weight" not in model.weights


def test_layers_of_several_kinds_and_widths_are_read(tmp_path: Path) -> None:
    graph, gru = LanguageModel("LSTM"), LanguageModel("GRU")
    gru.recurrent.input[:] = ["x0", "gW", "gR", "gB"]
    gru.recurrent.output[:], gru.recurrent.name = ["gy"], "upper"
    graph.weights |= {"gW": random(1, 12, UNITS), "gR": random(1, 12, 4), "gB": random(1, 24), "out": random(4, 11)}
    (size,) = [one for one in gru.recurrent.attribute if one.name == "hidden_size"]
    size.i = 4
    graph.nodes += [gru.recurrent, node("Squeeze", "gy", "one", "top")]
    graph.after[0].input[0] = "top"
    path = graph.save(tmp_path)
    model = read(path)
    assert [(layer.kind, layer.units) for layer in model.architecture.layers] == [("lstm", UNITS), ("gru", 4)]
    assert np.abs(own(model) - theirs(path)).max() < 1e-5


def test_wrong_weights_are_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recurrent.ORDER, "LSTM", (0, 1, 2, 3))
    with pytest.raises(ForeignError, match="the model that was read from the graph is another than the graph"):
        read(LanguageModel().save(tmp_path))


def attribute(name: str, given: Any) -> Callable[[LanguageModel], None]:
    def change(graph: LanguageModel) -> None:
        graph.recurrent.attribute.append(helper.make_attribute(name, given))

    return change


def lengths_are_given(graph: LanguageModel) -> None:
    graph.weights["lengths"] = np.array([5, 4, 3], np.int32)
    graph.given(4, "lengths")


def ones_are_given(graph: LanguageModel) -> None:
    graph.weights["start"] = np.ones((1, 3, UNITS), np.float32)
    graph.given(5, "start")
    graph.given(6, "start")


def peepholes_are_given(graph: LanguageModel) -> None:
    graph.weights["P"] = random(1, 3 * UNITS)
    graph.given(7, "P")


def function_between(operator: str, **attributes: Any) -> Callable[[LanguageModel], None]:
    def change(graph: LanguageModel) -> None:
        graph.nodes.append(node(operator, graph.top, "changed", **attributes))
        graph.after[0].input[0] = "changed"

    return change


def a_skip_connection(graph: LanguageModel) -> None:
    graph.weights["table"] = random(VOCABULARY, UNITS)
    graph.weights["W0"] = random(1, 4 * UNITS, UNITS)
    graph.nodes.append(node("Add", graph.top, "embedded", "changed"))
    graph.after[0].input[0] = "changed"


def features_become_tokens(graph: LanguageModel) -> None:
    graph.weights["shape"] = np.array([-1, 1, 3])
    graph.weights["out"] = random(3, VOCABULARY)
    graph.nodes.append(node("Reshape", graph.top, "shape", "changed"))
    graph.after[0].input[0] = "changed"


def time_and_batch_are_exchanged(graph: LanguageModel) -> None:
    second = LanguageModel(layers=2).nodes[2:]
    graph.weights |= {name: array for name, array in LanguageModel(layers=2).weights.items() if name.endswith("1")}
    graph.nodes += [node("Transpose", "x0", "turned", perm=[1, 0, 2]), *second]
    second[0].input[0] = "turned"
    graph.after[0].input[0] = "x1"


def another_input(graph: LanguageModel) -> None:
    graph.inputs.append(value("mask", FLOAT, ["time", "batch"]))


def more_logits_than_tokens(graph: LanguageModel) -> None:
    graph.weights |= {"out": random(UNITS, VOCABULARY + 1), "bias": random(VOCABULARY + 1)}


def no_output_layer(graph: LanguageModel) -> None:
    graph.after = [node("Identity", graph.top, "logits")]


def two_output_layers(graph: LanguageModel) -> None:
    graph.weights["other"] = random(UNITS, VOCABULARY)
    graph.after.append(node("MatMul", graph.top, "other", "second"))
    graph.outputs.append(value("second", FLOAT, None))


def one_step(graph: LanguageModel) -> None:
    graph.inputs = [value("tokens", helper.TensorProto.INT64, [1, "batch"])]


def one_token_is_selected(graph: LanguageModel) -> None:
    graph.weights["second"] = np.array([1])
    graph.nodes.append(node("Gather", graph.top, "second", "changed", axis=0))
    graph.after[0].input[0] = "changed"


def a_weight_is_not_finite(graph: LanguageModel) -> None:
    graph.weights["R0"] = np.full_like(graph.weights["R0"], np.inf)


REFUSED: dict[str, tuple[Callable[[LanguageModel], None], str]] = {
    "activations": (attribute("activations", ["Sigmoid", "Tanh", "Relu"]), "activations are Sigmoid, Tanh, Relu"),
    "clip": (attribute("clip", 3.0), r"clips its sums to 3 \(clip\)"),
    "input_forget": (attribute("input_forget", 1), "input_forget"),
    "layout": (attribute("layout", 1), "layout is 1, which onnxruntime does not run"),
    "reverse": (attribute("direction", "reverse"), "direction is reverse"),
    "bidirectional": (attribute("direction", "bidirectional"), "direction is bidirectional"),
    "sequence_lens": (lengths_are_given, "has sequence_lens"),
    "initial state": (ones_are_given, "initial state is not zero"),
    "peepholes": (peepholes_are_given, "peephole weights"),
    "relu": (function_between("Relu"), r"the_changed \(Relu\): Wane's networks have no such function"),
    "softmax before": (function_between("Softmax", axis=-1), "does not read the features along the last axis"),
    "half precision": (function_between("Cast", to=helper.TensorProto.FLOAT16), "casts to a type that rounds"),
    "skip": (a_skip_connection, "a skip connection"),
    "reshape": (features_become_tokens, "splits or joins the axes in a way that Wane cannot follow"),
    "exchanged": (time_and_batch_are_exchanged, "is not the time of the layers below"),
    "input": (another_input, "the input 'mask' is neither the tokens nor an initial state"),
    "logits": (more_logits_than_tokens, "has 12 logits for 11 tokens"),
    "no output layer": (no_output_layer, "no output is computed by an embedding"),
    "two output layers": (two_output_layers, r"several outputs have an output layer \(logits, second\)"),
    "one step": (one_step, "runs one token at a time"),
    "selected": (one_token_is_selected, "selects a part of the tokens"),
    "not finite": (a_weight_is_not_finite, "R0 holds a value that is not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_wane_cannot_express_is_refused_with_the_difference(tmp_path: Path, name: str) -> None:
    change, reason = REFUSED[name]
    graph = LanguageModel()
    change(graph)
    with pytest.raises(ForeignError, match=reason) as refused:
        read(graph.save(tmp_path))
    assert str(refused.value).startswith(str(tmp_path / "model.onnx"))


def test_a_gru_whose_reset_gate_multiplies_the_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=r"linear_before_reset is 0.*Keras: reset_after=True"):
        read(LanguageModel("GRU", linear_before_reset=0).save(tmp_path))


def test_an_rnn_with_another_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match="its activations are Affine; Wane has Tanh or Relu"):
        read(LanguageModel("RNN", activations=["Affine"]).save(tmp_path))


def test_the_sum_of_all_computed_arrays_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the table, each within the limit of one array."""
    monkeypatch.setattr(graph_module, "LARGEST_TOTAL", 20 * VOCABULARY * WIDTH * 4)
    graph = LanguageModel()
    graph.before = [node("Neg", "table", "n0"), *(node("Neg", f"n{i}", f"n{i + 1}") for i in range(5))]
    graph.before.append(node("Gather", "n5", "tokens", "embedded"))
    assert read(graph.save(tmp_path)).architecture.vocabulary_size == VOCABULARY
    graph.before = [node("Neg", "table", "n0"), *(node("Neg", f"n{i}", f"n{i + 1}") for i in range(25))]
    graph.before.append(node("Gather", "n25", "tokens", "embedded"))
    with pytest.raises(ForeignError, match="arrays that are computed from the weights have more than"):
        read(graph.save(tmp_path))


def test_a_product_of_a_column_and_a_row_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "LARGEST_PRODUCT", VOCABULARY * VOCABULARY - 1)
    graph = LanguageModel()
    graph.weights |= {"column": random(UNITS, 1), "row": random(1, VOCABULARY), "whole": random(VOCABULARY, VOCABULARY)}
    graph.after[:1] = [node("MatMul", graph.top, "out", "inner"), node("MatMul", "inner", "whole", "product")]
    assert read(graph.save(tmp_path)).architecture.vocabulary_size == VOCABULARY
    monkeypatch.setattr(values, "LARGEST_PRODUCT", UNITS * VOCABULARY - 1)
    graph.after[:2] = [node("MatMul", graph.top, "column", "inner"), node("MatMul", "inner", "row", "product")]
    with pytest.raises(ForeignError, match="product of two matrices has"):
        read(graph.save(tmp_path))


def test_a_long_array_of_sizes_is_refused(tmp_path: Path) -> None:
    graph = LanguageModel()
    doubled = [node("Concat", f"s{i}", f"s{i}", f"s{i + 1}", axis=0) for i in range(13)]
    graph.before += [node("Shape", "tokens", "s0"), *doubled, node("Reshape", "embedded", "s13", "shaped")]
    graph.nodes[0].input[0] = "shaped"
    with pytest.raises(ForeignError, match="its output has 8,192 sizes, more than 4,096"):
        read(graph.save(tmp_path))
