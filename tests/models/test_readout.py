"""Tests the bound of the rounding of residual networks with one gated layer. The models are made by hand: after one
pair of tokens, the input of the last LayerNorm nearly vanishes, so that the LayerNorm amplifies the difference that
rounding leaves between the states of two runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.models.bundles import edit_manifest, export_words
from tests.models.random_models import architecture, random_weights
from tests.models.rounding import rounding
from tests.models.serving import answers
from tests.service.live_server import live_server
from wane.models.architecture import Architecture
from wane.models.bundle import Bundle, CertificateError, verify_graphs
from wane.models.certificate import certify
from wane.models.certificate.admissible import SUMS, UNIT_FLOAT32
from wane.models.certificate.layers import build_layers
from wane.models.certificate.perturbation import Perturbation
from wane.models.certificate.readout import roundoffs, states_apart
from wane.models.export.export import WEIGHTS, opened_step
from wane.models.export.parity import OnnxGraphs
from wane.models.export.roles import build_graph
from wane.models.manifest import StateError
from wane.models.reference import Reference
from wane.models.weights import encode_weights, tensor_extents
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest

PAST, HELD, LAST = 2, 3, 4
HOLD = 1023
TOKENS = (*(PAST,) * 60, *(HELD,) * HOLD, LAST)
ROUNDING = 1e-6
"""The tolerance of an observed total variation, for the rounding of probabilities to float32."""


def vanishing(
    epsilon: float, head: float = 20.0, width: int = 64
) -> tuple[Architecture, dict[str, NDArray[np.float32]]]:
    """Returns a model for which the input of the last LayerNorm is almost zero after TOKENS. head: the scale of the
    output layer."""
    model = architecture(
        "gated", "residual", hidden=width, embedding=width, norm_epsilon=epsilon, gate_caps=(0.98,), tied=False
    )
    random = np.random.default_rng(5)
    weights = random_weights(model, seed=5)
    weights["embedding.weight"] = random.normal(size=(11, width)).astype(np.float32)
    weights["layers.0.cell.weight"] = (random.normal(size=(2 * width, width)) / np.sqrt(width)).astype(np.float32)
    weights["layers.0.cell.bias"] = np.repeat(np.array([4, 0], np.float32), width)
    weights["layers.0.mix.weight"] = (0.3 * np.linalg.qr(random.normal(size=(width, width)))[0]).astype(np.float32)
    for name, value in (("layers.0.norm", 1), ("norm", 1)):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = (
            np.full(width, value, np.float32),
            np.zeros(width, np.float32),
        )
    for _ in range(30):
        exact = Reference(model, weights)
        state = exact.zero_state(1)
        for token in (*(HELD,) * 400, LAST):
            _, state = exact.advance(np.array([token]), state)
        opposite = -(state["layers.0.s"][0] @ weights["layers.0.mix.weight"].T.astype(np.float64))
        weights["embedding.weight"][LAST] = opposite.astype(np.float32)
    weights["head.weight"] = np.zeros((11, width), np.float32)
    weights["head.weight"][5:7] = head * random.normal(size=(2, width)) / np.sqrt(width)
    weights["head.bias"] = np.full(11, -40, np.float32)
    weights["head.bias"][5:7] = 0
    return model, weights


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Bundle]:
    """Returns a function that exports a model and opens the bundle."""

    def run(model: Architecture, weights: dict[str, NDArray[np.float32]]) -> Bundle:
        sample = [index % 11 for index in range(200)]
        export_words(tmp_path / "model", model, weights, window=64, max_window=HOLD + 1, sample_tokens=sample)
        return Bundle.read(tmp_path / "model")

    return run


@pytest.mark.parametrize(("epsilon", "head"), [(1e-8, 4.0), (1e-10, 2.0)])
def test_no_bound_is_passed_if_the_input_of_the_last_norm_vanishes(
    export: Callable[..., Bundle], epsilon: float, head: float
) -> None:
    bundle = export(*vanishing(epsilon, head))
    requests = [
        PredictRequest(TOKENS, mode=Mode.BOTH, window=HOLD + 1, top_k=2, prove=prove) for prove in (False, True)
    ]
    requests += [
        PredictRequest(TOKENS, mode=Mode.WINDOW, window=HOLD + 1, top_k=2, prove=prove, logits=True)
        for prove in (False, True)
    ]
    requests.append(PredictRequest(TOKENS, mode=Mode.RECURRENT, top_k=2, logits=True))
    found = answers(bundle, requests)
    assert bundle.manifest.certificate.certified
    seen = apart = 0.0
    for answer in found[:2]:
        pair = answer.agreement
        assert pair is not None and pair.error_bound is not None and pair.state_error_bound is not None
        assert pair.total_variation <= pair.error_bound + ROUNDING
        assert pair.state_distance <= pair.state_error_bound
        assert pair.top1_match or not pair.top1_proved
        seen, apart = max(seen, pair.total_variation), max(apart, pair.state_distance)
    assert apart > 5e-4, "rounding has no effect on this model, so this test checks nothing"
    full = found[-1].predictions[0].token_id
    for answer in found[2:4]:
        assert answer.error_bound is not None and answer.error_bound >= seen - ROUNDING
        assert answer.predictions[0].token_id == full or not answer.top1_proved


def test_no_bound_is_passed_and_nothing_is_proved_falsely_over_http(export: Callable[..., Bundle]) -> None:
    bundle = export(*vanishing(1e-8, 4.0))
    both: dict[str, Any] = {"mode": "both", "window": HOLD + 1}
    asked: list[dict[str, Any]] = [both, {"mode": "window", "window": HOLD + 1}, {"mode": "window", "window": 64}]
    asked += [{"mode": "auto", "tolerance": 0.5}, {"tokens": TOKENS[-HOLD - 1 :], "truncated": True}]
    asked += [{"mode": "recurrent", "tokens": TOKENS[-64:], "truncated": True}]
    with live_server(WANE_BUNDLES=str(bundle.path)) as server, httpx.Client(base_url=server.url, timeout=60) as http:

        def ask(route: str, **fields: Any) -> dict[str, Any]:
            response = http.post(route, json={"tokens": TOKENS, **fields})
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        def distribution(found: dict[str, Any]) -> NDArray[np.float64]:
            values = {one["token_id"]: one["probability"] for one in found["predictions"]}
            return np.array([values.get(token, 0.0) for token in range(11)])

        def check(apart: float, found: dict[str, Any], same: bool) -> None:
            assert apart <= found["error_bound"] + ROUNDING, found
            assert same or not found["top1_proved"], found

        exact = distribution(ask("/v1/predict", mode="recurrent", top_k=11))
        seen, pairs = list[float](), list[dict[str, Any]]()
        for prove in (False, True):
            for fields in asked:
                found = ask("/v1/predict", top_k=11, prove=prove, **fields)
                shown = distribution(found)
                seen.append(float(np.abs(shown - exact).sum() / 2))
                check(seen[-1], found, bool(shown.argmax() == exact.argmax()))
                if fields is both:
                    pairs.append(found["agreement"])
        compared = ask("/v1/compare", windows=[64, 512, HOLD + 1], repeat=1)["models"][0]["windows"]
        pairs += [one["agreement"] for one in compared]
        for pair in pairs:
            check(pair["total_variation"], pair, pair["top1_match"])
    assert len(pairs) == 5
    assert max(seen[1::6]) > 1e-4, "rounding has no effect on this model, so this test checks nothing"


def test_two_runs_stay_within_the_bound_of_their_states_and_of_hidden(export: Callable[..., Bundle]) -> None:
    """Holds every token after every other token."""
    model, weights = vanishing(1e-5)
    bundle = export(model, weights)
    readout, run = bundle.manifest.certificate.readout, OnnxGraphs(bundle).run
    assert readout is not None
    apart = states_apart(build_layers(model, weights)[0])
    past, held = (each.ravel() for each in np.meshgrid(np.arange(11), np.arange(11)))
    full, cut = (np.zeros((len(held), model.hidden), np.float32) for _ in range(2))
    for _ in range(100):
        full = run("step", {"tokens": past, "layers.0.s": full})["next.layers.0.s"]
    for _ in range(2500):
        ends = [run("step", {"tokens": held, "layers.0.s": state}) for state in (full, cut)]
        full, cut = (end["next.layers.0.s"] for end in ends)
    seen = np.abs(full.astype(np.float64) - cut)
    assert seen.max() > 1e-7, "the two runs do not stay apart, so this test checks nothing"
    assert np.all(seen <= apart)
    distance = np.linalg.norm(ends[0]["hidden"].astype(np.float64) - ends[1]["hidden"], axis=1)
    bounds = readout.between_all(ends[1]["norms"])
    assert np.all(distance <= bounds)
    assert bounds == pytest.approx([readout.between(norms) for norms in ends[1]["norms"].tolist()], rel=1e-12)


def test_a_changed_readout_is_refused(export: Callable[..., Bundle], tmp_path: Path) -> None:
    bundle = export(*vanishing(1e-5))
    edit_manifest(tmp_path / "model", "certificate", "readout", "state", value=1e-12)
    with pytest.raises(CertificateError, match=r"certificate\.readout"):
        Bundle.read(tmp_path / "model")
    for field in ("mixed", "relative", "top"):
        edit_manifest(tmp_path / "model", "certificate", "readout", field, value=1e-14)
    with pytest.raises(CertificateError, match="readout, which must be at least"):
        verify_graphs(Bundle.open(tmp_path / "model"), OnnxGraphs(bundle).run)


def test_a_bundle_of_an_earlier_version_is_not_certified(export: Callable[..., Bundle], tmp_path: Path) -> None:
    export(*vanishing(1e-5))
    errors = {"layers.0.s": {"box": 1e-6, "ball": 1e-5}}
    measured = {"sequences": "probed", "steps": 1, "safety": 2, "step": errors, "output": 1e-5, "states": errors}
    edit_manifest(tmp_path / "model", "certificate", "readout", value=None)
    edit_manifest(tmp_path / "model", "certificate", "rounding", value={**measured, "carried": 1e-5})
    edit_manifest(tmp_path / "model", "schema_version", value=4)
    with pytest.raises(CertificateError, match=r"measured by an earlier version of Wane.*`wane export "):
        Bundle.read(tmp_path / "model")


def test_a_network_with_several_residual_layers_has_no_readout() -> None:
    model = architecture("gated", "residual", layers=2, gate_caps=(0.9, 0.9))
    assert certify(model, random_weights(model, 0), 8, None).readout is None


ROUNDED = 1999
"""A token that is neither in the sample nor among the random tokens of the checks at export."""


def nearly_constant(case: str) -> tuple[Architecture, dict[str, NDArray[np.float32]]]:
    """Returns a model for which the input of the LayerNorm below the cell nearly vanishes at the token ROUNDED. There,
    the LayerNorm's output sums to zero in exact arithmetic, but not in float32. case: "gates", which this sum opens, or
    "candidates", which this sum determines."""
    width, trials = 8, 3000
    epsilon, scale = (1e-10, 300.0) if case == "gates" else (1e-5, 1e5)
    fields: dict[str, Any] = {"hidden": width, "embedding": width, "norm_epsilon": epsilon, "gate_caps": (0.98,)}
    random = np.random.default_rng(0)
    near = np.repeat((scale * (1 + 0.3 * random.random((trials, 1)))).astype(np.float32), width, axis=1)
    near += np.spacing(near) * random.integers(-2, 3, size=near.shape).astype(np.float32)
    probe = architecture("gated", "residual", vocabulary_size=trials, tied=False, **fields)
    model = architecture("gated", "residual", vocabulary_size=ROUNDED + 1, tied=False, **fields)
    weights = {name: value * 0 for name, value in random_weights(model, seed=0).items()}
    weights["layers.0.norm.weight"][:] = weights["norm.weight"][:] = 1
    for name in ("layers.0.cell.weight", "layers.0.mix.weight", "head.weight"):
        weights[name] = random.normal(size=weights[name].shape).astype(np.float32)
    matrix, bias = weights["layers.0.cell.weight"], weights["layers.0.cell.bias"]
    matrix[:width], matrix[width:], bias[:width] = 0, 0.5 / width, -6
    head = np.zeros((trials, width), np.float32), np.zeros(trials, np.float32)
    data = encode_weights(weights | {"embedding.weight": near, "head.weight": head[0], "head.bias": head[1]})
    zero = np.zeros((trials, width), np.float32)
    with opened_step(build_graph("step", probe, WEIGHTS, tensor_extents(data)), data) as run:
        sums = run("step", {"tokens": np.arange(trials), "layers.0.s": zero})["next.layers.0.s"].sum(axis=1)
    weights["embedding.weight"] = random.normal(size=(ROUNDED + 1, width)).astype(np.float32)
    weights["embedding.weight"][ROUNDED] = near[sums.argmax()]
    if case == "gates":
        matrix[:width], matrix[width:] = 16 / width, 0.3 * random.normal(size=(width, width))
        weights["layers.0.mix.weight"] = np.eye(width, dtype=np.float32)
    else:
        matrix[width:], bias[:width] = 16 / width, 3
    return model, weights


@pytest.mark.parametrize("case", ["gates", "candidates"])
def test_no_answer_is_false_if_the_input_of_the_norm_below_the_cell_vanishes(
    export: Callable[..., Bundle], case: str
) -> None:
    model, weights = nearly_constant(case)
    bundle = export(model, weights)
    sequences = [[2, 3, 4, 5, *[ROUNDED] * held] for held in (4, 16, 64, 400)]
    sequences += [[*[ROUNDED] * 60, *range(2, 9), *[3] * more] for more in (0, 20)]
    requests = [
        PredictRequest(tuple(tokens), mode=Mode.BOTH, window=window, top_k=2, prove=prove)
        for tokens in sequences
        for window in (4, 7, 16)
        for prove in (False, True)
    ]
    for answer in answers(bundle, requests):
        pair = answer.agreement
        assert pair is not None
        assert pair.top1_match or not pair.top1_proved
        if bundle.manifest.certificate.certified:
            assert pair.error_bound is not None and pair.state_error_bound is not None
            assert pair.total_variation <= pair.error_bound + ROUNDING
            assert pair.state_distance <= pair.state_error_bound


@pytest.mark.parametrize("case", ["gates", "candidates"])
def test_the_gates_and_candidates_that_the_graph_computes_are_within_the_bounds(
    export: Callable[..., Bundle], case: str
) -> None:
    model, weights = nearly_constant(case)
    (layer,) = build_layers(model, weights)
    run, readout = OnnxGraphs(export(model, weights)).run, certify(model, weights, 8, None).readout
    assert readout is not None
    tokens, states = np.arange(ROUNDED + 1), [np.full((ROUNDED + 1, 8), value, np.float32) for value in (0, 1)]
    ends = [run("step", {"tokens": tokens, "layers.0.s": state})["next.layers.0.s"] for state in states]
    gates, held = ends[1].astype(np.float64) - ends[0], states[0]
    kept = layer.step(layer.at_least((Perturbation.within(np.ones(8)),)), None).perturbations[0].box
    assert np.all(gates <= kept * (1 + readout.gate) + 2.0**-22)
    for _ in range(200):
        held = run("step", {"tokens": tokens, "layers.0.s": held})["next.layers.0.s"]
    assert np.all(np.abs(held) <= layer.bound.reach[0])
    exact = Reference(model, weights).step(np.array([ROUNDED]), {"layers.0.s": np.zeros((1, 8))})[2]["layers.0.s"]
    assert np.abs(ends[0][ROUNDED] - exact).max() > 1e-3, "the graph is exact, so this test checks nothing"


@pytest.mark.parametrize("terms", [128, 576])
def test_a_matrix_whose_sums_are_rounded_in_one_direction_has_the_a_priori_bound(terms: int) -> None:
    """The graph's product with such a matrix has errors above SUMS units of roundoff."""
    random = np.random.default_rng(0)
    regular = random.choice([-0.75, 0.75], size=(32, 1)) * np.ones((32, terms))
    usual = random.normal(size=(32, terms))
    ones = np.ones(terms)
    assert roundoffs(usual, ones) == SUMS
    assert roundoffs(regular, ones) == roundoffs(np.concatenate([usual, regular]), ones) == terms + 2
    # Large columns with small inputs do not hide the others.
    hidden = np.concatenate([regular, 1e4 * random.normal(size=(32, 64))], axis=1)
    assert roundoffs(hidden, np.concatenate([ones, np.full(64, 1e-9)])) == terms + 66
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", terms])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 32])],
        [numpy_helper.from_array(regular.T.astype(np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.repeat(random.uniform(0.5, 1, size=(500, 1)).astype(np.float32), terms, axis=1)
    off = session.run(None, {"x": x})[0] - x.astype(np.float64) @ regular.T
    size = np.linalg.norm(x.astype(np.float64) @ np.abs(regular.T), axis=1)
    found = float((np.linalg.norm(off, axis=1) / (UNIT_FLOAT32 * size)).max())
    assert SUMS < found <= terms + 2


@pytest.mark.parametrize("front", [None, {"blocks": 1, "kernel_size": 2, "feed_forward": 4}])
def test_no_measured_step_bounds_the_rounding_of_other_residual_networks(front: dict[str, int] | None) -> None:
    """With convolution blocks there is no a priori bound either, so nothing is claimed."""
    model = architecture("gated", "residual", layers=2, gate_caps=(0.9, 0.9), front=front)
    weights = random_weights(model, 0)
    measured = rounding(1e-9).model_copy(
        update={"step": {f"layers.{layer}.s": StateError(box=1e-12, ball=1e-12) for layer in range(2)}, "output": 1e-9}
    )
    certificate = certify(model, weights, 8, measured)
    assert certificate.contractive and certificate.rounding is not None
    if front is None:
        assert certificate.rounding.worst_case is not None
        assert certificate.rounding.between_runs >= certificate.rounding.worst_case > 1e-6
    else:
        assert certificate.rounding.worst_case is None
        gain = float(np.abs(weights["norm.weight"]).max())
        assert certificate.rounding.between_runs >= 2 * gain * np.sqrt(model.hidden)
