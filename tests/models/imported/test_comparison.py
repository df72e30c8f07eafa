"""The comparison of an imported graph with its own file: its limits, and what it must find."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.models.bundles import words_tokenizer
from tests.models.imported.graphs import FLOAT, INT64, UNITS, VOCABULARY, Oracle, Weights, gru, node, save, value
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


def late(path: Path, size: int, trips: int) -> Path:
    """Writes a cell that repeats `trips` additions to `size` numbers from its third token on."""
    w = Weights()
    w["one"], w["limit"] = np.array(1, np.float32), np.array(2.5, np.float32)
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


def test_a_graph_that_becomes_slow_after_its_first_token_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = late(tmp_path / "late.onnx", 10_000_000, 10_000)
    monkeypatch.setattr(bundle, "CHECK_SECONDS", 5.0)
    with pytest.raises(GraphError, match=r"late\.onnx: was stopped: comparing .* takes more than 5 s"):
        imports(path)
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


@pytest.mark.parametrize("mixes", [in_large_batches, of_crowded_tokens, of_one_token])
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
