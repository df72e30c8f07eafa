from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.corpora import text_corpus
from wane.models.layer_registry import Kind
from wane.models.networks import Network
from wane.training.config import ModelConfig
from wane.training.evaluate import (
    SplitLosses,
    evaluate_split,
    quality,
    recurrent_losses,
    spread_positions,
    window_losses,
)
from wane.training.plots import plot_quality


def network(cell: Kind = "lstm") -> Network:
    torch.manual_seed(3)
    return Network(ModelConfig(cell=cell, hidden=12, layers=2).architecture(300)).eval()


def token_by_token(model: Network, stream: np.ndarray) -> list[float]:
    """Returns the loss of every next token. Runs the model one step at a time."""
    losses, state = [], None
    with torch.inference_mode():
        for token, target in pairwise(stream):
            hidden, state = model(torch.tensor([[token]]), state)
            losses.append(-torch.log_softmax(model.logits(hidden[0, 0]), -1)[target].item())
    return losses


@pytest.mark.parametrize("cell", ["gated", "lstm", "linear"])
def test_recurrent_losses_match_single_steps_across_pieces(cell: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.training.evaluate.PIECE", 7)
    model, stream = network(cell), text_corpus().streams["valid"][:40]
    assert recurrent_losses(model, stream).tolist() == pytest.approx(token_by_token(model, stream), abs=1e-5)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_window_reads_only_the_last_k_tokens(k: int) -> None:
    model, stream = network(), text_corpus().streams["valid"][:40]
    positions = spread_positions(stream, 10, 8)
    expected = [token_by_token(model, stream[end - k + 1 : end + 2])[-1] for end in positions]
    assert window_losses(model, stream, k, positions).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_window_over_the_whole_past_equals_the_recurrent_model() -> None:
    model, stream = network(), text_corpus().streams["valid"][:40]
    whole = window_losses(model, stream, 39, np.array([38]))
    assert whole.item() == pytest.approx(recurrent_losses(model, stream)[-1].item(), abs=1e-5)


def test_positions_leave_room_for_the_longest_window_and_the_target() -> None:
    positions = spread_positions(np.arange(100), 7, 32)
    assert (positions[0], positions[-1], len(positions)) == (31, 98, 7)
    assert spread_positions(np.arange(10), 7, 32).size == 0


def test_perplexity_per_word_divides_the_total_loss_by_the_words() -> None:
    losses = SplitLosses(300, 100, 1.0, 10, 1.0, {})
    assert losses.perplexity(1.0).per_word == pytest.approx(math.exp(3.0))
    assert SplitLosses(300, None, 1.0, 10, 1.0, {}).perplexity(1.0).per_word is None


@pytest.mark.parametrize(
    ("window", "smallest"),
    [
        ({1: 2.0, 8: 1.004, 64: 1.0}, 8),
        ({1: 1.0, 8: 1.01, 64: 1.004}, 64),
        ({1: 2.0, 8: 1.5, 64: 1.006}, None),
        ({8: 0.99}, None),
    ],
)
def test_the_smallest_close_window_is_the_first_from_which_all_larger_windows_are_close(
    window: dict[int, float], smallest: int | None
) -> None:
    losses = SplitLosses(300, 100, 1.1, 10, 1.0, window)
    assert quality({"valid": losses}).window_within_half_percent == smallest


def test_recurrent_loss_covers_the_whole_split_and_is_also_given_at_the_windows_positions() -> None:
    model, corpus = network(), text_corpus()
    losses = evaluate_split(model, corpus, "test", (1, 4), count=9)
    every = recurrent_losses(model, corpus.streams["test"]).double()
    positions = spread_positions(corpus.streams["test"], 9, 4)
    assert losses.recurrent == pytest.approx(every.mean().item())
    assert losses.recurrent_at_positions == pytest.approx(every[torch.from_numpy(positions)].mean().item())
    assert losses.recurrent != losses.recurrent_at_positions
    assert (losses.tokens, losses.words) == (len(corpus.streams["test"]) - 1, corpus.words["test"])


def test_an_evaluation_skips_long_windows_and_is_plotted(tmp_path: Path) -> None:
    losses = evaluate_split(network(), text_corpus(), "valid", (1, 4, 10**6), count=20)
    assert sorted(losses.window) == [1, 4]
    assert losses.positions == 20
    plot_quality("tiny", quality({"valid": losses}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
