"""The comparison of an imported graph with its own file: its limits, and what it must find."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.models.bundles import words_tokenizer
from tests.models.imported.graphs import FLOAT, INT64, UNITS, VOCABULARY, Oracle, Weights, gru, node, save, value
from wane.cli import main
from wane.models.bundle import Bundle
from wane.models.imported import bundle
from wane.models.imported.bundle import Import, Imported, import_graph
from wane.models.imported.first_run import LimitedProcess
from wane.models.imported.graph_file import GraphError
from wane.models.vocabulary import Vocabulary
from wane.service.runners.onnx import OnnxRunner

Extra = Sequence[tuple[str, int, list[str | int]]]


def imports(graph: Path, **options: object) -> Imported:
    """Imports a graph beside its file."""
    tokenizer = words_tokenizer()
    asked = {
        "name": graph.stem,
        "version": "1",
        "window": 4,
        "max_window": 16,
        "start": "token",
        "command": "wane import",
    }
    asked |= {"vocabulary": Vocabulary("words", tokenizer), "tokenizer_json": tokenizer, "pairs": {}} | options
    return import_graph(Import(path=graph, **asked), graph.parent / "bundles" / graph.stem)  # type: ignore[arg-type]


def cell(w: Weights) -> list[object]:
    """The nodes of h.next = tanh(x + h / 2)."""
    w["half"] = np.array(0.5, np.float32)
    return [
        *w.embedded(),
        node("Mul", ["h", "half"], ["h.half"]),
        node("Add", ["x", "h.half"], ["sum"]),
        node("Tanh", ["sum"], ["h.next"]),
    ]


def written(path: Path, nodes: list[object], w: Weights, extra: Extra = (), batch: str | int = "B") -> Path:
    """Writes a cell. `extra`: its further states, whose next values are named NAME.next."""
    inputs = [value("tokens", INT64, [batch]), value("h", FLOAT, [batch, UNITS])]
    outputs = [value("logits", FLOAT, [batch, VOCABULARY]), value("h.next", FLOAT, [batch, UNITS])]
    inputs += [value(name, kind, shape) for name, kind, shape in extra]
    outputs += [value(f"{name}.next", kind, shape) for name, kind, shape in extra]
    return save(path, nodes, inputs, outputs, w)


def late(path: Path, size: int, trips: int, first: int = 3) -> Path:
    """Writes a cell that applies `trips` functions to `size` numbers from its token number `first` on."""
    w = Weights()
    w["one"], w["limit"] = np.array(1, np.float32), np.array(first - 0.5, np.float32)
    w["trips"], w["true"] = np.array(trips, np.int64), np.array(True)
    body = helper.make_graph(
        [node("Tanh", ["s"], ["s.next"]), node("Identity", ["c"], ["c.next"])],
        "body",
        [value("i", INT64, []), value("c", TensorProto.BOOL, []), value("s", FLOAT, None)],
        [value("c.next", TensorProto.BOOL, []), value("s.next", FLOAT, None)],
    )
    nodes = [
        *cell(w),
        node("Add", ["count", "one"], ["count.next"]),
        node("ReduceMax", ["count"], ["largest"], keepdims=0),
        node("Greater", ["largest", "limit"], ["is.late"]),
        node("Cast", ["is.late"], ["factor"], to=INT64),
        node("Mul", ["factor", w.ints("size", size)], ["size.0"]),
        node("Add", ["size.0", w.ints("least", 1)], ["size.1"]),
        node("ConstantOfShape", ["size.1"], ["zeros"]),
        node("Loop", ["trips", "true", "zeros"], ["after"], body=body),
        node("ReduceSum", ["after"], ["total"], keepdims=0),
        node("Add", ["h.next", "total"], ["top"]),
        *w.head("top"),
    ]
    return written(path, nodes, w, [("count", FLOAT, ["B", 1])])


@pytest.mark.parametrize("first", [3, 90])
def test_a_graph_that_becomes_slow_after_some_tokens_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    path = late(tmp_path / "late.onnx", 10_000_000, 400, first)
    monkeypatch.setattr(bundle, "CHECK_SECONDS", 3.0)
    with pytest.raises(GraphError, match=r"late\.onnx: .*was stopped: comparing .* takes more than 3 s"):
        imports(path, max_window=100)
    assert not (tmp_path / "bundles" / "late").exists()


def test_a_graph_that_needs_much_memory_after_its_first_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"late\.onnx: "):
        imports(late(tmp_path / "late.onnx", 2_500_000_000, 1))


def test_the_process_limits_itself(tmp_path: Path) -> None:
    """So it ends even if the process that started it was killed."""
    path = gru(tmp_path / "gru.onnx")
    with LimitedProcess(path, 7, 2**32) as process:
        process.check(path)
        limits = {
            name: resource.prlimit(process._process.pid, name) for name in (resource.RLIMIT_CPU, resource.RLIMIT_AS)
        }
    assert limits == {resource.RLIMIT_CPU: (7, 8), resource.RLIMIT_AS: (2**32, 2**32)}


def in_large_batches(w: Weights) -> list[object]:
    """The mean of a batch of more than 8 rows is added."""
    return [
        node("Shape", ["tokens"], ["rows"]),
        node("Greater", ["rows", w.ints("eight", 8)], ["many"]),
        node("Cast", ["many"], ["factor"], to=FLOAT),
        node("ReduceMean", ["h.next", w.ints("first", 0)], ["mean"]),
        node("Mul", ["mean", "factor"], ["more"]),
    ]


def in_the_largest_batches(w: Weights) -> list[object]:
    """The mean of a batch of more than 2,000 rows is added."""
    nodes = in_large_batches(w)
    w.ints("eight", 2000)
    return nodes


def of_crowded_tokens(w: Weights) -> list[object]:
    """1 is added if four rows read the token 3, as if an expert of a mixture had room for three."""
    w["room"] = np.array(3.5, np.float32)
    return [
        node("Equal", ["tokens", w.ints("three", 3)], ["is.three"]),
        node("Cast", ["is.three"], ["ones"], to=FLOAT),
        node("ReduceSum", ["ones", w.ints("first", 0)], ["count"]),
        node("Greater", ["count", "room"], ["crowded"]),
        node("Cast", ["crowded"], ["more"], to=FLOAT),
    ]


def of_one_token(w: Weights) -> list[object]:
    """The state of all rows is subtracted if one of them reads the token 7."""
    return [
        node("Equal", ["tokens", w.ints("seven", 7)], ["is.seven"]),
        node("Cast", ["is.seven"], ["ones"], to=FLOAT),
        node("ReduceMax", ["ones"], ["any"], keepdims=0),
        node("Mul", ["h", "any"], ["more"]),
    ]


@pytest.mark.parametrize("mixes", [in_large_batches, in_the_largest_batches, of_crowded_tokens, of_one_token])
@pytest.mark.parametrize("place", ["top", "logits"])
def test_rows_that_affect_one_another_in_some_batches_run_one_by_one(
    tmp_path: Path, mixes: Callable[[Weights], list[object]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the file reads the tokens 0 to 2 only, which do not show it."""
    draw = np.random.default_rng

    class Few(np.random.Generator):
        def integers(self, *given: Any, **named: Any) -> Any:
            return super().integers(*given, **named) % 3

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Few(draw(seed).bit_generator))
    w = Weights()
    if place == "top":
        nodes = [*cell(w), *mixes(w), node("Add", ["h.next", "more"], ["top"]), *w.head("top")]
    else:
        w["ones.row"] = np.ones((1, VOCABULARY), np.float32)
        nodes = [
            *cell(w),
            *mixes(w),
            *w.head("h.next", out="raw"),
            node("ReduceMean", ["more"], ["scalar"], keepdims=0),
        ]
        nodes += [node("Mul", ["ones.row", "scalar"], ["row"]), node("Mul", ["row", "raw"], ["scaled"])]
        nodes += [node("Add", ["raw", "scaled"], ["logits"])]
    found = imports(written(tmp_path / "mixed.onnx", nodes, w))
    assert any("one by one: its rows affect one another" in note for note in found.notes)


