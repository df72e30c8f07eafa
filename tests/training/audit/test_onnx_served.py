"""Tests that graphs of three exporters are audited, exported as bundles, and served with the numbers that onnxruntime
computes from the files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.service.live_server import live_server, post
from tests.training.audit.graph.language_models import VOCABULARY, keras_model
from tests.training.corpora import write_events
from wane.cli import main
from wane.models.bundle import Bundle
from wane.training.audit.graph.onnx_file import read_onnx
from wane.training.errors import ForeignError

pytestmark = pytest.mark.slow

NAMES = ("<eos>", "<unk>", *"abcdefghi")
assert len(NAMES) == VOCABULARY


class TorchModel(nn.Module):
    """A language model with dropout, whose output layer may be tied to the embedding."""

    def __init__(
        self, cell: str, layers: int = 1, *, tied: bool = False, batch_first: bool = True, **keys: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(11)
        keys |= {"dropout": 0.3} if layers > 1 else {}
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.2)
        self.recurrent = getattr(nn, cell)(8, 8, layers, batch_first=batch_first, **keys)
        self.output = nn.Linear(8, VOCABULARY)
        if tied:
            self.output.weight = self.embedding.weight
        with torch.no_grad():  # small enough recurrent matrices make a certificate possible
            for name, weight in self.recurrent.named_parameters():
                weight.mul_(0.3 if "weight_hh" in name else 1)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.recurrent(self.dropout(self.embedding(tokens)))[0]
        return torch.log_softmax(self.output(self.dropout(y)), -1)


def export(module: nn.Module, path: Path, *, dynamo: bool, fixed: bool = False) -> Path:
    """Exports a module with one of torch's exporters. Both sizes of the tokens are free, unless they are `fixed`."""
    tokens = torch.zeros(3, 5, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
            torch.onnx.export(
                module.eval(), (tokens,), path, dynamo=True, dynamic_shapes=None if fixed else (free,), verbose=False
            )
        else:
            axes = {"tokens": {0: "batch", 1: "time"}}
            names: Any = {"input_names": ["tokens"], "output_names": ["logprobs"], "dynamic_axes": axes}
            torch.onnx.export(module.eval(), (tokens,), path, dynamo=False, **names)
    return path


def audit(path: Path, folder: Path, name: str) -> int:
    """Runs `wane audit` on a file, and exports the bundle `folder/name`. Returns the exit status."""
    generator = np.random.default_rng(0)
    sessions = [[NAMES[2 + index] for index in generator.integers(9, size=12)] for _ in range(20)]
    write_events(folder.parent / "events.jsonl", sessions)
    (folder.parent / "names.json").write_text(json.dumps(NAMES))
    command = ["audit", str(path), "--data", str(folder.parent / "events.jsonl"), "--eos", "none", "--threads", "1"]
    command += ["--vocabulary", str(folder.parent / "names.json"), "--positions", "20", "--max-window", "16"]
    return main([*command, "--report", str(folder.parent / name), "--export", str(folder), "--name", name])


CASES = ("torchscript-gru", "torchscript-tanh", "torchscript-relu", "dynamo-lstm", "keras-lstm")
OTHERS = ("torchscript-lstm", "dynamo-gru")
TIED = ("torchscript-gru", "dynamo-gru")


def write(case: str, path: Path) -> Path:
    exporter, _, kind = case.partition("-")
    if exporter == "keras":
        return keras_model(kind.upper(), 2 if kind == "lstm" else 1, path)
    if kind in ("tanh", "relu"):
        module = TorchModel("RNN", nonlinearity=kind)
    else:
        module = TorchModel(kind.upper(), 2 if kind == "lstm" else 1, tied=case in TIED)
    return export(module, path / "model.onnx", dynamo=exporter == "dynamo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files CASE/model.onnx and the bundles bundles/CASE."""
    root = tmp_path_factory.mktemp("served")
    for case in CASES:
        (root / case).mkdir()
        assert audit(write(case, root / case), root / "bundles", case) == 0
    return root


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with (
        live_server(WANE_BUNDLES=str(folder / "bundles"), WANE_DEFAULT_MODEL=CASES[0]) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def theirs(path: Path, tokens: list[int]) -> NDArray[np.float64]:
    """Returns the log-probabilities (T, V) after each token, computed by onnxruntime from the file."""
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    fed = np.array([tokens], np.float32 if given.type == "tensor(float)" else np.int64)
    found: NDArray[np.float64] = session.run(None, {given.name: fed})[0][0].astype(np.float64)
    return np.log(found) if path.name.startswith("keras") else found


def served(answer: dict[str, Any]) -> NDArray[np.float64]:
    """Returns the log-probabilities of an answer by id, without the ids 0 and 1. Answers list neither `<eos>`, because
    the model has no start token, nor `<unk>`."""
    listed = {one["token_id"]: one["logprob"] for one in answer["predictions"]}
    return np.array([listed.get(index, np.nan) for index in range(2, VOCABULARY)])


@pytest.mark.parametrize("case", CASES)
def test_a_graph_is_served_with_the_numbers_of_its_file(http: httpx.Client, folder: Path, case: str) -> None:
    tokens = np.random.default_rng(5).integers(2, VOCABULARY, size=30).tolist()
    expected, everything = theirs(folder / case, tokens), {"top_k": VOCABULARY}
    post(http, "/v1/sessions", session=case, model=case)
    for place, token in enumerate(tokens):
        answer = post(http, f"/v1/sessions/{case}/tokens", tokens=[token], **everything)
        assert np.abs(served(answer) - expected[place, 2:]).max() < 1e-5
    post(http, f"/v1/sessions/{case}/rewind", position=10)
    rewound = post(http, f"/v1/sessions/{case}/tokens", tokens=tokens[10:], **everything)
    assert rewound["position"] == 30
    assert rewound["error_bound"] in (0, None)
    assert np.abs(served(rewound) - expected[-1, 2:]).max() < 1e-5
    ask = {"model": case, "tokens": tokens} | everything
    whole = post(http, "/v1/predict", mode="recurrent", **ask)
    assert np.abs(served(whole) - expected[-1, 2:]).max() < 1e-5
    window = post(http, "/v1/predict", mode="window", window=8, **ask)
    assert np.abs(served(window) - theirs(folder / case, tokens[-8:])[-1, 2:]).max() < 1e-5
    scores = np.array(post(http, "/v1/score", model=case, tokens=tokens)["logprobs"][1:])
    assert np.abs(scores - expected[np.arange(29), tokens[1:]]).max() < 1e-5


def test_the_bundles_are_certified_where_their_layers_are_proved_to_forget(folder: Path) -> None:
    manifests = {case: Bundle.read(folder / "bundles" / case).manifest for case in CASES}
    assert {case for case, one in manifests.items() if one.certificate.certified} >= {"torchscript-tanh"}
    assert {case for case, one in manifests.items() if one.architecture.tied} == set(TIED) & set(CASES)
    reports = {case: json.loads((folder / case / "audit.json").read_text()) for case in CASES}
    assert all(one["model"]["source"] == "onnx" and one["windows"] for one in reports.values())


@pytest.mark.parametrize("case", OTHERS)
def test_a_graph_is_read(tmp_path: Path, case: str) -> None:
    model, _ = read_onnx(write(case, tmp_path))
    assert (model.architecture.tied, len(model.architecture.layers)) == (case in TIED, 2 if "lstm" in case else 1)


def test_a_graph_of_fixed_sizes_is_read(tmp_path: Path) -> None:
    model, _ = read_onnx(export(TorchModel("LSTM", 2), tmp_path / "model.onnx", dynamo=True, fixed=True))
    assert model.notes[-1].startswith("checked with onnxruntime")


def test_an_rnn_that_the_dynamo_exporter_unrolled_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = export(TorchModel("RNN"), tmp_path / "model.onnx", dynamo=True, fixed=True)
    with pytest.raises(ForeignError, match=r"Perhaps the layers are unrolled.*dynamo=False"):
        read_onnx(path)


def test_a_bidirectional_lstm_is_refused(tmp_path: Path) -> None:
    module = TorchModel("LSTM", bidirectional=True)
    module.output = nn.Linear(16, VOCABULARY)
    path = export(module, tmp_path / "model.onnx", dynamo=False)
    with pytest.raises(ForeignError, match="its direction is bidirectional"):
        read_onnx(path)


def test_options_for_checkpoints_are_refused_for_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = keras_model("GRU", 1, tmp_path)
    (tmp_path / "events.jsonl").write_text('["a"]\n')
    command = ["audit", str(path), "--data", str(tmp_path / "events.jsonl"), "--vocabulary", str(path)]
    assert main([*command, "--map", "head=x"]) == 2
    assert "--map is for checkpoints" in " ".join(capsys.readouterr().err.split())
