from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from models.manifest import Architecture, Cell
from models.networks import Network
from models.reference import Reference
from tests.models.random_models import random_weights
from tests.training.corpora import text_corpus
from training.data import Corpus
from training.evaluate import spread_positions
from training.forgetting import AtWindow, Spread, measure, smallest_window, token_steps, window_grid

CORPUS = text_corpus()
WINDOWS = (1, 3, 8)
COUNT = 11


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Matrices this small are slower on more."""
    torch.set_num_threads(1)


def short_corpus(tokens: int = 90) -> Corpus:
    return Corpus(CORPUS.vocabulary, CORPUS.tokenizer_json, {"audit": CORPUS.streams["train"][:tokens]}, {}, {})


def model(cell: Cell = "lstm", **fields: object) -> tuple[Network, Reference]:
    """A random network, and the oracle with the same weights."""
    sizes: dict[str, object] = {"vocabulary_size": CORPUS.vocabulary.size, "embedding": 6, "hidden": 6, "layers": 2}
    architecture = Architecture.model_validate({"cell": cell, **sizes, **fields})
    weights = random_weights(architecture, seed=4, recurrent=0.9)
    network = Network(architecture).eval()
    network.load_weights({name: torch.from_numpy(tensor) for name, tensor in weights.items()})
    return network, Reference(architecture, weights)


def run(oracle: Reference, tokens: np.ndarray) -> np.ndarray:
    """hidden after the last of `tokens` from the zero state, float64 (H)."""
    state = oracle.zero_state(1)
    for token in tokens:
        hidden, state = oracle.advance(np.array([token]), state)
    return hidden[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def quantiles(values: list[float]) -> list[float]:
    return [*np.quantile(values, [0.5, 0.99]), max(values)]


def told(spread: Spread) -> list[float]:
    return [spread.median, spread.p99, spread.max]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "gated"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_figure_is_that_of_single_steps_in_float64(
    cell: Cell, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.evaluate.PIECE", 7)
    monkeypatch.setattr("training.forgetting.ROWS", 4)
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
        assert told(at.distance) == pytest.approx(quantiles(distances), abs=1e-5)
        assert told(at.total_variation) == pytest.approx(
            quantiles([float(np.abs(p - q).sum() / 2) for p, q in pairs]), abs=1e-5
        )
        assert at.top1_match == np.mean([p.argmax() == q.argmax() for p, q in pairs])
        loss = np.mean([-np.log(p[stream[t + 1]]) for (p, _), t in zip(pairs, positions, strict=True)])
        assert at.perplexity_ratio == pytest.approx(math.exp(loss - recurrent_loss), rel=1e-4)
        assert at.perplexity.per_token == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gradient_is_what_a_small_change_of_one_input_makes(
    cell: Cell, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.forgetting.GRADIENT_ROWS", 2)
    monkeypatch.setattr("training.forgetting.GRADIENT_POSITIONS", 3)
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
                    # the changed input is one token more in the embedding, which the head does not have
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
        assert told(at.gradient) == pytest.approx(quantiles(norms), rel=1e-4)


def test_a_model_without_memory_has_forgotten_everything_after_one_token() -> None:
    network, _ = model("rnn_tanh", layers=1)
    with torch.no_grad():
        network.layers[0].cell.weight_hh_l0.zero_()
    found = measure(network, short_corpus(), "audit", (1, 2), COUNT)
    assert all(at.distance.max < 1e-6 and at.total_variation.max < 1e-6 for at in found.windows)
    assert all(at.top1_match == 1 and at.perplexity_ratio == pytest.approx(1, abs=1e-6) for at in found.windows)
    assert found.lags[0].gradient.median > 0
    assert found.lags[1].gradient.max == 0


def test_a_measurement_advances_its_bar_by_what_it_announced() -> None:
    network, _ = model()
    steps: list[int] = []
    corpus = short_corpus()
    measure(network, corpus, "audit", WINDOWS, COUNT, steps.append)
    assert sum(steps) == token_steps(len(corpus.streams["audit"]), WINDOWS, COUNT)


def test_the_grid_of_windows_doubles_with_a_step_between() -> None:
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
def test_a_recommended_window_is_good_from_there_on(p99: dict[int, float], smallest: int | None) -> None:
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
