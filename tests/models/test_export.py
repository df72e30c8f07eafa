"""Tests that torch, the numpy oracle and ONNX Runtime agree for every cell, and that the export fails if they
differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.models.bundles import edit_manifest, export_words, words_tokenizer
from tests.models.random_models import BLOCKS, architecture, random_weights
from wane.models.architecture import Architecture
from wane.models.bundle import QUANTISED, Bundle, BundleError, CertificateError, verify_graphs
from wane.models.certificate import certify
from wane.models.export import ExportError
from wane.models.export import network as network_module
from wane.models.export.parity import OnnxGraphs, check_bundle
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.manifest import Manifest, Role, StateError
from wane.models.networks import Network
from wane.models.parity import Tensors, log_softmax
from wane.models.reference import Reference

SAMPLE = [int(token) for token in np.random.default_rng(3).integers(11, size=42)]

TURNS = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float32)

Export = Callable[..., Manifest]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Returns a function that exports a model to `tmp_path / "model"`."""

    def run(model: Architecture, weights: dict[str, np.ndarray], **changes: object) -> Manifest:
        if "torch_network" not in changes:
            changes["torch_network"] = torch_network(model, weights)
        arguments = {"tokenizer_json": words_tokenizer(), "sample_tokens": SAMPLE} | changes
        return export_words(tmp_path / "model", model, weights, **arguments)

    return run


def torch_network(model: Architecture, weights: dict[str, np.ndarray]) -> Network:
    network = Network(model)
    tensors = {name: torch.from_numpy(tensor) for name, tensor in weights.items()}
    if model.tied:
        tensors["head.weight"] = tensors["embedding.weight"]
    network.load_state_dict(tensors)
    return network


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_torch_oracle_and_graphs_agree(export: Export, tmp_path: Path, cell: Kind, block: str, layers: int) -> None:
    odd = layers % 2 == 1
    fields: dict[str, object] = {"tied": not odd, "feed_forward": 10 if block == "residual" and odd else 0}
    if block == "plain" and odd:
        fields["embedding"] = 5
    if block == "residual" and layers == 2:
        fields |= {"front": {"blocks": 2, "kernel_size": 3, "feed_forward": 5}, "units": 9}
    if cell == "gated" and odd:
        fields |= {"gate_caps": tuple(0.9 - 0.1 * layer for layer in range(layers))}
    if block == "residual" and odd:
        fields["norm_epsilon"] = 0.25
    model = architecture(cell, block, layers, **fields)
    manifest = export(model, random_weights(model, seed=layers, recurrent=0.6))
    bundle = Bundle.read(tmp_path / "model")
    assert bundle.manifest == manifest
    graphs = OnnxGraphs(bundle)
    assert 0 < verify_graphs(bundle, graphs.run) < 1e-5
    for role in bundle.manifest.graphs:
        onnx.checker.check_model(str(bundle.graph_path(role)), full_check=True)


@pytest.mark.parametrize("cell", FADING)
def test_a_thousand_streamed_tokens_match_one_scan(export: Export, tmp_path: Path, cell: Kind) -> None:
    model = architecture(cell, "residual", 2, feed_forward=8)
    export(model, random_weights(model, seed=0, recurrent=0.5))
    bundle = Bundle.read(tmp_path / "model")
    run = OnnxGraphs(bundle).run
    tokens = np.random.default_rng(0).integers(11, size=(1, 1001))
    zeros = {tensor.name: np.zeros((1, *tensor.shape), np.float32) for tensor in bundle.manifest.state}
    feeds = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "lengths": np.array([1000]), **zeros}
    whole = run("scan", feeds)["logprobs"][0]
    state, streamed = zeros, []
    for token, target in zip(tokens[0, :-1], tokens[0, 1:], strict=True):
        outputs = run("step", {"tokens": token[None], **state})
        streamed.append(log_softmax(outputs["logits"])[0, target])
        state = {name: outputs[f"next.{name}"] for name in zeros}
    assert np.abs(np.array(streamed) - whole).max() < 1e-4


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_padding_has_no_effect(export: Export, tmp_path: Path, cell: Kind, block: str) -> None:
    model = architecture(cell, block, 2)
    export(model, random_weights(model, seed=0, recurrent=0.5))
    run = OnnxGraphs(Bundle.read(tmp_path / "model")).run
    tokens, lengths = np.random.default_rng(0).integers(11, size=(3, 9)), np.array([4, 9, 1])
    padded = np.where(np.arange(9) < lengths[:, None], tokens, (tokens + 1) % 11)
    first, second = (run("window", {"tokens": rows, "lengths": lengths}) for rows in (tokens, padded))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