def test_rows_that_do_not_affect_one_another_run_together(tmp_path: Path) -> None:
    assert not any("one by one" in note for note in imports(gru(tmp_path / "gru.onnx")).notes)


@pytest.mark.parametrize("batch", ["B", 1])
@pytest.mark.parametrize("kind", [INT64, TensorProto.INT32, TensorProto.DOUBLE])
def test_states_that_float32_does_not_hold_are_kept_exactly(tmp_path: Path, kind: int, batch: str | int) -> None:
    """A generator of random integers that overflows, and a chaotic map in float64, change the logits."""
    w, dtype = Weights(), helper.tensor_dtype_to_np_dtype(kind)
    if kind == TensorProto.DOUBLE:
        w["rate"], w["one"], w["seed"] = (np.array(number, dtype) for number in (3.99, 1, 1e-4))
        nodes = [
            node("Sub", ["one", "s"], ["left"]),
            node("Mul", ["s", "left"], ["product"]),
            node("Mul", ["product", "rate"], ["map"]),
            node("Max", ["map", "seed"], ["s.next"]),
            node("Cast", ["s.next"], ["more"], to=FLOAT),
        ]
    else:
        w["rate"], w["seed"], w["997"] = (np.array(number, dtype) for number in (1664525, -1013904223, 997))
        nodes = [
            node("Mul", ["s", "rate"], ["product"]),
            node("Add", ["product", "seed"], ["s.next"]),
            node("Mod", ["s.next", "997"], ["rest"]),
            node("Cast", ["rest"], ["rest.float"], to=FLOAT),
            node("Mul", ["rest.float", "small"], ["more"]),
        ]
        w["small"] = np.array(0.001, np.float32)
    nodes += [*cell(w), node("Add", ["h.next", "more"], ["top"]), *w.head("top")]
    path = written(tmp_path / "exact.onnx", nodes, w, [("s", kind, [batch, 1])], batch)
    imports(path)
    tokens = np.random.default_rng(0).integers(2, VOCABULARY, size=60)
    run = OnnxRunner(Bundle.read(tmp_path / "bundles" / "exact"), "cpu", 1).run
    found = run("window", {"tokens": tokens[None], "lengths": np.array([60])})["logits"][0]
    assert np.abs(found - Oracle(path, {}).logits(tokens.tolist())[-1]).max() < 1e-5


