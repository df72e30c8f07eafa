from __future__ import annotations

import pytest
import torch

from models.certificate import certify
from models.constraints import project
from models.manifest import Architecture, Cell
from models.networks import Network

CELLS: list[Cell] = ["linear", "rnn_tanh", "rnn_relu", "gru", "lstm", "gated"]


def network(cell: Cell, block: str, scale: float, layers: int = 2, cap: float = 1.0) -> Network:
    torch.manual_seed(7)
    architecture = Architecture.model_validate(
        {"cell": cell, "vocabulary_size": 50, "embedding": 12, "hidden": 12, "layers": layers, "block": block}
        | {"gate_caps": (cap,) * layers if cell == "gated" else ()}
    )
    built = Network(architecture)
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            if "cell" in name:
                tensor.mul_(scale)
    return built


def largest_factor(built: Network) -> float:
    weights = {name: tensor.numpy() for name, tensor in built.weights().items()}
    return max(layer.factor for layer in certify(built.architecture, weights, 8, None).layers)


@pytest.mark.parametrize("limit", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("block", ["plain", "residual"])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell != "gated"])
def test_projected_weights_are_contractive_by_the_independent_bound(cell: Cell, block: str, limit: float) -> None:
    built = network(cell, block, scale=5.0)
    assert largest_factor(built) > 1
    project(built, [limit] * 2)
    assert largest_factor(built) <= limit


def test_capped_gates_are_contractive_whatever_the_weights() -> None:
    assert largest_factor(network("gated", "residual", scale=50.0, cap=0.9)) <= 0.9 * (1 + 1e-6)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell != "gated"])
def test_weights_within_the_limit_are_not_touched(cell: Cell) -> None:
    built = network(cell, "plain", scale=5.0)
    project(built, [0.5] * 2)
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    project(built, [0.9] * 2)
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_wild_recurrent_matrix_is_shrunk_and_not_wiped_out(cell: Cell, scale: float) -> None:
    built = network(cell, "plain", scale=1.0)
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            if "weight_hh" in name:
                tensor.mul_(scale)
    wild = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    project(built, [0.9] * 2)
    assert largest_factor(built) <= 0.9
    for name, tensor in built.state_dict().items():
        if "weight_hh" in name:
            by = tensor / wild[name]
            assert 0 < by.min() <= by.max() < 1, name
            torch.testing.assert_close(by, torch.full_like(by, float(by.mean())))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_an_open_memory_gate_is_left_open_where_the_bound_holds(cell: Cell) -> None:
    """A memory gate of 0.95, over the share of 0.98 that the cap would leave it, and hardly any recurrence."""
    built = network(cell, "plain", scale=0.001, layers=1)
    with torch.no_grad():
        built.layers[0].cell.bias_ih_l0[12:24] = 2.95
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    project(built, [0.98])
    assert 0.95 < largest_factor(built) <= 0.98
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, before[name]), name