def test_a_scan_in_pieces_matches_the_oracle(export: Export, tmp_path: Path) -> None:
    """Tests lengths around 256 and 512, because the graph computes the log-probabilities of 256 tokens at a time."""
    model = architecture("rnn_tanh")
    weights = random_weights(model, seed=0)
    export(model, weights)
    run, reference = OnnxGraphs(Bundle.read(tmp_path / "model")).run, Reference(model, weights)
    tokens, state, expected = np.random.default_rng(0).integers(11, size=600), reference.zero_state(1), []
    for token, target in zip(tokens, np.roll(tokens, -1), strict=True):
        logits, _, state = reference.step(token[None], state)
        expected.append(log_softmax(logits)[0, target])
    for time in (1, 255, 256, 257, 511, 512, 513, 600):
        feeds = {"tokens": tokens[None, :time], "targets": np.roll(tokens, -1)[None, :time]}
        feeds |= {"lengths": np.array([time]), "layers.0.h": np.zeros((1, 6), np.float32)}
        np.testing.assert_allclose(run("scan", feeds)["logprobs"][0], expected[:time], atol=1e-5)


@pytest.mark.parametrize("cell", ["gated", "lstm", "gru"])
def test_a_vocabulary_too_large_for_a_table_is_exported(
    export: Export, cell: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "TABLE_ELEMENTS", 0)
    model = architecture(cell, "residual", 2)
    export(model, random_weights(model, seed=0, recurrent=0.5))


@pytest.mark.parametrize("cell", FADING)
def test_int8_graphs_pass_the_parity_check_but_are_not_certified(export: Export, tmp_path: Path, cell: Kind) -> None:
    model = architecture(cell, "residual", 2, feed_forward=8, front={"blocks": 1, "kernel_size": 3, "feed_forward": 5})
    manifest = export(model, random_weights(model, seed=0, recurrent=0.3), precision="int8")
    bundle = Bundle.read(tmp_path / "model")
    assert bundle.manifest == manifest
    assert (manifest.precision, manifest.certificate) == ("int8", QUANTISED)
    run = OnnxGraphs(bundle).run
    assert 1e-4 < verify_graphs(bundle, run) < 0.1
    assert set(run("window", {"tokens": np.array([[1, 2]]), "lengths": np.array([2])})).isdisjoint({"radius", "stream"})


def test_an_int8_bundle_with_a_certificate_is_refused(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0, recurrent=0.2)
    export(model, weights)
    edit_manifest(tmp_path / "model", "precision", value="int8")
    with pytest.raises(CertificateError, match="certificate"):
        Bundle.read(tmp_path / "model")


def test_an_int8_row_does_not_depend_on_its_batch(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm", layers=2)
    export(model, random_weights(model, seed=0), precision="int8")
    run = OnnxGraphs(Bundle.read(tmp_path / "model")).run
    tokens = np.random.default_rng(0).integers(11, size=(8, 9))
    together = run("window", {"tokens": tokens, "lengths": np.full(8, 9)})
    for row in range(8):
        alone = run("window", {"tokens": tokens[row : row + 1], "lengths": np.array([9])})
        np.testing.assert_allclose(alone["hidden"][0], together["hidden"][row], atol=1e-6)


def test_an_int8_graph_of_other_weights_is_refused(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0)
    swapped = {
        name: tensor.reshape(4, 6, -1)[[1, 0, 2, 3]].reshape(tensor.shape) if ".cell." in name else tensor
        for name, tensor in weights.items()
    }
    export(model, swapped, precision="int8")
    run = OnnxGraphs(Bundle.read(tmp_path / "model")).run
    export(model, weights, precision="int8", replace=True)
    with pytest.raises(BundleError, match=r"differs from the oracle by .*, tolerance 0\.2"):
        verify_graphs(Bundle.read(tmp_path / "model"), run)


def test_equal_logits_are_ordered_by_id(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0)
    weights["embedding.weight"][:] = 0
    weights["head.bias"][:] = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0], np.float32)
    export(model, weights)
    outputs = OnnxGraphs(Bundle.read(tmp_path / "model")).run("head", {"hidden": np.zeros((2, 6), np.float32)})
    assert outputs["top_ids"].tolist() == [[1, 3, 5, 7, 9, 0, 2, 4, 6, 8, 10]] * 2
    assert outputs["log_sum_exp"] == pytest.approx(np.log(5 * np.e + 6), rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_graphs_contain_no_weights(export: Export, tmp_path: Path, precision: str) -> None:
    model = architecture("lstm", layers=2)
    export(model, random_weights(model, seed=0), precision=precision)
    bundle = Bundle.read(tmp_path / "model")
    for role in bundle.manifest.graphs:
        graph = onnx.load(str(bundle.graph_path(role)), load_external_data=False).graph
        floats = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims]
        assert floats, "the graph has no weights"
        for tensor in floats:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "weights.safetensors"