def test_a_state_with_a_default_value_is_refused(tmp_path: Path) -> None:
    """It would be a constant, and its next value would be ignored."""
    w = Weights()
    w["c"] = np.zeros((1, UNITS), np.float32)
    nodes = [*cell(w), node("Add", ["h.next", "c"], ["c.next"]), node("Add", ["c.next", "h.next"], ["top"])]
    path = written(tmp_path / "m.onnx", [*nodes, *w.head("top")], w, [("c", FLOAT, ["B", UNITS])])
    with pytest.raises(GraphError, match=r"the input 'c' has a default value in the file.* the output 'c\.next'"):
        imports(path, pairs={"h": "h.next"}, logits="logits")


def test_the_chosen_outputs_and_those_that_are_not_read_are_named(tmp_path: Path) -> None:
    w = Weights()
    nodes = [*cell(w), *w.head("h.next"), node("Identity", ["x"], ["error"])]
    path = written(tmp_path / "m.onnx", nodes, w)
    model = onnx.load(path)
    model.graph.output.append(value("error", FLOAT, ["B", UNITS]))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(GraphError, match="shapes alone do not tell"):
        imports(path)
    notes = imports(path, pairs={"h": "h.next"}).notes
    assert "the next value of each state: h <- h.next; the logits: logits" in notes
    assert "outputs that are not read: error" in notes


def test_an_output_layer_with_a_computed_sum_is_kept_whole(tmp_path: Path) -> None:
    """torch.addmm of a term that depends on the token is a Gemm whose last input is computed."""
    w = Weights()
    nodes = [
        *cell(w),
        node("Gather", [w.draw("skip", VOCABULARY, VOCABULARY), "tokens"], ["term"]),
        node("Gemm", ["h.next", w.draw("matrix", UNITS, VOCABULARY), "term"], ["logits"]),
    ]
    notes = imports(written(tmp_path / "addmm.onnx", nodes, w)).notes
    assert any("the last matrix was not found" in note for note in notes)


def test_a_fixed_batch_of_one_is_lifted_on_the_second_axis(tmp_path: Path) -> None:
    """The states of torch.nn.LSTM with one layer are [1, 1, 6]: the first axis is that of the layers."""
    w = Weights()
    weights = [w.draw("W", 1, 24, 6), w.draw("R", 1, 24, 6), w.draw("b", 1, 48)]
    nodes = [
        *w.embedded(),
        node("Unsqueeze", ["x", w.ints("zero", 0)], ["x.t"]),
        node("LSTM", ["x.t", *weights, "", "h", "c"], ["", "hn", "cn"], hidden_size=6),
        node("Squeeze", ["hn", "zero"], ["top"]),
        *w.head("top"),
    ]
    inputs = [value("tokens", INT64, [1]), *(value(name, FLOAT, [1, 1, 6]) for name in ("h", "c"))]
    outputs = [value("logits", FLOAT, [1, VOCABULARY]), *(value(name, FLOAT, [1, 1, 6]) for name in ("hn", "cn"))]
    notes = imports(save(tmp_path / "m.onnx", nodes, inputs, outputs, w), pairs={"h": "hn", "c": "cn"}).notes
    assert "its batch of 1 was lifted: the rows of a batch run together" in notes


