"""Graphs of torch's two exporters are imported, and answer as torch does. The forgetting of one is measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models.bundles import WORDS
from wane.cli import main
from wane.models.architecture import ImportedGraph
from wane.models.bundle import Bundle
from wane.models.export.parity import OnnxGraphs
from wane.models.parity import log_softmax
from wane.training.audit.report import AuditReport

SIZE = len(WORDS)


class Gru(nn.Module):
    """A GRU cell."""

    states = (((12,), 0),)

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(SIZE, 8), nn.GRUCell(8, 12), nn.Linear(12, SIZE)

    def forward(self, tokens: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.embedding(tokens), h)
        return self.head(h), h


class Lstm(nn.Module):
    """An LSTM of two layers, whose states [2, B, 12] have the batch on the second axis."""

    states = (((2, 12), 1), ((2, 12), 1))

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(SIZE, 8), nn.Linear(12, SIZE)
        self.lstm = nn.LSTM(8, 12, 2, batch_first=True)

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(self.embedding(tokens)[:, None], (h, c))
        return self.head(y[:, 0]), h, c


class MatrixMemory(nn.Module):
    """A cell that Wane does not have: a matrix memory with a normaliser."""

    states = (((6, 6), 0), ((6,), 0))

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection, self.head = nn.Embedding(SIZE, 8), nn.Linear(8, 19), nn.Linear(6, SIZE)

    def forward(self, tokens: Tensor, memory: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, gate = self.projection(self.embedding(tokens)).split([6, 6, 6, 1], -1)
        gate = torch.sigmoid(gate)
        memory = gate[..., None] * memory + v[:, :, None] * k[:, None, :]
        norm = gate * norm + k
        below = (norm * q).sum(-1, keepdim=True).abs().clamp(min=1)
        return self.head((memory @ q[:, :, None])[..., 0] / below), memory, norm


MODELS: dict[str, Callable[[], Any]] = {"gru": Gru, "lstm": Lstm, "matrix-memory": MatrixMemory}


def zeros(model: Any, rows: int) -> list[Tensor]:
    return [torch.zeros(*shape[:axis], rows, *shape[axis:]) for shape, axis in model.states]


def exported(path: Path, model: Any, *, dynamo: bool, rows: int | None) -> Path:
    """Exports the model. rows: the fixed batch, None for a free one."""
    names = [f"s{n}" for n in range(len(model.states))]
    arguments = (torch.zeros(rows or 2, dtype=torch.int64), *zeros(model, rows or 2))
    axes = [0, *(axis for _, axis in model.states)]
    options: dict[str, Any] = {
        "input_names": ["tokens", *names],
        "output_names": ["logits", *(f"{n}.next" for n in names)],
    }
    if rows is None and dynamo:
        batch = torch.export.Dim("batch")
        options["dynamic_shapes"] = tuple({axis: batch} for axis in axes)
    elif rows is None:
        options["dynamic_axes"] = {
            name: {axis: "batch"} for name, axis in zip(options["input_names"], axes, strict=True)
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        torch.onnx.export(model, arguments, str(path), dynamo=dynamo, verbose=False, **options)
    return path


def imports(graph: Path, states: int) -> Bundle:
    """Imports a graph, and returns its bundle."""
    names = graph.with_name("names.txt")
    names.write_text("\n".join(WORDS))
    pairs = [word for n in range(states) for word in ("--state", f"s{n}=s{n}.next")]
    bundles = graph.with_name("bundles")
    assert main(["import", str(graph), "--vocabulary", str(names), "--bundles", str(bundles), *pairs]) == 0
    return Bundle.read(bundles / graph.stem)


def torch_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    state = zeros(model, 1)
    with torch.no_grad():
        for token in tokens:
            logits, *state = model(torch.tensor([token]), *state)
    found: np.ndarray = logits[0].numpy()
    return found


@pytest.mark.parametrize("rows", [None, 1], ids=["free batch", "batch of 1"])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_an_exporter_answers_as_torch_does(
    tmp_path: Path, name: str, dynamo: bool, rows: int | None
) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    bundle = imports(exported(tmp_path / f"{name}.onnx", model, dynamo=dynamo, rows=rows), len(model.states))
    assert isinstance(bundle.manifest.architecture, ImportedGraph)
    run = OnnxGraphs(bundle).run
    tokens = np.random.default_rng(1).integers(SIZE, size=(3, 20))
    outputs = run("window", {"tokens": tokens, "lengths": np.array([20, 1, 7])})
    for row, length in enumerate((20, 1, 7)):
        expected = log_softmax(torch_logits(model, tokens[row, :length].tolist()))
        assert np.abs(log_softmax(outputs["logits"][row]) - expected).max() < 1e-5


def test_the_forgetting_of_an_imported_graph_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The distances are those of torch's own runs."""
    torch.manual_seed(3)
    model = Gru().eval()
    bundle = imports(exported(tmp_path / "gru.onnx", model, dynamo=False, rows=None), 1)
    words = np.random.default_rng(2).integers(2, SIZE, size=400)
    (tmp_path / "text.txt").write_text("".join(WORDS[word] for word in words) + "\n")
    command = ["audit", str(bundle.path), "--data", str(tmp_path / "text.txt"), "--report", str(tmp_path / "report")]
    assert main([*command, "--positions", "20", "--max-window", "16"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in ("an imported graph, of which everything below is measured", "not certified: it is an imported graph"):
        assert said in printed
    assert "gradients: not measured" in printed and "measured, every position" in printed
    report = AuditReport.model_validate_json((tmp_path / "report" / "audit.json").read_text())
    assert isinstance(report.model.architecture, ImportedGraph)
    assert (report.gradients, report.text.gradient_positions) == ((), 0)
    assert report.recommended.certified is None and (tmp_path / "report" / "audit.png").exists()
    variations = [at.total_variation.max for at in report.windows]
    assert [at.k for at in report.windows] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert variations[0] > 100 * variations[-1] > 0

    last = next(at for at in report.windows if at.k == 2)
    stream = [1, *(int(word) for word in words), 1]  # the text of one line between two line breaks
    positions = np.unique(np.linspace(31, len(stream) - 2, 20).round().astype(int))
    whole = [torch.softmax(torch.from_numpy(torch_logits(model, stream[: at + 1])), -1) for at in positions]
    short = [torch.softmax(torch.from_numpy(torch_logits(model, stream[at - 1 : at + 1])), -1) for at in positions]
    apart = [float((one - other).abs().sum()) / 2 for one, other in zip(whole, short, strict=True)]
    assert last.total_variation.max == pytest.approx(max(apart), abs=1e-5)
    assert last.total_variation.median == pytest.approx(float(np.median(apart)), abs=1e-5)


def test_other_commands_refuse_a_bundle_of_an_imported_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = imports(exported(tmp_path / "gru.onnx", Gru(), dynamo=False, rows=None), 1)
    for command in (["export", str(bundle.path), "--bundles", str(tmp_path)], ["cache", str(bundle.path)]):
        assert main(command) == 2
        assert "is an imported graph, of which no layer is known" in " ".join(capsys.readouterr().err.split())
