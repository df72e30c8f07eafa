"""Tests of the file of transition tables, which an untrusted bundle may have."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from tests.models.caches import RandomTables
from wane.models.manifest import CacheModel, TransitionModel
from wane.models.transitions import LENGTHS, MOST_ENTRIES, OWN, Transitions, TransitionsError

SIZE = 7
TABLES = RandomTables(Random(2), SIZE)
EVEN = ((0.2,) * 5,) * LENGTHS


def test_the_file_is_read_as_it_was_written() -> None:
    tensors = TABLES.transitions.tensors()
    read = Transitions.read(TABLES.weights, tensors, SIZE).tensors()
    assert tensors.keys() == read.keys()
    for name, values in tensors.items():
        assert read[name].dtype == values.dtype
        assert read[name].tolist() == values.tolist()


def changed(**tensors: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return TABLES.transitions.tensors() | {name.replace("_", "."): values for name, values in tensors.items()}


TENSORS = TABLES.transitions.tensors()
EVENTS, EDGES, COUNTS = TENSORS["near.events"], TENSORS["near.edges"], TENSORS["near.counts"]
LONG = np.array([0, MOST_ENTRIES + 1, *[MOST_ENTRIES + 1] * (SIZE - 1)], np.uint32)
FAULTS: dict[str, dict[str, NDArray[Any]]] = {
    "the tensors are": {"other": EVENTS},
    "near.edges is int64": {"near_edges": EDGES.astype(np.int64)},
    "near.counts is float32 [2, ": {"near_counts": COUNTS[: len(COUNTS) // 2 * 2].reshape(2, -1)},
    "near.edges does not cut": {"near_edges": EDGES[:-1]},
    "near.edges does not": {"near_edges": np.concatenate([EDGES[:-1], EDGES[-1:] + 1])},
    "near.edges does": {"near_edges": np.array([0, len(EVENTS), 0, *[len(EVENTS)] * (SIZE - 2)], np.uint32)},
    "at most 200 are allowed": {"near_edges": LONG, "near_events": np.arange(MOST_ENTRIES + 1, dtype=np.uint32)},
    "near.counts has": {"near_counts": COUNTS[:-1]},
    "near.events is not ascending": {"near_events": EVENTS[::-1].copy()},
    "and below 7": {"near_events": np.where(EVENTS.max() == EVENTS, SIZE, EVENTS).astype(np.uint32)},
    "not a positive number": {"near_counts": np.where(np.arange(len(COUNTS)) == 1, np.nan, COUNTS).astype(np.float32)},
    "that is not a positive": {"near_counts": -COUNTS},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_of_the_file_is_named(message: str) -> None:
    with pytest.raises(TransitionsError) as error:
        Transitions.read(EVEN, changed(**FAULTS[message]), SIZE)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "weights",
    [EVEN[:-1], ((0.2, 0.2, 0.2, 0.2, 0.3), *EVEN[1:]), ((0.0, 0.25, 0.25, 0.25, 0.25), *EVEN[1:])],
    ids=["too few rows", "another sum", "no model"],
)
def test_weights_that_are_no_distribution_are_refused(weights: Any) -> None:
    with pytest.raises(ValidationError, match=r"cache\.transitions\.weights"):
        TransitionModel(file="t", weights=weights)


def test_a_cache_is_as_long_as_the_tables_read() -> None:
    fields = {"transitions": {"file": "t", "weights": EVEN}, "weights": CacheModel.none(OWN).weights}
    assert CacheModel.model_validate({"length": OWN, **fields}).transitions is not None
    with pytest.raises(ValidationError, match=f"read the last {OWN} events"):
        CacheModel.model_validate({"length": OWN - 1, **fields})


def test_a_weight_of_the_network_that_rounds_to_0_is_refused() -> None:
    cache = CacheModel.none(OWN)
    small = (1e-200, 1.0, 0.0, 0.0)
    tables = TransitionModel(file="tables", weights=((1e-200, 1.0, 0.0, 0.0, 0.0),) * LENGTHS)
    with pytest.raises(ValidationError, match="rounds to 0"):
        CacheModel(length=OWN, weights=(small, *cache.weights[1:]), transitions=tables)
