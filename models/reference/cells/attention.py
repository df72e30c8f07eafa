"""Causal attention over the last tokens. For each head, with the distance j from the query's token,

q, k, v = U x + b,  a_j = q_t . k_(t - j) / sqrt(units / heads) + p_j,  y_t = sum_j exp(a_j) v_(t - j) / sum_j exp(a_j)

The sums are over the tokens that exist.
"""

from __future__ import annotations

import numpy as np

from wane.models.layer_registry import Attention
from wane.models.reference.functions import Array, affine
from wane.models.weights import CellWeights


def step(cell: CellWeights, x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the output and the state after one token. state: the keys and values of the tokens before, oldest first,
    and whether there is such a token."""
    layer = cell.layer
    assert isinstance(layer, Attention)
    query, key, value = np.split(affine(x, cell.tensors["weight"], cell.tensors["bias"]), 3, axis=-1)
    keys, values = (np.concatenate([old, new[:, None]], axis=1) for old, new in zip(state, (key, value), strict=False))
    filled = np.concatenate([state[2], np.ones((len(x), 1), dtype=x.dtype)], axis=1)
    width, y = layer.units // layer.heads, np.empty_like(query)
    for head in range(layer.heads):
        own = slice(head * width, (head + 1) * width)
        scores = np.einsum("bw,bjw->bj", query[:, own], keys[:, :, own]) / np.sqrt(width)
        scores = scores + cell.tensors["positions"][head, ::-1] + (1 - filled) * -1e9
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        y[:, own] = np.einsum("bj,bjw->bw", shares, values[:, :, own])
    return y, keys[:, 1:], values[:, 1:], filled[:, 1:]
