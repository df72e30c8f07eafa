from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.models.random_models import architecture, random_weights
from wane.models.architecture import Architecture
from wane.models.certificate.layers import build_layers
from wane.models.certificate.propagation import Propagation
from wane.models.layer_registry import FADING, Kind
from wane.models.manifest import StateError
from wane.models.reference import Reference, State

LENGTH = 48
NOTHING = 1e-12


def rounded(of: Architecture, error: float) -> dict[str, StateError]:
    """Returns the bounds of the difference of two runs in which every state tensor differs by `error` from its exact
    value."""
    names = [tensor.name for tensor in of.state_tensors() if tensor.name.startswith("layers.")]
    return {name: StateError(box=2 * error, ball=2 * error) for name in names}


def contractive(cell: Kind, block: str, seed: int, layers: int = 1, **fields: object) -> tuple[Reference, Propagation]:
    """Returns the oracle and the `Propagation` of a random model in which every layer is contractive."""
    of = architecture(cell, block, layers, **fields)
    scale = 0.6
    while True:
        weights = random_weights(of, seed, recurrent=scale, driven=scale)
        built = build_layers(of, weights)
        if all(layer.bound.factor < 1 for layer in built):
            return Reference(of, weights), Propagation(of, weights, built, rounded(of, NOTHING))
        scale *= 0.7


def moved(state: State, by: Mapping[str, np.ndarray]) -> State:
    return {name: value + by.get(name, 0.0) for name, value in state.items()}


@pytest.mark.parametrize("cell", FADING)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1e-6, 1e-4, 1e-2]),
    block=st.sampled_from(["plain", "residual"]),
    same=st.booleans(),
)
def test_every_run_with_state_errors_at_chunk_boundaries_is_within_the_bound(
    cell: Kind, seed: int, size: float, block: str, same: bool
) -> None:
    reference, propagation = contractive(cell, block, seed)
    random = np.random.default_rng(seed)
    width = {tensor.name: tensor.shape for tensor in reference.architecture.state_tensors()}
    joint = {name: size * random.uniform(0.1, 1, shape) for name, shape in width.items()}
    bound = propagation.apart(joint, LENGTH)
    # There is no bound if the difference of two runs decays too little within LENGTH tokens.
    assume(bound is not None)
    assert bound is not None
    tokens = np.full(5 * LENGTH, random.integers(11)) if same else random.integers(11, size=5 * LENGTH)
    whole, parts = reference.zero_state(1), reference.zero_state(1)
    for position, token in enumerate(tokens):
        if position and position % LENGTH == 0:
            # It is unknown which corner of the box of state errors has the largest effect. So the test uses the corner
            # that increases the current difference of the two runs, or a random corner.
            signs = {
                name: np.where(parts[name] >= whole[name], 1, -1) if same else random.choice([-1, 1], shape)
                for name, shape in width.items()
            }
            parts = moved(parts, {name: signs[name] * joint[name] for name in joint})
        one, whole = reference.advance(token[None], whole)
        other, parts = reference.advance(token[None], parts)
        assert np.linalg.norm(one - other) <= bound


def test_the_bound_grows_with_the_state_errors_and_is_a_few_times_the_measured_distance() -> None:
    _, propagation = contractive("rnn_tanh", "plain", 1)
    bounds = [propagation.apart({"layers.0.h": np.full(6, size)}, 1024) for size in (1e-6, 1e-5, 1e-4)]
    found = [bound for bound in bounds if bound is not None]
    assert len(found) == len(bounds)
    assert found == sorted(found)
    assert found[0] < 10 * np.sqrt(6) * 1e-6


def test_chunk_boundaries_too_close_together_have_no_bound() -> None:
    _, propagation = contractive("lstm", "plain", 2)
    joint = {name: np.full(6, 1e-4) for name in ("layers.0.h", "layers.0.c")}
    assert propagation.apart(joint, 1024) is not None
    assert propagation.apart(joint, 1) is None


def test_the_front_s_state_is_not_counted() -> None:
    front = {"blocks": 1, "kernel_size": 3, "feed_forward": 5}
    reference, propagation = contractive("gated", "residual", 3, feed_forward=5, front=front, gate_caps=(0.9,))
    (before,) = (tensor for tensor in reference.architecture.state_tensors() if tensor.name.startswith("front."))
    joint = {"layers.0.s": np.full(6, 1e-5)}
    least = propagation.apart({**joint, before.name: np.zeros(before.shape)}, 1024)
    assert least is not None
    assert propagation.apart({**joint, before.name: np.ones(before.shape)}, 1024) == least


def test_the_rounding_of_two_runs_is_added_at_every_chunk_boundary() -> None:
    reference, _ = contractive("rnn_tanh", "plain", 1)
    of, weights = reference.architecture, random_weights(reference.architecture, 1, recurrent=0.1, driven=0.1)
    built = build_layers(of, weights)
    joint, off = {"layers.0.h": np.full(6, 1e-5)}, 3e-6
    exact = Propagation(of, weights, built, rounded(of, 0.0))
    of_both = exact.apart({"layers.0.h": np.full(6, 1e-5 + 2 * off)}, 1024)
    found = Propagation(of, weights, built, rounded(of, off)).apart(joint, 1024)
    alone = exact.apart(joint, 1024)
    assert found is not None and of_both is not None and alone is not None
    assert alone < found <= of_both
