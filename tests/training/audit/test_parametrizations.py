from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.training.audit.foreign_models import Plain, imported, saved
from tests.training.audit.test_model import assert_same
from wane.training.errors import ForeignError

WEIGHTS = [("rnn", "weight_hh_l0"), ("rnn", "weight_ih_l0"), ("fc", "weight"), ("embedding", "weight")]


def _weight_norm_of_the_whole(module: nn.Module, name: str) -> None:
    parametrizations.weight_norm(module, name, dim=None)  # type: ignore[arg-type]


def _spectral(module: nn.Module, name: str) -> None:
    parametrizations.spectral_norm(module, name, n_power_iterations=3)


@pytest.mark.parametrize("weight", WEIGHTS, ids=".".join)
@pytest.mark.parametrize(
    ("how", "note"),
    [
        (parametrizations.weight_norm, "weight norm"),
        (lambda module, name: parametrizations.weight_norm(module, name, dim=1), "weight norm"),
        (_weight_norm_of_the_whole, "weight norm"),
        (_spectral, "spectral norm"),
        (lambda module, name: prune.l1_unstructured(module, name, 0.3), "pruning"),
    ],
    ids=["weight norm", "weight norm of columns", "weight norm of the whole", "spectral norm", "pruning"],
)
def test_a_weight_that_is_stored_as_a_product_is_multiplied_out(
    tmp_path: Path, how: Callable[[nn.Module, str], object], note: str, weight: tuple[str, str]
) -> None:
    module = Plain("gru")
    part, name = weight
    how(module.get_submodule(part), name)
    if note == "weight norm":
        with torch.no_grad():  # as if training had changed the norms
            module.get_submodule(part).get_parameter(f"parametrizations.{name}.original0").mul_(1.7)
    module.eval()
    notes = assert_same(saved(tmp_path / "model.pt", module.state_dict()), module)
    assert [one for one in notes if one.startswith(f"{part}.{name} is assumed to be computed from ") and note in one]


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight norm", "spectral norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_old_names_of_weight_norm_and_spectral_norm_are_known(
    tmp_path: Path, norm: Callable[[nn.Module], nn.Module]
) -> None:
    module = Plain("lstm")
    norm(module.get_submodule("fc"))
    module(torch.zeros(2, 1, dtype=torch.long))
    assert_same(saved(tmp_path / "model.pt", module.eval().state_dict()), module)


def test_another_parametrisation_is_named(tmp_path: Path) -> None:
    module = Plain("gru")
    parametrizations.orthogonal(module.get_submodule("fc"), "weight")
    with pytest.raises(ForeignError, match=r"fc.parametrizations.weight.*cannot multiply out.*\(fc, 'weight'\)"):
        imported(saved(tmp_path / "model.pt", module.state_dict()))


class _Product(nn.Module):
    """A parametrisation of another program: W = A * B or A @ B, with two tensors as weight norm has."""

    def __init__(self, first: tuple[int, ...], second: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes = first, second

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one @ other if one.shape[-1] == other.shape[0] and one.shape != other.shape else one * other

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.rand(shape) for shape in self.shapes)


@pytest.mark.parametrize(
    ("first", "second"),
    [((11, 6), (11, 6)), ((1, 1), (11, 6)), ((11, 2), (2, 6)), ((11, 1), (1, 6)), ((1,), (11, 6)), ((6,), (11, 6))],
    ids=str,
)
def test_a_product_that_has_not_the_shapes_of_weight_norm_is_refused(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    module = nn.Module()
    module.fc = nn.Linear(6, 11)
    parametrize.register_parametrization(module.fc, "weight", _Product(first, second))
    with pytest.raises(ForeignError, match=r"fc\.weight: the shape .* is not that of the norms of a weight norm"):
        imported(saved(tmp_path / "model.pt", module.state_dict()))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("weight_orig", "weight_mask"), "its mask is not one zero or one for each weight"),
        (("weight_orig", "weight_u", "weight_v"), "the vectors of its spectral norm are not of length 1"),
    ],
    ids=["pruning", "spectral norm"],
)
def test_values_that_torch_does_not_store_are_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    module = Plain("gru")
    state = module.state_dict()
    weight = state.pop("fc.weight")
    others = [0.5 * torch.ones_like(weight)] if len(names) == 2 else [2 * torch.ones(size) for size in weight.shape]
    state |= {f"fc.{name}": value for name, value in zip(names, [weight, *others], strict=True)}
    with pytest.raises(ForeignError, match=f"fc.weight: {message}"):
        imported(saved(tmp_path / "model.pt", state))
