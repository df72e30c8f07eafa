from __future__ import annotations

import numpy as np
import pytest

from tests.models.random_models import architecture, random_weights
from wane.models.weights import WeightsError, check_weights, decode_weights, encode_weights, tensor_extents

MODEL = architecture("lstm", layers=2, tied=False, embedding=5)


def test_weights_round_trip_bit_for_bit() -> None:
    weights = random_weights(MODEL, seed=0)
    decoded = decode_weights(encode_weights(weights))
    check_weights(MODEL, decoded)
    for name, tensor in weights.items():
        assert np.array_equal(decoded[name], tensor), name


def test_every_extent_locates_its_tensor() -> None:
    weights = random_weights(MODEL, seed=0)
    data = encode_weights(weights)
    extents = tensor_extents(data)
    assert set(extents) == set(weights)
    for name, (offset, length) in extents.items():
        assert np.array_equal(np.frombuffer(data[offset : offset + length], "<f4"), weights[name].ravel()), name


def test_the_error_names_a_missing_tensor() -> None:
    weights = random_weights(MODEL, seed=0)
    del weights["layers.1.cell.bias_hh_l0"]
    with pytest.raises(WeightsError, match=r"tensor layers\.1\.cell\.bias_hh_l0 is missing"):
        check_weights(MODEL, weights)


def test_the_error_names_an_unknown_tensor() -> None:
    weights = random_weights(MODEL, seed=0) | {"extra": np.zeros(1, np.float32)}
    with pytest.raises(WeightsError, match="tensor extra is not a tensor of the architecture"):
        check_weights(MODEL, weights)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros((11, 6), np.float32), r"head\.weight has shape \[11, 6\], expected \[11, 7\]"),
        (np.zeros((11, 7)), r"head\.weight is float64, expected float32"),
        (np.full((11, 7), np.nan, np.float32), r"head\.weight holds a value that is not finite"),
    ],
)
def test_the_error_names_a_tensor_that_does_not_fit(tensor: np.ndarray, message: str) -> None:
    model = architecture("lstm", hidden=7, tied=False)
    with pytest.raises(WeightsError, match=message):
        check_weights(model, random_weights(model, seed=0) | {"head.weight": tensor})


def test_an_invalid_safetensors_file_is_refused() -> None:
    with pytest.raises(WeightsError, match="not a safetensors file"):
        decode_weights(b"\x00" * 64)
