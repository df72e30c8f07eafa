"""Tests the loss term that makes predictions provable. Compares the state error in this term with the error bound of a
request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wane.models.architecture import Architecture
from wane.models.cells.gated import GatedCell
from wane.models.certificate.request import RequestBound
from wane.models.layer_registry import Convolution, Gated
from wane.models.networks import Network
from wane.training.config import Experiment, ProofConfig
from wane.training.proof import ProofPressure

CONFIG = ProofConfig(weight=0.1, ramp=1)


def network(gate_bias: float) -> Network:
    """Returns a network with a front of convolutions that reaches 2 tokens back, and one layer of six gated units after
    it. The gates are closer to 1 if `gate_bias` is larger."""
    torch.manual_seed(3)
    architecture = Architecture(
        vocabulary_size=20,
        embedding=8,
        layers=(
            Convolution(units=8, block="front", kernel_size=3, feed_forward=5),
            Gated(units=6, block="residual", feed_forward=6, gate_cap=0.98),
        ),
    )
    built = Network(architecture)
    with torch.no_grad():
        built.get_parameter("layers.0.cell.bias")[:6] = gate_bias
    return built


def run(built: Network, time: int = 24, config: ProofConfig = CONFIG) -> tuple[torch.Tensor, float, torch.Tensor]:
    pressure = ProofPressure(built, config)
    tokens = torch.randint(20, (time, 16), generator=torch.Generator().manual_seed(5))
    built.train()
    built(tokens)
    pressed, proved = pressure(0)
    return pressed, proved, tokens


def test_the_loss_closes_open_gates_and_ignores_closed_gates() -> None:
    built = network(gate_bias=6.0)
    pressed, proved, _ = run(built)
    pressed.backward()
    assert pressed.item() > 0 and proved < 0.5
    gradient = built.get_parameter("layers.0.cell.bias").grad
    assert gradient is not None and (gradient[:6] > 0).all()
    pressed, proved, _ = run(network(gate_bias=-6.0))
    assert (pressed.item(), proved) == (0.0, 1.0)


def test_the_state_error_is_close_to_the_bound_of_the_request() -> None:
    built = network(gate_bias=2.0)
    _, _, tokens = run(built)
    cell = built.get_submodule("layers.0.cell")
    assert isinstance(cell, GatedCell) and cell.gates is not None
    gates = cell.gates.detach().double().numpy()
    error = 2 * gates[2:].prod(axis=0)
    weights = {name: tensor.numpy() for name, tensor in built.weights().items()}
    bound = RequestBound(built.architecture, weights)(tokens.T.numpy().astype(np.int64))
    proved = bound.steps[0].error[0].box
    assert (proved <= error * (1 + 1e-4)).all()
    assert (proved >= error * 0.2).all()


def test_the_network_stays_in_training_mode_and_the_lead_gets_no_gradient() -> None:
    built = network(gate_bias=3.0)
    pressed, _, _ = run(built)
    assert built.training
    pressed.backward()
    assert built.head.bias.grad is None or not built.head.bias.grad.any()


def test_a_longer_window_extrapolates_the_gates() -> None:
    reach, time = 2, 24
    pressed = {}
    for window in (None, time, reach + 2 * (time - reach)):
        config = ProofConfig(weight=0.1, ramp=1, ceiling=500.0, slack=50.0, window=window)
        built = network(gate_bias=3.0)
        with torch.no_grad():  # Without these weights, the gates do not depend on the tokens.
            built.get_parameter("layers.0.cell.weight")[:6] = 0
        pressed[window], _, _ = run(built, time, config)
    gate = 0.98 * torch.sigmoid(torch.tensor(3.0)).item()
    assert pressed[time].item() == pytest.approx(pressed[None].item(), rel=1e-6)
    longest = max(window for window in pressed if window is not None)
    expected = pressed[None].item() + 0.1 * (time - reach) * np.log(gate)
    assert pressed[longest].item() == pytest.approx(expected, rel=1e-3)


def test_the_ramp_scales_the_loss_linearly() -> None:
    built = network(gate_bias=6.0)
    pressure = ProofPressure(built, ProofConfig(weight=0.1, ramp=10))
    built(torch.randint(20, (24, 4), generator=torch.Generator().manual_seed(5)))
    first, _ = pressure(0)
    late, _ = pressure(30)
    assert late.item() == pytest.approx(10 * first.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"cell": "lstm"}, "cell = 'gated'"),
        ({"cell": "gated", "layers": 2, "block": "residual"}, "one layer"),
        (
            {"cell": "gated", "block": "residual", "front": {"blocks": 5, "kernel_size": 5, "feed_forward": 4}},
            "reach, 20",
        ),
    ],
)
def test_an_unsupported_model_is_refused(model: dict[str, object], named: str) -> None:
    record = {
        "name": "x",
        "model": {"hidden": 8} | model,
        "data": {"kind": "text"},
        "training": {"steps": 1, "chunk": 16, "proof": {"weight": 0.1}},
    }
    with pytest.raises(ValueError, match=named):
        Experiment.model_validate(record)
