"""Hostile and malformed ONNX files are refused with the reason, before onnxruntime opens them or within the time limit
of the first run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.models.imported.graphs import FLOAT, INT64, save, value
from wane.models.imported.first_run import check_apart, run_apart
from wane.models.imported.graph_file import GraphError, Limits, initialisers, read_graph

X, Y = value("x", FLOAT, ["B"]), value("y", FLOAT, ["B"])
node = helper.make_node


def simple(path: Path) -> Path:
    return save(path, [node("Mul", ["x", "w"], ["y"])], [X], [Y], {"w": np.array([3], np.float32)})


def external(path: Path, location: str, dims: list[int], offset: int = 0, length: int | None = None) -> Path:
    """Writes a graph whose initialiser `w` has external data."""
    simple(path)
    model = onnx.load(path)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, entry in {"location": location, "offset": offset, "length": length}.items():
        if entry is not None:
            tensor.external_data.add(key=key, value=str(entry))
    model.graph.initializer[0].CopyFrom(tensor)
    path.write_bytes(model.SerializeToString())
    return path


def loop(path: Path, trips: object, weights: dict[str, np.ndarray] | None = None, nested: int = 1) -> Path:
    """Writes a graph with `nested` loops inside one another. `trips`: the name or the number of their iterations."""
    name = trips if isinstance(trips, str) else "trips"
    tensors = {"true": np.array(True)} | (weights or {})
    if not isinstance(trips, str):
        tensors["trips"] = np.array(trips, np.int64)
    inner = [node("Add", ["s", "s"], ["s.next"])]
    for depth in range(nested):
        s, out = (f"s{depth}", f"s{depth}.next")
        body = helper.make_graph(
            [*(renamed(inner, s, out) if depth == 0 else inner), node("Identity", [f"c{depth}"], [f"c{depth}.next"])],
            f"body{depth}",
            [value(f"i{depth}", INT64, []), value(f"c{depth}", TensorProto.BOOL, []), value(s, FLOAT, ["B"])],
            [value(f"c{depth}.next", TensorProto.BOOL, []), value(out, FLOAT, ["B"])],
        )
        outer = ("x", "y") if depth == nested - 1 else (f"s{depth + 1}", f"s{depth + 1}.next")
        inner = [node("Loop", [name, "true", outer[0]], [outer[1]], name=f"loop{depth}", body=body)]
    inputs = [X] if name == "trips" else [X, value(name, INT64, [])]
    return save(path, inner, inputs, [Y], tensors)


def renamed(nodes: list[onnx.NodeProto], state: str, after: str) -> list[onnx.NodeProto]:
    return [node("Add", [state, state], [after]) for _ in nodes]


def refused(path: Path, *words: str, limits: Limits | None = None, apart: bool = False) -> None:
    with pytest.raises(GraphError) as failure:
        read_graph(path, *([limits] if limits else []))
    assert str(failure.value).startswith(str(path))
    for word in words:
        assert word in str(failure.value)
    if apart:  # the process of the first run gives the same reason
        with pytest.raises(GraphError, match=re.escape(str(failure.value))):
            check_apart(path)


def test_a_good_file_is_read_and_run(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.onnx")
    assert len(read_graph(path).graph.node) == 1
    assert run_apart(path, {"x": np.array([2, 5], np.float32)})["y"].tolist() == [6, 15]


def test_no_module_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "onnx", "onnxruntime", "wane"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert run_apart(simple(tmp_path / "m.onnx"), {"x": np.array([2], np.float32)})["y"].tolist() == [6]
    assert not (tmp_path / "ran").exists()


def test_external_data_in_the_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.arange(4, dtype=np.float32).tofile(tmp_path / "data" / "w.bin")
    path = external(tmp_path / "m.onnx", "data/w.bin", [2], offset=8, length=8)
    assert initialisers(read_graph(path), tmp_path)["w"].tolist() == [2, 3]
    assert run_apart(path, {"x": np.array([1, 1], np.float32)})["y"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/etc/passwd", "inside the folder"),
        ("../secret.bin", "inside the folder"),
        ("data/../../secret.bin", "inside the folder"),
        ("", "inside the folder"),
        ("link.bin", "is a link"),
        ("linked/w.bin", "is a link, or behind one"),
        ("fifo", "regular file"),
        ("folder", "regular file"),
        ("missing.bin", "No such file"),
        ("short.bin", "needs 8 bytes, but 'short.bin' has 4"),
    ],
)
def test_external_data_elsewhere_are_refused(tmp_path: Path, location: str, reason: str) -> None:
    np.ones(4, np.float32).tofile(tmp_path / "secret.bin")
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    np.ones(4, np.float32).tofile(folder / "folder" / "w.bin")
    np.ones(1, np.float32).tofile(folder / "short.bin")
    (folder / "link.bin").symlink_to("/etc/passwd")
    (folder / "linked").symlink_to("folder")
    os.mkfifo(folder / "fifo")
    refused(external(folder / "m.onnx", location, [2]), "'w'", repr(location), reason, apart=location == "/etc/passwd")


def test_two_gigabytes_of_initialisers_are_refused_by_their_shape(tmp_path: Path) -> None:
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(2**31)  # a sparse file
    path = external(tmp_path / "m.onnx", "w.bin", [2**29])
    refused(path, "'w'", "[536870912]", "2,147,483,648 bytes", "limit of 1,073,741,824", apart=True)
    refused(external(path, "w.bin", [2**40, 2**40]), "limit")


def test_many_tensors_that_share_the_same_bytes_are_counted_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(400))
    path = external(tmp_path / "m.onnx", "w.bin", [100])
    model = onnx.load(path, load_external_data=False)
    for index in range(9):
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"w{index}"
    path.write_bytes(model.SerializeToString())
    assert len(initialisers(read_graph(path), tmp_path)) == 10
    refused(path, "more than the limit of 3,999", limits=Limits(tensor_bytes=3_999))


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    refused(path, "2,147,483,648 bytes", "limit")


def test_a_loop_of_a_million_millions_is_refused(tmp_path: Path) -> None:
    refused(loop(tmp_path / "a.onnx", 10**12), "loop0 (Loop) runs its body 1,000,000,000,000 times", apart=True)
    refused(loop(tmp_path / "b.onnx", 1000, nested=3), "runs its body 1,000,000 times")
    refused(loop(tmp_path / "c.onnx", "n"), "no constant number of iterations")
    path = loop(tmp_path / "d.onnx", 3)
    assert run_apart(path, {"x": np.array([1], np.float32)})["y"].tolist() == [8]


def test_a_first_run_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """A Scan over a tensor of no bytes: its shape is computed, so that only a run shows how long it takes."""
    body = helper.make_graph(
        [node("Add", ["s", "s"], ["s.next"])],
        "body",
        [value("s", FLOAT, ["B"]), value("each", FLOAT, [0])],
        [value("s.next", FLOAT, ["B"])],
    )
    nodes = [
        node("ConstantOfShape", ["shape"], ["many"]),
        node("Scan", ["x", "many"], ["y"], body=body, num_scan_inputs=1),
    ]
    path = save(tmp_path / "m.onnx", nodes, [X], [Y], {"shape": np.array([10**12, 0], np.int64)})
    read_graph(path)
    with pytest.raises(GraphError, match="its first run takes more than 4 s"):
        run_apart(path, {"x": np.array([1], np.float32)}, seconds=4)


def test_a_first_run_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    nodes = [node("ConstantOfShape", ["shape"], ["many"]), node("ReduceSum", ["many"], ["z"], keepdims=0)]
    nodes.append(node("Add", ["x", "z"], ["y"]))
    path = save(tmp_path / "m.onnx", nodes, [X], [Y], {"shape": np.array([10**11], np.int64)})
    with pytest.raises(GraphError, match=r"m\.onnx"):
        run_apart(path, {"x": np.array([1], np.float32)})


def test_only_operators_of_onnx_are_run(tmp_path: Path) -> None:
    own = helper.make_node("Gelu", ["x"], ["y"], name="g", domain="com.microsoft")
    refused(save(tmp_path / "a.onnx", [own], [X], [Y]), "node g (Gelu)", "'com.microsoft'", apart=True)
    refused(save(tmp_path / "b.onnx", [node("Evil", ["x"], ["y"])], [X], [Y]), "no operator 'Evil'")
    refused(save(tmp_path / "c.onnx", [node("Gelu", ["x"], ["y"])], [X], [Y], opset=13), "set 13", "'Gelu'")
    refused(save(tmp_path / "d.onnx", [node("RandomNormalLike", ["x"], ["y"])], [X], [Y]), "random")
    refused(save(tmp_path / "e.onnx", [node("Relu", ["x"], ["y"])], [X], [Y], opset=99), "operator set 99")
    refused(save(tmp_path / "f.onnx", [node("Relu", ["x"], ["y"])], [X], [Y], opset=1), "operator set 1")


def test_a_custom_operator_in_a_subgraph_is_found(tmp_path: Path) -> None:
    bad = helper.make_graph(
        [helper.make_node("Evil", ["x"], ["z"], domain="evil")], "bad", [], [value("z", FLOAT, ["B"])]
    )
    good = helper.make_graph([node("Neg", ["x"], ["w"])], "good", [], [value("w", FLOAT, ["B"])])
    branch = node("If", ["yes"], ["y"], then_branch=good, else_branch=bad)
    refused(save(tmp_path / "m.onnx", [branch], [X], [Y], {"yes": np.array(True)}), "node 0 (Evil)", "'evil'")


def test_a_function_of_the_model_is_refused(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.onnx")
    model = onnx.load(path)
    opsets = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("own", "f", ["a"], ["b"], [node("Neg", ["a"], ["b"])], opsets))
    path.write_bytes(model.SerializeToString())
    refused(path, "the function 'f'", "inline")


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "b"], ["a"], name="first"), node("Neg", ["a"], ["b"], name="second")]
    refused(
        save(tmp_path / "a.onnx", [*nodes, node("Neg", ["b"], ["y"])], [X], [Y]),
        "has a cycle",
        "first",
        "second",
        apart=True,
    )
    nodes = [node("Neg", ["a"], ["y"], name="early"), node("Neg", ["x"], ["a"])]
    refused(save(tmp_path / "b.onnx", nodes, [X], [Y]), "early", "before it is computed")
    refused(save(tmp_path / "c.onnx", [node("Neg", ["q"], ["y"])], [X], [Y]), "reads 'q', which nothing computes")
    refused(save(tmp_path / "d.onnx", [node("Neg", ["x"], ["a"])], [X], [Y]), "'y' is not computed")


def test_names_that_clash_are_refused(tmp_path: Path) -> None:
    twice = [node("Neg", ["x"], ["y"], name="one"), node("Abs", ["x"], ["y"], name="two")]
    refused(save(tmp_path / "a.onnx", twice, [X], [Y]), "clash", "'y'", "one", "two", apart=True)
    refused(save(tmp_path / "b.onnx", [node("Neg", ["x"], ["x"])], [X], [X]), "clash", "'x'")
    refused(save(tmp_path / "c.onnx", [node("Neg", ["x"], ["y"])], [X, X], [Y]), "clash", "'x'")
    refused(save(tmp_path / "d.onnx", [node("Neg", ["x"], ["y"])], [X], [Y, Y]), "two outputs", "'y'")
    inner = helper.make_graph([node("Neg", ["x"], ["x2"]), node("Neg", ["x2"], ["x"])], "g", [], [X])
    branch = node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner)
    refused(save(tmp_path / "e.onnx", [branch], [X], [Y], {"yes": np.array(True)}), "clash", "'x'")


def test_the_number_and_depth_of_nodes_are_limited(tmp_path: Path) -> None:
    nodes = [node("Neg", ["x" if n == 0 else f"a{n - 1}"], [f"a{n}"]) for n in range(50)]
    path = save(tmp_path / "a.onnx", [*nodes, node("Neg", ["a49"], ["y"])], [X], [Y])
    read_graph(path, Limits(nodes=51))
    refused(path, "more than 50 nodes", limits=Limits(nodes=50))
    refused(loop(tmp_path / "b.onnx", 1, nested=20), "levels deep")


def test_tensors_that_lack_values_are_refused(tmp_path: Path) -> None:
    def changed(change: Callable[[TensorProto], object]) -> Path:
        path = simple(tmp_path / "m.onnx")
        model = onnx.load(path)
        change(model.graph.initializer[0])
        path.write_bytes(model.SerializeToString())
        return path

    refused(changed(lambda tensor: tensor.dims.append(7)), "'w'", "[1, 7]", "instead of 28")
    refused(changed(lambda tensor: tensor.dims.append(-1)), "[1, -1]")
    refused(changed(lambda tensor: setattr(tensor, "data_type", TensorProto.STRING)), "'w'", "the type STRING")
    refused(changed(lambda tensor: tensor.ClearField("raw_data")), "0 values or bytes instead of 1")


def test_what_is_not_an_onnx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"\xff" * 100)
    refused(tmp_path / "a.onnx", "not an ONNX file")
    (tmp_path / "b.onnx").write_bytes(b"")
    refused(tmp_path / "b.onnx", "not an ONNX file")
    os.mkfifo(tmp_path / "c.onnx")
    refused(tmp_path / "c.onnx", "FIFO")
    refused(tmp_path / "d.onnx", "missing")
    refused(tmp_path, "folder")


def test_a_constant_of_a_node_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(np.zeros(100, np.float32)))
    path = save(tmp_path / "m.onnx", [constant, node("Add", ["x", "w"], ["y"])], [X], [Y])
    read_graph(path, Limits(tensor_bytes=400))
    refused(path, "limit of 399", limits=Limits(tensor_bytes=399))


def test_a_hard_link_and_an_address_in_memory_are_no_external_data(tmp_path: Path) -> None:
    np.ones(2, np.float32).tofile(tmp_path / "w.bin")
    os.link(tmp_path / "w.bin", tmp_path / "hard.bin")
    path = external(tmp_path / "m.onnx", "hard.bin", [2])
    refused(path, "'hard.bin'", "a hard link")
    read_graph(path, Limits(hard_links=True))
    place = tmp_path / "*" / "_ORT_MEM_ADDR_"
    place.mkdir(parents=True)
    np.ones(2, np.float32).tofile(place / "*")
    refused(external(tmp_path / "m.onnx", "*/_ORT_MEM_ADDR_/*", [2]), "an address in memory")


@pytest.mark.parametrize("training", ["constant", "input", "computed"])
def test_dropout_in_training_mode_is_refused(tmp_path: Path, training: str) -> None:
    weights = {"ratio": np.array(0.001, np.float32), "yes": np.array(True), "no": np.array(False)}
    inputs, nodes = [X], []
    if training == "input":
        inputs.append(value("mode", TensorProto.BOOL, []))
    if training == "computed":
        nodes.append(node("Not", ["no"], ["mode"]))
    name = "yes" if training == "constant" else "mode"
    path = save(tmp_path / "m.onnx", [*nodes, node("Dropout", ["x", "ratio", name], ["y"])], inputs, [Y], weights)
    refused(path, "(Dropout) may draw random numbers")
    for inactive in (["x", "ratio", "no"], ["x", "ratio"], ["x"]):
        read_graph(save(tmp_path / "m.onnx", [node("Dropout", inactive, ["y"])], [X], [Y], weights))


def test_a_constant_without_an_output_is_refused(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], [], value=numpy_helper.from_array(np.array(1.0, np.float32)))
    refused(save(tmp_path / "m.onnx", [constant, node("Relu", ["x"], ["y"])], [X], [Y]), "(Constant) has 0 outputs")


def test_a_name_with_a_zero_character_is_refused(tmp_path: Path) -> None:
    inputs = [value("x\0z", FLOAT, ["B"])]
    refused(save(tmp_path / "m.onnx", [node("Relu", ["x\0z"], ["y"])], inputs, [Y]), "zero character")
    nodes = [node("Relu", ["x"], ["a\0"]), node("Relu", ["a\0"], ["y"])]
    refused(save(tmp_path / "m.onnx", nodes, [X], [Y]), "zero character")


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Mul", ["x", "half"], ["y"])], [X], [Y], {"half": np.array([3], np.float32)})
    path.write_bytes(path.read_bytes().replace(b"half", b"ha\xff\xfe"))
    refused(path, "of an initialiser is not UTF-8")


def test_subgraphs_attributes_and_tensors_are_counted(tmp_path: Path) -> None:
    path = simple(tmp_path / "m.onnx")
    limits = Limits(nodes=50)
    for what in ("graphs", "attributes", "initialisers"):
        model = onnx.load(path)
        attribute = model.graph.node[0].attribute.add(name="more", type=onnx.AttributeProto.GRAPHS)
        for _ in range(1000):
            if what == "graphs":
                attribute.graphs.add()
            elif what == "attributes":
                model.graph.node[0].attribute.add()
            else:
                model.graph.initializer.add()
        (tmp_path / "many.onnx").write_bytes(model.SerializeToString())
        refused(tmp_path / "many.onnx", "has more than 1,000 nodes, subgraphs, attributes, tensors", limits=limits)


def test_an_input_of_a_subgraph_is_no_constant_number_of_iterations(tmp_path: Path) -> None:
    """It has the name of an initialiser, whose value is not the one that it is given."""
    path = loop(tmp_path / "m.onnx", 3)
    model = onnx.load(path)
    body = model.graph.node[0].attribute[0].g
    body.initializer.append(numpy_helper.from_array(np.array(3), body.input[0].name))
    path.write_bytes(model.SerializeToString())
    refused(path, "the names clash: 'i0'")