def test_a_network_with_another_gate_order_is_refused(export: Export, tmp_path: Path) -> None:
    model = architecture("gru")
    weights = random_weights(model, seed=0)
    swapped = {
        name: tensor.reshape(3, 6, -1)[[1, 0, 2]].reshape(tensor.shape) if ".cell." in name else tensor
        for name, tensor in weights.items()
    }
    with pytest.raises(ExportError, match=r"torch network, in one pass, position 0: .* differ .* tolerance 0\.0001"):
        export(model, weights, torch_network=torch_network(model, swapped))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_of_other_weights_is_refused(export: Export, tmp_path: Path) -> None:
    model = architecture("gated")
    export(model, random_weights(model, seed=0))
    bundle = Bundle.read(tmp_path / "model")
    other = onnx.load(str(bundle.graph_path("step")), load_external_data=False)
    (embedding,) = (tensor for tensor in other.graph.initializer if "embedding" in tensor.name)
    (bias,) = (tensor for tensor in other.graph.initializer if "head.bias" in tensor.name)
    offset = next(entry for entry in bias.external_data if entry.key == "offset")
    offset.value = next(entry.value for entry in embedding.external_data if entry.key == "offset")
    bundle.graph_path("step").write_bytes(other.SerializeToString())
    with pytest.raises(ExportError, match="step, token 0 of a stream: logits differs from the oracle"):
        check_bundle(bundle, SAMPLE, None)


def test_rounding_is_measured_at_export_and_checked_at_load(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm", layers=2)
    export(model, random_weights(model, seed=0, recurrent=0.05, driven=0.2))
    bundle = Bundle.read(tmp_path / "model")
    rounding, run = bundle.manifest.certificate.rounding, OnnxGraphs(bundle).run
    assert rounding is not None
    assert (rounding.step_error, rounding.sequences) == ("measured", "all")
    assert set(rounding.step) == set(rounding.states) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in "hc"}
    assert 0 < rounding.carried < 1e-4
    verify_graphs(bundle, run)
    edit_manifest(tmp_path / "model", "certificate", "rounding", "carried", value=1e-12)
    with pytest.raises(CertificateError, match=r"from the oracle in the 2-norm, .*is 1e-12$"):
        verify_graphs(Bundle.open(tmp_path / "model"), run)
    with pytest.raises(CertificateError, match=r"certificate\.rounding\.carried: 1e-12 claimed, the weights give"):
        Bundle.read(tmp_path / "model")
    edit_manifest(tmp_path / "model", "certificate", "rounding", "carried", value=rounding.carried)
    edit_manifest(tmp_path / "model", "certificate", "rounding", "states", "layers.1.c", "ball", value=1e-12)
    with pytest.raises(CertificateError, match=r"rounding\.states\.layers\.1\.c\.ball is 1e-12$"):
        verify_graphs(Bundle.open(tmp_path / "model"), run)


def test_a_plain_network_cannot_claim_a_rounding_that_was_measured_on_probed_sequences(
    export: Export, tmp_path: Path
) -> None:
    model = architecture("rnn_tanh")
    rounding = export(model, random_weights(model, seed=0, recurrent=0.2)).certificate.rounding
    assert rounding is not None
    for field, value in (("sequences", "probed"), ("carried", rounding.carried / 50)):
        edit_manifest(tmp_path / "model", "certificate", "rounding", field, value=value)
    with pytest.raises(CertificateError, match=r"certificate\.rounding\."):
        Bundle.read(tmp_path / "model")


