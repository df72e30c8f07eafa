"""A layer that is to be constrained: its weights, and the possible inputs of its cell."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from wane.models.constraints.comparison import Drive


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One layer's weights, and the range of the input's contribution to each pre-activation.

    matrix: (G H, H). bias: (G H), the recurrent bias. input_matrix: (G H, I). input_bias: (G H). These are the layer's
    own tensors and are modified in place. least, greatest: float64 (G H), the range of `input_matrix x + input_bias`
    over all admissible x.
    """

    matrix: Tensor
    bias: Tensor
    input_matrix: Tensor
    input_bias: Tensor
    least: Tensor
    greatest: Tensor

    def drive(self) -> Drive:
        """Returns bounds of the terms that are added to the recurrent matrix's product to give the pre-activations."""
        return Drive(self.least, self.greatest, self.bias.double())


@dataclass(frozen=True, slots=True)
class ConstrainedLayer:
    """One layer of a network.

    vocabulary: (V, I), the embeddings if they are the layer's inputs, else None. below: (I), the greatest absolute
    values of the outputs of the layer below, if known.
    """

    module: nn.Module
    vocabulary: Tensor | None
    below: Tensor | None

    def tensor(self, name: str) -> Tensor:
        """Returns the cell's parameter of this name."""
        value = getattr(self.module.cell, name)
        assert isinstance(value, Tensor), f"{name} is not a tensor: this is a bug"
        return value

    def recurrence(self) -> Recurrence:
        """Returns the layer's weights, with the range of the input's contribution over all admissible inputs.

        If the layer's inputs are the embeddings, directly or through a LayerNorm, the range is exact. Otherwise the
        range covers all outputs of the layer's LayerNorm, gain * n + shift with |n| <= sqrt(d) and n of mean zero. In a
        network without LayerNorms, it covers all outputs of the layer below, |x_i| <= below_i.
        """
        norm = getattr(self.module, "norm", None)
        own, own_bias = self.tensor("weight_ih_l0"), self.tensor("bias_ih_l0")
        weight, bias = own.double(), own_bias.double()
        if self.vocabulary is not None:
            rows = norm(self.vocabulary) if isinstance(norm, nn.LayerNorm) else self.vocabulary
            driven = rows.double() @ weight.T
            least, greatest = driven.amin(0) + bias, driven.amax(0) + bias
        elif isinstance(norm, nn.LayerNorm):
            middle = weight @ norm.bias.double() + bias
            scaled = weight * norm.weight.double()
            reach = (scaled - scaled.mean(1, keepdim=True)).norm(dim=1) * weight.shape[1] ** 0.5
            least, greatest = middle - reach, middle + reach
        else:
            assert self.below is not None, "the outputs of the layer below have no known bounds: this is a bug"
            reach = weight.abs() @ self.below
            least, greatest = bias - reach, bias + reach
        return Recurrence(self.tensor("weight_hh_l0"), self.tensor("bias_hh_l0"), own, own_bias, least, greatest)
