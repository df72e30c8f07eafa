"""Compares the sampled softmax with the full softmax on a small vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wane.models.networks import Network
from wane.training.config import ModelConfig
from wane.training.losses.sampled_softmax import POWER, SampledSoftmax, full_losses, token_losses

SIZE = 40
COUNTS = torch.arange(SIZE).flip(0)


def network() -> Network:
    torch.manual_seed(2)
    network = Network(ModelConfig(cell="gru", hidden=6, embedding=9, tied=False).architecture(SIZE))
    with torch.no_grad():
        network.head.bias.normal_()
    return network


def case() -> tuple[Network, torch.Tensor, torch.Tensor]:
    model = network()
    return model, torch.randn(30, 6), torch.randint(SIZE, (30,))


def test_the_estimate_of_the_sum_is_unbiased() -> None:
    model, hidden, targets = case()
    hidden, targets = hidden[:4], targets[:4]
    sampled = SampledSoftmax(COUNTS, 8)
    with torch.no_grad():
        logits = model.logits(hidden).double()
        own = logits.gather(1, targets[:, None])[:, 0]
        estimates = torch.stack(
            [torch.exp(sampled.losses(model, hidden, targets).double() + own) for _ in range(20_000)]
        )
    truth = torch.exp(logits).sum(1)
    error = estimates.std(0) / np.sqrt(len(estimates))
    assert ((estimates.mean(0) - truth).abs() < 5 * error).all()
    assert (error < 0.02 * truth).all()


@pytest.mark.parametrize("part", ["head.weight", "head.bias", "hidden"])
def test_losses_and_gradients_approach_those_of_the_full_softmax(part: str) -> None:
    model, hidden, targets = case()
    hidden.requires_grad_()
    of = dict(model.named_parameters()).get(part, hidden)
    full = token_losses(model.logits(hidden), targets).mean()
    (exact,) = torch.autograd.grad(full, of)
    errors = []
    for negatives in (16, 100_000):
        loss = SampledSoftmax(COUNTS, negatives).losses(model, hidden, targets).mean()
        (found,) = torch.autograd.grad(loss, of)
        errors.append((abs(loss.item() - full.item()), torch.linalg.norm(found - exact).item()))
    scale = torch.linalg.norm(exact).item()
    assert errors[1][0] < 0.01
    assert errors[1][1] < 0.05 * scale
    assert errors[1][1] < errors[0][1] / 5


def test_tokens_are_drawn_by_a_power_of_their_counts() -> None:
    model, hidden, targets = case()
    sampled = SampledSoftmax(COUNTS, 200_000)
    torch.manual_seed(0)
    drawn = torch.multinomial((COUNTS.double() + 1) ** POWER, 200_000, replacement=True)
    torch.manual_seed(0)
    found = sampled.losses(model, hidden[:1], targets[:1])
    logits = model.logits(hidden[0]).double()
    q = (COUNTS.double() + 1) ** POWER
    q /= q.sum()
    others = drawn[drawn != targets[0]]
    total = torch.exp(logits[targets[0]]) + (torch.exp(logits[others]) / (200_000 * q[others])).sum()
    assert found.item() == pytest.approx((torch.log(total) - logits[targets[0]]).item(), abs=1e-4)


def test_pieces_of_an_evaluation_have_the_losses_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hidden, targets = case()
    whole = token_losses(model.logits(hidden), targets)
    monkeypatch.setattr("wane.training.losses.sampled_softmax.LOGITS_AT_ONCE", 7 * SIZE)
    assert torch.allclose(full_losses(model, hidden, targets), whole, atol=1e-6)


def test_an_embedding_of_three_times_the_width_expresses_one_hot_input() -> None:
    """torch's GRU with one-hot input equals the network whose embedding has the columns of that GRU's input matrix and
    whose own input matrix is the identity."""
    torch.manual_seed(4)
    one_hot = torch.nn.GRU(SIZE, 5)
    model = Network(ModelConfig(cell="gru", hidden=5, embedding=15, tied=False).architecture(SIZE))
    own = one_hot.state_dict()
    cell = {name: torch.eye(15) if name == "weight_ih_l0" else own[name] for name in own}
    model.load_state_dict(
        model.state_dict()
        | {"embedding.weight": own["weight_ih_l0"].T}
        | {f"layers.0.cell.{name}": value for name, value in cell.items()}
    )
    with torch.no_grad():
        tokens = torch.randint(SIZE, (12, 3))
        expected, _ = one_hot(torch.nn.functional.one_hot(tokens, SIZE).float())
        assert torch.allclose(model(tokens)[0], expected, atol=1e-6)