def test_a_step_graph_with_more_rounding_than_certified_is_refused(export: Export, tmp_path: Path) -> None:
    model = architecture("rnn_tanh")
    weights = random_weights(model, seed=0, recurrent=0.2)
    rounding = export(model, weights).certificate.rounding
    assert rounding is not None
    step = {"layers.0.h": StateError(box=1e-12, ball=1e-12)}
    claimed = certify(model, weights, 32, rounding.model_copy(update={"step": step, "output": 1e-5}))
    edit_manifest(tmp_path / "model", "certificate", value=claimed.model_dump(mode="json"))
    edit_manifest(tmp_path / "model", "certificate", "rounding", "states", "layers.0.h", value={"box": 1, "ball": 1})
    with pytest.raises(CertificateError, match=r"one step's error in layers\.0\.h is .* rounding\.step is 1e-12"):
        verify_graphs(Bundle.open(tmp_path / "model"), OnnxGraphs(Bundle.open(tmp_path / "model")).run)


@pytest.mark.parametrize("field", ["step", "states"])
def test_a_rounding_without_its_states_is_refused(export: Export, tmp_path: Path, field: str) -> None:
    model = architecture("gru")
    export(model, random_weights(model, seed=0, recurrent=0.1, driven=0.2))
    edit_manifest(tmp_path / "model", "certificate", "rounding", field, value={})
    with pytest.raises(BundleError, match=rf"certificate\.rounding\.{field} must have one entry for each of"):
        Bundle.read(tmp_path / "model")


def test_a_recurrence_that_resonates_with_a_cycle_of_four_stays_within_its_rounding(
    export: Export, tmp_path: Path
) -> None:
    """Uses a linear recurrence that rotates the state by 90 degrees at every token. A cycle of four tokens whose inputs
    rotate, too, makes the state a hundred times larger than one input."""
    model = architecture("linear", hidden=2, embedding=2, tied=False)
    weights = {name: np.zeros_like(tensor) for name, tensor in random_weights(model, seed=0).items()}
    weights["embedding.weight"][:8] = np.concatenate([1.9 * TURNS, TURNS])
    weights["layers.0.cell.weight_ih_l0"] = np.eye(2, dtype=np.float32)
    weights["layers.0.cell.weight_hh_l0"] = np.float32(0.99) * np.array([[0, -1], [1, 0]], np.float32)
    rounding = export(model, weights).certificate.rounding
    assert rounding is not None
    run, exact = OnnxGraphs(Bundle.read(tmp_path / "model")).run, Reference(model, weights)
    state = exact.zero_state(1)
    fed = {name: value.astype(np.float32) for name, value in state.items()}
    for step in range(3200):
        token = np.array([step % 4 + 4 * (step >= 800)])
        hidden, state = exact.advance(token, state)
        outputs = run("step", {"tokens": token, **fed})
        fed = {name: outputs[f"next.{name}"] for name in fed}
    off = float(np.linalg.norm(outputs["hidden"] - hidden))
    assert 1e-4 < off <= rounding.carried


