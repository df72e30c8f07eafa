"""Tests stacks of layers with finite and with fading memory: torch, oracle and graphs agree, a window that holds the
reach has the bits of the uninterrupted run, and no run leaves the bounds."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from tests.models.bundles import export_words
from tests.models.random_models import random_weights
from tests.models.serving import answers
from wane.models.architecture import LARGEST_STATE, Architecture
from wane.models.bundle import Bundle, verify_graphs
from wane.models.certificate import certify
from wane.models.certificate.request import RequestBound
from wane.models.certificate.rounding import of_finite
from wane.models.export.parity import OnnxGraphs
from wane.models.manifest import Role
from wane.models.networks import Network
from wane.models.parity import compare_bits
from wane.models.reference import Reference
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.runner import Feeds
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest

Fields = dict[str, Any]
TOKENS = 11
ROUNDED = 1e-9

CONVOLUTIONS = st.fixed_dictionaries(
    {
        "kind": st.just("convolution"),
        "units": st.just(6),
        "kernel_size": st.integers(2, 4),
        "dilation": st.sampled_from((1, 2, 3, 7)),
        "channels": st.sampled_from(("depthwise", "full")),
        "activation": st.sampled_from(("none", "relu", "tanh", "glu", "wavenet")),
    }
)
ATTENTIONS = st.fixed_dictionaries(
    {
        "kind": st.just("attention"),
        "units": st.just(6),
        "window": st.integers(2, 5),
        "heads": st.sampled_from((1, 2, 3)),
    }
)
FINITE = st.lists(CONVOLUTIONS | ATTENTIONS, min_size=1, max_size=3)
FADING = st.sampled_from(
    (
        {"kind": "gated", "units": 6, "gate_cap": 0.7},
        {"kind": "gated", "units": 6, "gate_cap": 0.7, "candidate": "identity"},
        {"kind": "gated", "units": 6, "gate_cap": 0.7, "candidate": "positive"},
        {"kind": "leaky", "units": 6, "gate_cap": 0.7},
        {"kind": "leaky", "units": 6, "gate_cap": 0.7, "candidate": "identity"},
        {"kind": "leaky", "units": 6, "gate_cap": 0.7, "candidate": "positive"},
        {"kind": "lru", "units": 6},
        *({"kind": kind, "units": 6} for kind in ("linear", "rnn_tanh", "rnn_relu", "gru", "lstm")),
    )
)


def stack(layers: list[Fields], residual: bool, feed_forward: int = 0, skip: bool = False) -> Architecture:
    """Returns the architecture of some layers, all plain or all residual. skip: for all of them."""
    added: Fields = {"block": "residual", "feed_forward": feed_forward} if residual else {}
    added |= {"skip": True} if skip and residual else {}
    fields = {"vocabulary_size": TOKENS, "embedding": 6, "norm_epsilon": 0.25 if residual else 1e-5}
    return Architecture.model_validate(fields | {"layers": [layer | added for layer in layers]})


def random_network(model: Architecture, seed: int) -> Network:
    torch.manual_seed(seed)
    network = Network(model).eval()
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if "positions" in name or "bias" in name:
                tensor.normal_(std=0.5)
    return network


def exported(folder: Path, network: Network) -> Bundle:
    """Writes and reads a bundle. The export fails unless torch, the oracle and the graphs agree."""
    weights = {name: tensor.numpy() for name, tensor in network.weights().items()}
    export_words(folder / "model", network.architecture, weights, max_window=64, torch_network=network)
    return Bundle.read(folder / "model")


def streamed(bundle: Bundle, tokens: NDArray[np.int64], state: Fields | None = None) -> tuple[Fields, Fields]:
    """Runs the graph "step" over tokens (B, T). Returns its last outputs and the state after them."""
    run, tensors = OnnxGraphs(bundle).run, bundle.manifest.state
    state = state or {each.name: np.zeros((len(tokens), *each.shape), np.float32) for each in tensors}
    for column in tokens.T:
        outputs = run("step", {"tokens": np.ascontiguousarray(column), **state})
        state = {each.name: outputs[f"next.{each.name}"] for each in tensors}
    return outputs, state


@settings(max_examples=8, deadline=None)
@given(
    below=FINITE,
    above=st.lists(FADING, max_size=2),
    residual=st.booleans(),
    feed_forward=st.sampled_from((0, 5)),
    seed=st.integers(0, 99),
)
def test_torch_oracle_and_graphs_of_a_random_stack_agree(
    below: list[Fields], above: list[Fields], residual: bool, feed_forward: int, seed: int
) -> None:
    model = stack(below + above, residual, feed_forward, skip=not above)
    with TemporaryDirectory() as folder:
        bundle = exported(Path(folder), random_network(model, seed))
        assert verify_graphs(bundle, OnnxGraphs(bundle).run) < 1e-4
        assert compare_bits(model, OnnxGraphs(bundle).run, 3).differ is None


@settings(max_examples=6, deadline=None)
@given(layers=FINITE, residual=st.booleans(), seed=st.integers(0, 99))
def test_a_window_that_holds_the_reach_has_the_bits_of_the_run(layers: list[Fields], residual: bool, seed: int) -> None:
    model = stack(layers, residual, skip=True)
    with TemporaryDirectory() as folder:
        bundle = exported(Path(folder), random_network(model, seed))
        certificate = bundle.manifest.certificate
        k = model.reach + 1
        assert certificate.contractive and certificate.certified is (k <= 64)
        assert certificate.between_runs() == 0
        bounds = [certificate.error_bound_at(each) for each in range(1, 65)]
        assert all(bound for bound in bounds[: model.reach])
        assert bounds[model.reach :] == [0] * (64 - model.reach)
        tokens = np.random.default_rng(seed).integers(TOKENS, size=(2, k + 9))
        whole, _ = streamed(bundle, tokens)
        window = {"tokens": tokens[:, -k:], "lengths": np.full(2, k)}
        part = OnnxGraphs(bundle).run("window", window)
        np.testing.assert_array_equal(part["hidden"], whole["hidden"])
        np.testing.assert_array_equal(part["logits"], whole["logits"])


@settings(max_examples=5, deadline=None)
@given(layers=FINITE, residual=st.booleans(), seed=st.integers(0, 99))
def test_the_load_notices_a_row_whose_bits_depend_on_the_size_of_its_batch(
    layers: list[Fields], residual: bool, seed: int
) -> None:
    """A model with a finite memory has no rounding to add. So its answers are exact only if a row has the same bits in
    every batch, of steps and of windows."""
    model = stack(layers, residual, skip=True)
    k, tokens = model.reach + 1, np.random.default_rng(seed).integers(TOKENS, size=(64, model.reach + 4))
    with TemporaryDirectory() as folder:
        bundle = exported(Path(folder), random_network(model, seed))
        run = OnnxGraphs(bundle).run
        alone, _ = streamed(bundle, tokens[:1])
        same = True
        for size in (2, 3, 7, 16, 33, 64):
            whole, _ = streamed(bundle, tokens[:size])
            part = run("window", {"tokens": tokens[:size, -k:], "lengths": np.full(size, k)})
            for found in (whole["logits"], part["logits"]):
                np.testing.assert_allclose(found[0], alone["logits"][0], atol=1e-4)
                same = same and np.array_equal(found[0], alone["logits"][0])
        assert same or compare_bits(model, run, 64).differ is not None


@settings(max_examples=40, deadline=None)
@given(layers=FINITE, scale=st.sampled_from((0.3, 1.0, 5.0)), seed=st.integers(0, 999))
def test_no_run_in_float32_is_further_from_exact_arithmetic_than_its_rounding(
    layers: list[Fields], scale: float, seed: int
) -> None:
    model = stack(layers, residual=False)
    weights = random_weights(model, seed, driven=scale)
    single, exact = Reference(model, weights, np.float32), Reference(model, weights)
    limit = of_finite(model, weights, 1.0)
    states = [each.zero_state(64) for each in (single, exact)]
    for column in np.random.default_rng(seed).integers(TOKENS, size=(12, 64)):
        computed, states[0] = single.advance(column, states[0])
        hidden, states[1] = exact.advance(column, states[1])
        assert computed.dtype == np.float32
        apart = np.linalg.norm(computed - hidden, axis=1)
        logits = computed @ exact.head.T.astype(np.float32) + weights["head.bias"] - exact.logits(hidden)
        assert np.all(apart + np.ptp(logits - (computed - hidden) @ exact.head.T, axis=1) <= limit)


@pytest.mark.parametrize("residual", [False, True])
def test_a_finite_model_whose_bits_differ_is_served_with_the_bound_of_its_rounding(
    residual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph `window` differs from `step` in the last bit, as if it added in another order."""
    below = {"kind": "convolution", "units": 6, "kernel_size": 3, "dilation": 2, "channels": "full"}
    bundle = exported(tmp_path, random_network(stack([below | {"activation": "tanh"}], residual), 3))
    run = OnnxRunner.run

    def in_another_order(runner: OnnxRunner, role: Role, feeds: Feeds) -> dict[str, Any]:
        outputs = dict(run(runner, role, feeds))
        if role == "window":
            outputs["hidden"] = np.nextafter(outputs["hidden"], np.float32(np.inf))
        return outputs

    tokens = tuple(np.random.default_rng(0).integers(TOKENS, size=30).tolist())
    requests = [
        PredictRequest(tokens, mode=Mode.WINDOW, window=8),
        PredictRequest(tokens, mode=Mode.RECURRENT),
        PredictRequest(tokens, mode=Mode.WINDOW, window=2),
    ]
    assert [each.error_bound for each in answers(bundle, requests)[:2]] == [0, 0]
    monkeypatch.setattr(OnnxRunner, "run", in_another_order)
    found = answers(bundle, requests)
    limit, certificate = bundle.finite_rounding(), bundle.manifest.certificate
    assert limit is not None and limit > 0
    rounded = math.tanh(certificate.head_diameter * 2 * limit / 4)
    assert [each.error_bound for each in found] == [pytest.approx(rounded), pytest.approx(rounded), 1.0]
    assert residual or rounded < 0.01
    assert not residual or not any(each.top1_proved for each in found)


