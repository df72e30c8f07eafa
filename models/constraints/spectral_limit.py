"""Limits spectral norms: projects matrices M onto `|M|_2 <= limit`, and lists the matrices of a residual block to which
the limit applies.

A residual block multiplies the error of its input by factors that depend on the spectral norms of its matrices. The
gain of the preceding LayerNorm is part of the matrix. Smaller norms give tighter proofs for a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wane.models.networks import Network

if TYPE_CHECKING:
    from wane.models.layer_registry import LayerSpec

TOUCHED = 1e-6
"""A matrix is changed if its norm exceeds the limit by more than this relative amount, which is larger than float32
rounding."""


@torch.no_grad()
def clip_singular_values(matrix: Tensor, limit: float, gain: Tensor | None = None) -> None:
    """Reduces `|matrix diag(gain)|_2` to at most `limit`, in place. gain: (columns), ones by default.

    The product is replaced by the nearest matrix (Frobenius norm) within the limit: its larger singular values become
    `limit`. Let s be the singular values above the limit, and U their left singular vectors. Then `matrix -= U diag(1 -
    limit / s) U' matrix`. There is no division by the gain, so a small gain does not inflate a weight.
    """
    # A singular value s is computed from the Gram matrix in float64. Its relative error is about 1e-16 (largest / s)^2,
    # where `largest` is the largest singular value. Badly scaled matrices are therefore clipped repeatedly.
    while True:
        folded = matrix.double() if gain is None else matrix.double() * gain.double()
        left, values = _singular_above(folded, limit * (1 + TOUCHED))
        if not len(values):
            return
        matrix.copy_(matrix - (left * (1 - limit / values)) @ (left.T @ matrix.double()))


def _singular_above(matrix: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Returns the left singular vectors (rows, N) and the singular values (N) above `limit`, from the smaller Gram
    matrix."""
    wide = matrix.shape[0] <= matrix.shape[1]
    squares, vectors = torch.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
    above = squares > limit**2
    values = squares[above].sqrt()
    vectors = vectors[:, above]
    return (vectors if wide else matrix @ vectors / values), values


def limit_spectral_norms(network: Network, limit: float) -> None:
    """Reduces the spectral norms of a residual network's matrices to at most `limit`, in place.

    In each block, the limited matrices are the cell's input matrix of each gate, `feed_forward_in`, `mix` and
    `feed_forward_out`. The cell's input matrices and `feed_forward_in` include the gain of the LayerNorm before them.
    """
    for layer, spec in zip(network.layers, network.architecture.fading, strict=True):
        for matrix, gain in limited_matrices(layer, spec):
            clip_singular_values(matrix, limit, gain)


def limited_matrices(layer: nn.Module, spec: LayerSpec) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields the limited matrices of one residual block, each with its gain."""
    name, _ = spec.input_tensors
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    for matrix in parameters[f"cell.{name}"].split(spec.units):
        yield matrix, parameters["norm.weight"]
    yield parameters["mix.weight"], None
    if "feed_forward_in.weight" in parameters:
        yield parameters["feed_forward_in.weight"], parameters["feed_forward_norm.weight"]
        yield parameters["feed_forward_out.weight"], None