def test_a_model_that_is_not_contractive_has_no_rounding(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm")
    export(model, random_weights(model, seed=0, recurrent=3.0))
    certificate = Bundle.read(tmp_path / "model").manifest.certificate
    assert (certificate.contractive, certificate.rounding) == (False, None)


@pytest.mark.parametrize(("cap", "hold"), [(0.998, 8000), (0.99, 4000)])
def test_a_long_repeated_token_keeps_two_runs_within_their_rounding(
    export: Export, tmp_path: Path, cap: float, hold: int
) -> None:
    """Repeats one token. A float32 recurrence stops before its fixed point, so two runs that approach the fixed point
    from different sides stay apart."""
    model, random = architecture("gated", hidden=64, embedding=64, gate_caps=(cap,)), np.random.default_rng(3)
    weights = random_weights(model, seed=3)
    weights["layers.0.cell.weight"] = (random.normal(size=(128, 64)) / 4).astype(np.float32)
    weights["embedding.weight"] = random.normal(size=(11, 64)).astype(np.float32)
    weights["layers.0.cell.bias"][:64] = 4
    certificate = export(model, weights, max_window=hold).certificate
    run = OnnxGraphs(Bundle.read(tmp_path / "model")).run
    past, held = (each.ravel() for each in np.meshgrid(np.arange(11), np.arange(11)))
    full, cut = (np.zeros((len(held), 64), np.float32) for _ in range(2))
    for _ in range(300):
        full = run("step", {"tokens": past, "layers.0.s": full})["next.layers.0.s"]
    for _ in range(hold):
        full, cut = (run("step", {"tokens": held, "layers.0.s": state})["next.layers.0.s"] for state in (full, cut))
    seen = float(np.linalg.norm(full.astype(np.float64) - cut, axis=1).max())
    state_error = certificate.state_error_at(hold)
    assert certificate.rounding is not None and state_error is not None
    assert seen > 1e-5, "the two runs do not stay apart, so this test checks nothing"
    assert seen <= state_error + certificate.rounding.between_runs


@pytest.mark.parametrize(
    ("cell", "block"),
    # test_readout.py has those whose rounding is bounded by a theorem.
    [(cell, block) for cell in FADING for block in BLOCKS if not (KINDS[cell].input_gated and block == "residual")],
)
def test_every_run_stays_within_its_rounding(export: Export, tmp_path: Path, cell: Kind, block: str) -> None:
    """Uses token sequences on which the export has not measured the rounding: repeated tokens after different random
    tokens, cycles of four tokens, and random tokens."""
    fields: dict[str, Any] = {"norm_epsilon": 0.25, "feed_forward": 5} if block == "residual" else {}
    model = architecture(cell, block, hidden=12, embedding=12, **fields)
    weights = random_weights(model, seed=1, recurrent=0.05, driven=0.2)
    certificate = export(model, weights).certificate
    rounding, exact = certificate.rounding, Reference(model, weights)
    run = OnnxGraphs(Bundle.read(tmp_path / "model")).run
    assert rounding is not None
    random, rows = np.random.default_rng(9), 33
    tokens = random.integers(11, size=(rows, 400))
    tokens[:11, 50:] = np.arange(11)[:, None]
    tokens[11:22] = np.take_along_axis(tokens[11:22, :4], np.tile(np.arange(400) % 4, (11, 1)), axis=1)
    zeros = exact.zero_state(rows)
    state, fed = zeros, {name: value.astype(np.float32) for name, value in zeros.items()}
    worst, off = 0.0, dict.fromkeys(rounding.states, 0.0)
    for column in tokens.T:
        hidden, state = exact.advance(column, state)
        outputs = run("step", {"tokens": column, **fed})
        fed = {name: outputs[f"next.{name}"] for name in fed}
        worst = max(worst, float(np.linalg.norm(outputs["hidden"] - hidden, axis=1).max()))
        for name in off:
            off[name] = max(off[name], float(np.linalg.norm(fed[name] - state[name], axis=1).max()))
    assert 0 < worst <= rounding.carried
    assert all(off[name] <= bound.ball for name, bound in rounding.states.items())


def test_graphs_with_a_front_are_verified_on_tokens_beyond_the_reach_of_the_front(
    export: Export, tmp_path: Path
) -> None:
    front = {"blocks": 2, "kernel_size": 16, "feed_forward": 4}  # the front reaches 30 tokens back
    model = architecture("gated", "residual", front=front)
    export(model, random_weights(model, seed=0))
    bundle, windows = Bundle.read(tmp_path / "model"), []
    graphs = OnnxGraphs(bundle)

    def run(role: Role, feeds: Tensors) -> Tensors:
        if role == "window":
            windows.append(int(feeds["lengths"].max()))
        return graphs.run(role, feeds)

    verify_graphs(bundle, run)
    assert max(windows) >= 46


def test_a_bundle_whose_roles_are_swapped_is_refused(export: Export, tmp_path: Path) -> None:
    export(architecture("gru"), random_weights(architecture("gru"), seed=0))
    bundle = Bundle.read(tmp_path / "model")
    graphs = bundle.manifest.graphs
    graphs["step"], graphs["window"] = graphs["window"], graphs["step"]
    with pytest.raises(BundleError, match=r"window, a batch: the graph cannot run: .*layers\.0\.h"):
        verify_graphs(bundle, OnnxGraphs(bundle).run)


def test_weights_that_do_not_fit_are_refused(export: Export, tmp_path: Path) -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0)
    network = torch_network(model, weights)
    del weights["head.bias"]
    with pytest.raises(ExportError, match=r"tensor head\.bias is missing"):
        export(model, weights, torch_network=network)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "sample_tokens is empty"), ([1, 11], r"sample_tokens\[1\] is 11, but the vocabulary has 11 tokens")],
)
def test_invalid_sample_tokens_are_refused(export: Export, tokens: list[int], message: str) -> None:
    model = architecture("gated")
    with pytest.raises(ExportError, match=message):
        export(model, random_weights(model, seed=0), sample_tokens=tokens)


def test_a_vocabulary_of_another_size_is_refused(export: Export) -> None:
    model = architecture("gated", vocabulary_size=12)
    with pytest.raises(ExportError, match=r"vocabulary\.size 11 is not architecture\.vocabulary_size 12"):
        export(model, random_weights(model, seed=0))