@settings(max_examples=5, deadline=None)
@given(layers=FINITE, length=st.integers(1, 12), seed=st.integers(0, 99))
def test_a_state_from_before_continues_with_other_tokens(layers: list[Fields], length: int, seed: int) -> None:
    """A rewind starts from an earlier state, whose ring of inputs the later tokens must not have changed."""
    model = stack(layers, residual=True)
    random = np.random.default_rng(seed)
    before, later, other = (random.integers(TOKENS, size=(1, size)) for size in (length, 9, 3))
    with TemporaryDirectory() as folder:
        bundle = exported(Path(folder), random_network(model, seed))
        _, state = streamed(bundle, before)
        streamed(bundle, later, state)
        again, _ = streamed(bundle, other, state)
        expected, _ = streamed(bundle, np.concatenate([before, other], axis=1))
        np.testing.assert_array_equal(again["logits"], expected["logits"])


@settings(max_examples=40, deadline=None)
@given(
    below=st.lists(CONVOLUTIONS | ATTENTIONS, max_size=2),
    above=st.lists(FADING, max_size=2),
    residual=st.booleans(),
    scale=st.sampled_from((0.3, 1.0)),
    seed=st.integers(0, 999),
)
def test_no_run_leaves_the_curve_or_the_bound_of_a_request(
    below: list[Fields], above: list[Fields], residual: bool, scale: float, seed: int
) -> None:
    if not below and not above:
        return
    model = stack(below + above, residual, 5 if seed % 2 else 0)
    weights = random_weights(model, seed, recurrent=0.3 * scale, driven=scale)
    certificate, request = certify(model, weights, 64, None), RequestBound(model, weights)
    reference, random = Reference(model, weights), np.random.default_rng(seed)
    tokens = random.integers(TOKENS, size=(6, 40))
    tokens[:3, 10:] = tokens[:3, 10:11]  # a repeated token
    tokens[3, :20] = tokens[3, 0]
    for k in (1, 2, 5, 12, 30):
        whole, part = reference.zero_state(6), reference.zero_state(6)
        for token in tokens.T:
            full, whole = reference.advance(token, whole)
        for token in tokens[:, -k:].T:
            cut, part = reference.advance(token, part)
        apart = np.linalg.norm(full - cut, axis=1)
        if certificate.contractive:
            limit = certificate.state_error_at(k)
            assert limit is not None and np.all(apart <= limit + ROUNDED)
        bound = request(tokens[:, -k:])
        np.testing.assert_allclose(bound.hidden, cut, atol=1e-9)
        assert np.all(np.linalg.norm(full - bound.hidden, axis=1) <= bound.radius + ROUNDED)