def test_int8_weights_are_stored_once(tmp_path: Path) -> None:
    w = Weights()
    w["matrix"] = np.random.default_rng(0).integers(-100, 100, size=(VOCABULARY, UNITS * 50)).astype(np.int8)
    w["scale"], w["zero"] = np.array(0.001, np.float32), np.array(0, np.int8)
    nodes = [
        *cell(w),
        node("DequantizeLinear", ["matrix", "scale", "zero"], ["whole"]),
        node("Concat", ["h.next"] * 50, ["top"], axis=1),
        node("Gemm", ["top", "whole"], ["logits"], transB=1),
    ]
    imports(written(tmp_path / "int8.onnx", nodes, w))
    folder = tmp_path / "bundles" / "int8"
    tensors = [*onnx.load(folder / "step.onnx", load_external_data=False).graph.initializer]
    assert [t.data_location for t in tensors if t.name == "weights/matrix"] == [TensorProto.EXTERNAL]
    assert (folder / "weights.safetensors").stat().st_size > w["matrix"].nbytes


def test_external_data_of_a_subgraph_are_read(tmp_path: Path) -> None:
    w = Weights()
    w["true"] = np.array(True)
    np.ones(UNITS, np.float32).tofile(tmp_path / "inner.bin")
    inner = TensorProto(name="inner", data_type=FLOAT, dims=[UNITS], data_location=TensorProto.EXTERNAL)
    inner.external_data.add(key="location", value="inner.bin")
    then = helper.make_graph(
        [node("Add", ["h.next", "inner"], ["yes"])], "yes", [], [value("yes", FLOAT, None)], [inner]
    )
    other = helper.make_graph([node("Identity", ["h.next"], ["no"])], "no", [], [value("no", FLOAT, None)])
    nodes = [*cell(w), node("If", ["true"], ["top"], then_branch=then, else_branch=other), *w.head("top")]
    imports(written(tmp_path / "m.onnx", nodes, w))


@pytest.mark.parametrize("opset", [17, 20])
def test_an_added_token_is_impossible_whatever_the_logits(tmp_path: Path, opset: int) -> None:
    w = Weights()
    w["thousand"] = np.array(1000, np.float32)
    nodes = [*w.embedded(), node("Add", ["x", "h"], ["sum"]), node("Tanh", ["sum"], ["h.next"])]
    nodes += [*w.head("h.next", out="raw"), node("Sub", ["raw", "thousand"], ["logits"])]
    inputs = [value("tokens", INT64, ["B"]), value("h", FLOAT, ["B", UNITS])]
    outputs = [value("logits", FLOAT, ["B", VOCABULARY]), value("h.next", FLOAT, ["B", UNITS])]
    path = save(tmp_path / "low.onnx", nodes, inputs, outputs, w, opset)
    tokens = "\n".join(f"item/{n}" for n in range(VOCABULARY))
    (tmp_path / "names.txt").write_text(tokens)
    command = ["import", str(path), "--vocabulary", str(tmp_path / "names.txt"), "--events", "--eos", "none"]
    assert main([*command, "--bundles", str(tmp_path)]) == 0
    run = OnnxRunner(Bundle.read(tmp_path / "low"), "cpu", 1).run
    logits = run("step", {"tokens": np.array([3]), "state.h": np.zeros((1, UNITS), np.float32)})["logits"][0]
    assert logits[-1] == np.float32(logits[:-1].min() - np.float32(300)) and logits[:-1].min() < -900


@pytest.mark.parametrize(("by", "together"), [("state", False), ("shape", True)])
def test_a_branch_that_the_values_of_all_rows_choose_is_run_row_by_row(tmp_path: Path, by: str, together: bool) -> None:
    """No state that the comparison reaches chooses the other branch."""
    w = Weights()
    w["limit"], w["some"] = np.array(5.0 if by == "state" else 10**6, np.float32), np.array(0, np.int64)
    chosen = {
        "state": [node("ReduceMax", ["h"], ["largest"], keepdims=0)],
        "shape": [
            node("Shape", ["h"], ["sizes"]),
            node("Gather", ["sizes", "some"], ["rows"]),
            node("Cast", ["rows"], ["largest"], to=FLOAT),
        ],
    }[by]
    then = helper.make_graph([node("Identity", ["h.next"], ["no"])], "no", [], [value("no", FLOAT, None)])
    other = helper.make_graph([node("Neg", ["h.next"], ["yes"])], "yes", [], [value("yes", FLOAT, None)])
    nodes = [*cell(w), *chosen, node("Less", ["largest", "limit"], ["few"])]
    nodes += [node("If", ["few"], ["top"], then_branch=then, else_branch=other), *w.head("top")]
    notes = imports(written(tmp_path / "m.onnx", nodes, w)).notes
    assert any("(If) chooses by the values of all rows" in note for note in notes) != together
    assert any("one by one" in note for note in notes) != together
