from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.models.random_models import random_weights
from tests.training.corpora import text_corpus
from wane.models.architecture import Architecture
from wane.models.layer_registry import Kind
from wane.models.networks import Network
from wane.models.reference import Array, Reference
from wane.training.audit.forgetting import (
    AtWindow,
    Quantiles,
    Unmeasurable,
    measure,
    smallest_window,
    token_steps,
    window_grid,
)
from wane.training.data import Corpus
from wane.training.evaluate import spread_positions

CORPUS = text_corpus()
WINDOWS = (1, 3, 8)
COUNT = 11


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Limits torch to one thread, which is faster for small matrices."""
    torch.set_num_threads(1)


def short_corpus(tokens: int = 90) -> Corpus:
    return Corpus(CORPUS.vocabulary, CORPUS.tokenizer_json, {"audit": CORPUS.streams["train"][:tokens]}, {}, {})


def model(cell: Kind = "lstm", **fields: object) -> tuple[Network, Reference]:
    """Returns a random network, and its float64 reference implementation (the oracle) with the same weights."""
    sizes: dict[str, object] = {"vocabulary_size": CORPUS.vocabulary.size, "embedding": 6, "hidden": 6, "layers": 2}
    architecture = Architecture.model_validate({"cell": cell, **sizes, **fields})
    weights = random_weights(architecture, seed=4, recurrent=0.9)
    network = Network(architecture).eval()
    network.load_weights({name: torch.from_numpy(tensor) for name, tensor in weights.items()})
    return network, Reference(architecture, weights)


def run(oracle: Reference, tokens: np.ndarray) -> Array:
    """Returns `hidden` (H) after `tokens` in float64, from the zero state."""
    state = oracle.zero_state(1)
    for token in tokens:
        hidden, state = oracle.advance(np.array([token]), state)
    last: Array = hidden[0]
    return last


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max())
    shares: Array = shifted / shifted.sum()
    return shares


def quantiles(values: list[float]) -> list[float]:
    return [*np.quantile(values, [0.5, 0.99]), max(values)]


def summary(spread: Quantiles) -> list[float]:
    return [spread.median, spread.p99, spread.max]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "gated"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_figure_matches_single_steps_in_float64(cell: Kind, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.training.evaluate.PIECE", 7)
    monkeypatch.setattr("wane.training.audit.forgetting.ROWS", 4)
    network, oracle = model(cell, tied=tied)
    corpus = short_corpus()
    stream = corpus.streams["audit"]
    found = measure(network, corpus, "audit", WINDOWS, COUNT)
    positions = spread_positions(stream, COUNT, 2 * max(WINDOWS))
    whole = {t: run(oracle, stream[: t + 1]) for t in positions}
    recurrent_loss = np.mean([-np.log(softmax(oracle.logits(whole[t]))[stream[t + 1]]) for t in positions])
    assert (found.losses.positions, found.losses.tokens) == (COUNT, len(stream) - 1)
    assert found.losses.recurrent_at_positions == pytest.approx(recurrent_loss, abs=1e-5)
    for at in found.windows:
        cut = {t: run(oracle, stream[t - at.k + 1 : t + 1]) for t in positions}
        pairs = [(softmax(oracle.logits(cut[t])), softmax(oracle.logits(whole[t]))) for t in positions]
        distances = [float(np.linalg.norm(cut[t] - whole[t])) for t in positions]
        assert summary(at.distance) == pytest.approx(quantiles(distances), abs=1e-5)
        assert summary(at.total_variation) == pytest.approx(
            quantiles([float(np.abs(p - q).sum() / 2) for p, q in pairs]), abs=1e-5
        )
        assert at.top1_match == np.mean([p.argmax() == q.argmax() for p, q in pairs])
        loss = np.mean([-np.log(p[stream[t + 1]]) for (p, _), t in zip(pairs, positions, strict=True)])
        assert at.perplexity_ratio == pytest.approx(math.exp(loss - recurrent_loss), rel=1e-4)
        assert at.perplexity.per_token == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gradient_matches_finite_differences(cell: Kind, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.training.audit.forgetting.GRADIENT_ROWS", 2)
    monkeypatch.setattr("wane.training.audit.forgetting.GRADIENT_POSITIONS", 3)
    network, _ = model(cell, tied=tied)
    network.double()
    corpus = short_corpus()
    stream = torch.from_numpy(corpus.streams["audit"])
    found = measure(network, corpus, "audit", WINDOWS, COUNT)
    assert found.gradient_positions == 3
    positions = spread_positions(corpus.streams["audit"], COUNT, 2 * max(WINDOWS))[[0, 5, 10]]
    assert [at.i for at in found.lags] == [0, 1, 3]
    embedding = network.embedding.weight.detach()
    for at in found.lags:
        norms = []
        for t in positions.tolist():
            gradient = []
            for unit in range(embedding.shape[1]):
                ends = []
                for step in (1e-5, -1e-5):
                    # The changed input vector is added to the embedding as a new row. The head has no such row.
                    changed = embedding[stream[t - at.i]].clone()
                    changed[unit] += step
                    tokens = stream[: t + 1].clone()
                    tokens[t - at.i] = len(embedding)
                    x = torch.cat([embedding, changed[None]])
                    hidden, _ = torch.func.functional_call(
                        network, {"embedding.weight": x}, (tokens[:, None],), tie_weights=False
                    )
                    ends.append(torch.softmax(network.logits(hidden[-1, 0]), -1)[stream[t + 1]].item())
                gradient.append((ends[0] - ends[1]) / 2e-5)
            norms.append(float(np.linalg.norm(gradient)))
        assert summary(at.gradient) == pytest.approx(quantiles(norms), rel=1e-4)


def test_a_model_without_memory_forgets_after_one_token() -> None:
    network, _ = model("rnn_tanh", layers=1)
    with torch.no_grad():
        network.get_parameter("layers.0.cell.weight_hh_l0").zero_()
    found = measure(network, short_corpus(), "audit", (1, 2), COUNT)
    assert all(at.distance.max < 1e-6 and at.total_variation.max < 1e-6 for at in found.windows)
    assert all(at.top1_match == 1 and at.perplexity_ratio == pytest.approx(1, abs=1e-6) for at in found.windows)
    assert found.lags[0].gradient.median > 0
    assert found.lags[1].gradient.max == 0


def filled(network: Network, **values: object) -> Network:
    """Sets the named weights and biases of a one-layer network, such as weight_hh. Sets all other weights and biases to
    0."""
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            short = "head" if name == "head.weight" else name.split(".")[-1].removesuffix("_l0")
            given = values.get("embedding" if name == "embedding.weight" else short, 0.0)
            tensor.copy_(torch.as_tensor(given, dtype=torch.float32).expand_as(tensor))
    return network


@pytest.mark.parametrize("piece", [7, 1024])
def test_an_overflow_of_the_run_is_reported_with_its_token(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.training.evaluate.PIECE", piece)
    network, _ = model("rnn_relu", layers=1)
    with torch.no_grad():
        network.get_parameter("layers.0.cell.weight_hh_l0").abs_().mul_(4)
    stream, state, read = short_corpus().streams["audit"], None, 0
    finite = True
    while finite:
        hidden, state = network(torch.from_numpy(stream[read : read + 1, None]), state)
        finite = bool(network.logits(hidden).isfinite().all())
        read += 1
    assert 16 < read < len(stream) - 1
    with pytest.raises(Unmeasurable, match=f"^the uninterrupted run overflows float32 at token {read}$"):
        measure(network, short_corpus(), "audit", WINDOWS, COUNT)
    # With one token less, all values are finite.
    with pytest.raises(Unmeasurable, match=r"^the perplexity of a mean loss"):
        measure(network, short_corpus(read), "audit", WINDOWS, COUNT)


def test_an_overflow_of_only_a_window_is_reported() -> None:
    # Unit 0 grows by the factor 1e20 at every token, unless unit 1 remembers `<eos>`, the first token of the stream.
    eos = CORPUS.vocabulary.eos_id
    embedding = torch.tensor([1.0, 0, 0, 0, 0, 0]).repeat(CORPUS.vocabulary.size, 1)
    embedding[eos] = torch.tensor([0.0, 1, 0, 0, 0, 0])
    recurrent = torch.zeros(6, 6)
    recurrent[0, 0], recurrent[0, 1], recurrent[1, 1] = 1e20, -2, 1
    network, _ = model("rnn_relu", layers=1, tied=False)
    filled(network, embedding=embedding, weight_ih=torch.eye(6), weight_hh=recurrent)
    corpus = short_corpus()
    assert corpus.streams["audit"][0] == eos
    with pytest.raises(Unmeasurable, match=r"^the window of 3 token\(s\) overflows float32 at token \d+$"):
        measure(network, corpus, "audit", WINDOWS, COUNT)


def test_an_overflow_of_a_gradient_is_reported() -> None:
    network, _ = model("rnn_tanh", layers=1, tied=False)
    filled(network, weight_ih=torch.eye(6), weight_hh=1e10 * torch.eye(6), head=torch.rand(CORPUS.vocabulary.size, 6))
    with pytest.raises(Unmeasurable, match=r"^the gradient over 8 token\(s\) overflows float32 at token 16$"):
        measure(network, short_corpus(), "audit", WINDOWS, COUNT)


def test_a_loss_without_a_finite_perplexity_is_reported() -> None:
    network, _ = model(tied=False)
    with torch.no_grad():
        network.head.weight.mul_(1e6)
    with pytest.raises(Unmeasurable, match=r"^the perplexity of a mean loss of \S+ nats per token overflows"):
        measure(network, short_corpus(), "audit", WINDOWS, COUNT)


def test_a_distance_is_measured_even_if_its_square_overflows() -> None:
    network, _ = model("rnn_relu", layers=1, tied=False)
    filled(network, embedding=1.0, weight_ih=1e30 * torch.eye(6), weight_hh=torch.eye(6))
    found = measure(network, short_corpus(), "audit", (1, 2), 1)
    # Each token adds 1e30 to each of the six units. At the only measured position, the uninterrupted run has read 4
    # tokens, so each unit is 4e30. After a window of k tokens, each unit is k * 1e30.
    assert [at.distance.max for at in found.windows] == pytest.approx([3e30 * 6**0.5, 2e30 * 6**0.5])


def test_an_overflowing_perplexity_per_word_is_left_out() -> None:
    corpus = short_corpus(300)
    corpus.words["audit"] = 1
    found = measure(model()[0], corpus, "audit", WINDOWS, COUNT)
    assert found.losses.words is None
    assert found.windows[0].perplexity.per_word is None
    corpus.words["audit"] = 150
    assert measure(model()[0], corpus, "audit", WINDOWS, COUNT).windows[0].perplexity.per_word is not None


def test_a_measurement_advances_its_progress_bar_to_the_announced_total() -> None:
    network, _ = model()
    steps: list[int] = []
    corpus = short_corpus()
    measure(network, corpus, "audit", WINDOWS, COUNT, steps.append)
    assert sum(steps) == token_steps(len(corpus.streams["audit"]), WINDOWS, COUNT)


def test_the_window_grid_has_powers_of_two_and_midpoints() -> None:
    assert window_grid(1) == [1]
    assert window_grid(17) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert window_grid(256)[-3:] == [128, 192, 256]


@pytest.mark.parametrize(
    ("p99", "smallest"),
    [
        ({1: 0.5, 2: 0.009, 4: 0.001}, 2),
        ({1: 0.001, 2: 0.02, 4: 0.01}, 4),
        ({1: 0.001, 2: 0.001, 4: 0.02}, None),
        ({4: 0.001, 1: 0.001}, 1),
    ],
)
def test_from_a_recommended_window_on_all_windows_are_within_the_tolerance(
    p99: dict[int, float], smallest: int | None
) -> None:
    windows = [
        AtWindow.model_validate(
            {
                "k": k,
                "distance": {"median": 0, "p99": 0, "max": 0},
                "total_variation": {"median": 0, "p99": value, "max": 1},
                "top1_match": 1,
                "perplexity": {"per_token": 2},
                "perplexity_ratio": 1,
            }
        )
        for k, value in p99.items()
    ]
    assert smallest_window(windows, 0.01, "p99") == smallest
    assert smallest_window(windows, 0.01, "max") is None