CONVOLUTION: Fields = {"kind": "convolution", "units": 6, "kernel_size": 3}
LSTM: Fields = {"kind": "lstm", "units": 6}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([LSTM, CONVOLUTION], "convolution stands above lstm"),
        ([CONVOLUTION | {"block": "residual", "skip": True}, LSTM | {"block": "residual"}], "without recurrent layers"),
        ([CONVOLUTION, LSTM | {"block": "residual"}], "either all layers are plain, or none is"),
        ([CONVOLUTION | {"skip": True}], "skip needs block = 'residual'"),
        ([CONVOLUTION | {"block": "front", "feed_forward": 4, "dilation": 2}], "a front block needs channels"),
        ([CONVOLUTION | {"units": 5}, LSTM], "a depthwise convolution of 5 units cannot read 6 units"),
        ([{"kind": "attention", "units": 6, "window": 4, "heads": 4}], "units 6 is not a multiple of heads 4"),
        ([{"kind": "attention", "units": 6, "window": 5000}], "less than or equal to 4096"),
        ([{"kind": "attention", "units": 6, "window": 4, "heads": 300}], "less than or equal to 256"),
        ([CONVOLUTION | {"dilation": 5000}], "less than or equal to 4096"),
        ([CONVOLUTION | {"kernel_size": 64, "dilation": 4096}], "reach 258048 tokens back, but at most 65535"),
        ([{"kind": "attention", "units": 8192, "window": 4096}, LSTM], f"bytes, but at most {LARGEST_STATE}"),
        ([{"kind": "lru", "units": 5}], "must be even, not 5"),
        ([LSTM | {"window": 4}], "Extra inputs are not permitted"),
        ([], "at least 1 item"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_stack_that_cannot_be_served_is_refused_with_the_reason(layers: list[Fields], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Architecture.model_validate({"vocabulary_size": TOKENS, "embedding": 6, "layers": layers})


def test_the_fields_of_schema_5_are_read_as_layers() -> None:
    old = {"cell": "gated", "vocabulary_size": 9, "embedding": 6, "hidden": 6, "layers": 2, "block": "residual"}
    old |= {"feed_forward": 5, "front": {"blocks": 2, "kernel_size": 3, "feed_forward": 4}, "units": 7}
    model = Architecture.model_validate(old | {"gate_caps": (0.5, 0.75)})
    front = {"kind": "convolution", "block": "front", "units": 6, "kernel_size": 3, "feed_forward": 4}
    gated = {"kind": "gated", "block": "residual", "units": 7, "feed_forward": 5}
    layers = [front, front, gated | {"gate_cap": 0.5}, gated | {"gate_cap": 0.75}]
    assert model == Architecture.model_validate({"vocabulary_size": 9, "embedding": 6, "layers": layers})
    assert [tensor.name for tensor in model.state_tensors()] == [
        "front.0.inputs",
        "front.1.inputs",
        "layers.0.s",
        "layers.1.s",
    ]
    assert (model.reach, model.hidden, model.family) == (4, 6, "gated")
