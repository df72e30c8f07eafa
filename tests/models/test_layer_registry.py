"""Tests that every cell has all of its parts, or states the reason for a missing part, and that the parts of each cell
work together."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.bundles import export_words
from tests.models.random_models import architecture
from tests.training.audit.foreign_models import TORCH_CELLS
from wane.models.bundle import Bundle, verify_graphs
from wane.models.certificate import certify
from wane.models.constraints import project
from wane.models.export.parity import OnnxGraphs
from wane.models.layer_parts import PARTS, Part, load
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.networks import Network
from wane.models.reference import Reference
from wane.training.audit.checkpoint import read_checkpoint
from wane.training.audit.model import import_model

ROOT = Path(__file__).parents[2]

DEFINED: dict[Part, tuple[str, ...]] = {
    "torch": ("build",),
    "oracle": ("step",),
    "certificate": ("build_layer", "moved"),
    "constraint": ("constrain",),
    "export": ("build",),
}
"""For each part of a cell, the names of the functions that the cell's file must define. The certificate of a cell with
finite memory is its reach, and its file defines how far its output may be from 0, and from exact arithmetic."""

CONTRACTION = 0.75


def test_every_cell_name_has_an_entry() -> None:
    assert set(get_args(Kind)) == set(KINDS)
    assert set(get_args(Part)) == set(PARTS) == set(DEFINED)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("cell", KINDS)
def test_a_cell_has_each_part_or_a_reason_why_not(cell: Kind, part: Part) -> None:
    if part in KINDS[cell].missing:
        assert KINDS[cell].missing[part]
        assert find_spec(f"{PARTS[part]}.{KINDS[cell].module}") is None
    else:
        for function in ("furthest", "rounding") if part == "certificate" and KINDS[cell].finite else DEFINED[part]:
            assert callable(getattr(load(part, KINDS[cell].module), function))


@pytest.mark.parametrize("part", PARTS)
def test_a_folder_of_parts_has_only_the_cells_files(part: Part) -> None:
    files = {path.stem for path in (ROOT / PARTS[part].replace(".", "/")).glob("*.py")} - {"__init__"}
    assert files == {info.module for info in KINDS.values() if part not in info.missing}


def test_the_audit_imports_every_recurrent_layer_of_torch() -> None:
    layers = {kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.RNNBase)}
    assert set(TORCH_CELLS.values()) == layers - {nn.RNNBase}
    assert all(info.missing["audit"] for cell, info in KINDS.items() if cell not in TORCH_CELLS)


@pytest.mark.parametrize("cell", FADING)
def test_a_small_model_passes_through_all_parts(tmp_path: Path, cell: Kind) -> None:
    model = architecture(cell, layers=2, gate_caps=(CONTRACTION,) * 2 if KINDS[cell].input_gated else ())
    torch.manual_seed(0)
    network = Network(model)
    with torch.no_grad():
        for tensor in network.layers.parameters():
            tensor.mul_(4)
    weights = network.weights()
    before = certify(model, {name: tensor.numpy() for name, tensor in weights.items()}, 8, None)
    assert any(layer.factor > CONTRACTION for layer in before.layers) is ("constraint" not in KINDS[cell].missing)
    project(network, [CONTRACTION] * 2)
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    # The export fails unless torch, the oracle and the graphs agree.
    written = export_words(tmp_path / "model", model, arrays, max_window=128, torch_network=network)
    bundle = Bundle.read(tmp_path / "model")  # Reading the bundle fails unless the certificate matches the weights.
    assert bundle.manifest == written
    assert all(layer.factor <= CONTRACTION for layer in written.certificate.layers)
    assert written.certificate.certified
    run = OnnxGraphs(bundle).run
    assert 0 < verify_graphs(bundle, run) < 1e-5
    outputs = run("window", {"tokens": np.array([[1, 2, 3]]), "lengths": np.array([3])})
    assert ("radius" in outputs) is KINDS[cell].input_gated


@pytest.mark.parametrize("cell", TORCH_CELLS)
def test_the_oracle_matches_the_torch_layer_of_an_imported_checkpoint(tmp_path: Path, cell: Kind) -> None:
    relu: dict[str, Any] = {"nonlinearity": "relu"} if cell == "rnn_relu" else {}
    torch.manual_seed(0)
    embedding, recurrent, head = nn.Embedding(11, 5), TORCH_CELLS[cell](5, 6, **relu), nn.Linear(6, 11)
    parts = nn.ModuleDict({"embedding": embedding, "rnn": recurrent, "head": head})
    torch.save(parts.state_dict(), tmp_path / "model.pt")
    model = import_model(read_checkpoint(tmp_path / "model.pt"), **relu)
    assert model.architecture.family == cell
    tokens, reference = [3, 7, 1, 3], Reference(model.architecture, model.weights)
    state = reference.zero_state(1)
    for token in tokens:
        logits, _, state = reference.step(np.array([token]), state)
    with torch.no_grad():
        expected = head(recurrent(embedding(torch.tensor(tokens)[:, None]))[0])[-1]
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-6)
