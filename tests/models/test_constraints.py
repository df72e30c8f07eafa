from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.random_models import architecture, random_weights
from wane.models.certificate import certify
from wane.models.constraints import project
from wane.models.constraints.cells.gru import GruComparison
from wane.models.constraints.cells.lstm import LstmComparison
from wane.models.constraints.comparison import Comparison, Drive
from wane.models.constraints.gated_memory import fits, nearest, shrink
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.networks import Network

CONSTRAINED = [cell for cell, info in KINDS.items() if "constraint" not in info.missing]


def network(cell: Kind, block: str, scale: float, layers: int = 2, cap: float = 1.0) -> Network:
    torch.manual_seed(7)
    caps = (cap,) * layers if KINDS[cell].input_gated else ()
    built = Network(architecture(cell, block, layers, vocabulary_size=50, hidden=12, gate_caps=caps))
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            if "cell" in name:
                tensor.mul_(scale)
    return built


def largest_factor(built: Network) -> float:
    weights = {name: tensor.numpy() for name, tensor in built.weights().items()}
    return max(layer.factor for layer in certify(built.architecture, weights, 8, None).layers)


def sizes(cell: Kind, tensor: Tensor) -> Tensor:
    """Returns the sizes that a projection may not increase: the absolute value of each entry if the cell has gates, and
    otherwise the norm of the matrix."""
    return tensor.norm() if KINDS[cell].gates == 1 else tensor.abs()


@pytest.mark.parametrize("limit", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("block", ["plain", "residual"])
@pytest.mark.parametrize("cell", CONSTRAINED)
def test_projected_weights_are_contractive_by_the_independent_bound(cell: Kind, block: str, limit: float) -> None:
    built = network(cell, block, scale=5.0)
    assert largest_factor(built) > (limit if cell == "lru" else 1)  # |lambda| < 1 for any weights
    project(built, [limit] * 2)
    assert largest_factor(built) <= limit


@pytest.mark.parametrize("cell", [cell for cell in FADING if cell not in CONSTRAINED])
def test_a_cell_without_a_constraint_is_contractive_because_of_its_gate_caps(cell: Kind) -> None:
    built = network(cell, "residual", scale=50.0, cap=0.9)
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    project(built, [0.9] * 2)
    assert largest_factor(built) <= 0.9 * (1 + 1e-6)
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("cell", CONSTRAINED)
def test_weights_within_the_limit_are_not_changed(cell: Kind) -> None:
    built = network(cell, "plain", scale=5.0)
    project(built, [0.5] * 2)
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    project(built, [0.9] * 2)
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_very_large_recurrent_matrix_is_shrunk_but_not_zeroed(cell: Kind, scale: float) -> None:
    built = network(cell, "plain", scale=1.0)
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            if "weight_hh" in name:
                tensor.mul_(scale)
    project(built, [0.9] * 2)
    assert largest_factor(built) <= 0.9
    for name, tensor in built.state_dict().items():
        if "weight_hh" in name:
            assert tensor.abs().max() > 1e-2, name


@pytest.mark.parametrize("cell", FADING)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    block=st.sampled_from(["plain", "residual", "front"]),
    layers=st.integers(1, 3),
    recurrent=st.floats(-2, 8),
    driven=st.floats(-2, 3),
    limits=st.tuples(*[st.floats(0.05, 0.995)] * 3),
)
def test_random_weights_are_certified_after_a_projection_that_enlarges_no_matrix(
    cell: Kind, seed: int, block: str, layers: int, recurrent: float, driven: float, limits: tuple[float, ...]
) -> None:
    limits = limits[:layers]
    fields: dict[str, object] = {"gate_caps": limits} if KINDS[cell].input_gated else {}
    if block == "front":
        fields["front"] = {"blocks": 1, "kernel_size": 2, "feed_forward": 3}
    small = architecture(cell, "plain" if block == "plain" else "residual", layers, **fields)
    built = Network(small)
    wild = random_weights(small, seed, 10.0**recurrent, 10.0**driven)
    built.load_weights({name: torch.from_numpy(tensor) for name, tensor in wild.items()})
    project(built, limits)
    once = {name: tensor.clone() for name, tensor in built.weights().items()}
    certified = certify(small, {name: tensor.numpy() for name, tensor in once.items()}, 2, None)
    for layer, limit in zip(certified.layers, limits, strict=True):
        # The certificate rounds the cap to float32, which can increase the factor.
        assert layer.factor <= limit * (1 + (1e-7 if KINDS[cell].input_gated else 0)), layer
    for name, tensor in once.items():
        before = torch.from_numpy(wild[name])
        if tensor.ndim > 1:
            assert torch.all(sizes(cell, tensor) <= sizes(cell, before) * (1 + 1e-5)), name
    project(built, limits)
    for name, tensor in built.weights().items():
        torch.testing.assert_close(tensor, once[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("make", "gates"), [(LstmComparison, 4), (GruComparison, 3)], ids=["lstm", "gru"])
def test_shrinking_few_rows_changes_less_than_one_common_factor(
    make: Callable[[Drive, Tensor], Comparison], gates: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, target = 8, 0.9
    matrix = torch.randn(gates * hidden, hidden, generator=generator, dtype=torch.float64) / 20
    matrix[:: 2 * hidden + 1] *= 100
    middle = 0.3 * torch.randn(gates * hidden, generator=generator, dtype=torch.float64) - 1.5
    drive = Drive(middle - 1, middle + 1, torch.zeros(gates * hidden, dtype=torch.float64))
    found = nearest(matrix, partial(make, drive), target)
    scaled = shrink(matrix, lambda tried: fits(make(drive, tried), target))
    assert fits(make(drive, found), target) and fits(make(drive, scaled), target)
    assert not fits(make(drive, matrix), target)
    assert (found - matrix).norm() < 0.9 * (scaled - matrix).norm()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_an_open_memory_gate_stays_open_if_the_bound_holds(cell: Kind) -> None:
    """Uses a memory gate (the LSTM's forget gate, the GRU's update gate) of 0.95 and almost no recurrent weights, so
    the factor is already below the limit 0.98. The projection must then change no weight. A projection that changes
    weights would first lower the gate's bias.
    """
    built = network(cell, "plain", scale=0.001, layers=1)
    with torch.no_grad():
        built.get_parameter("layers.0.cell.bias_ih_l0")[12:24] = 2.95
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    project(built, [0.98])
    assert 0.95 < largest_factor(built) <= 0.98
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, before[name]), name
