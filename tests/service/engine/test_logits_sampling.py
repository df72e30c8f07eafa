from __future__ import annotations

import numpy as np
import pytest

from tests.service.engine_harness import name_vocabulary
from wane.service.engine.logits import Sampler, largest, listed, log_softmax
from wane.service.types.request import GenerateRequest

LOGITS = np.log(np.array([0.1, 0.5, 0.25, 0.15], np.float32))
DRAWS = 4000


def sampler_of(temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> Sampler:
    return Sampler(GenerateRequest((1,), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed), 4, frozenset())


def drawn(sampler: Sampler, logits: np.ndarray[tuple[int], np.dtype[np.float32]] = LOGITS) -> set[int]:
    return {sampler.draw(log_softmax(logits)) for _ in range(DRAWS)}


def test_temperature_0_is_the_most_probable_token_with_its_true_log_probability() -> None:
    logprobs = log_softmax(LOGITS)
    assert sampler_of(0.0, None, None, None).draw(logprobs) == 1
    assert logprobs == pytest.approx(np.log([0.1, 0.5, 0.25, 0.15]), abs=1e-6)


def test_sampled_tokens_follow_the_distribution() -> None:
    sampler = sampler_of(1.0, None, None, seed=1)
    counts = np.bincount([sampler.draw(log_softmax(LOGITS)) for _ in range(DRAWS)], minlength=4) / DRAWS
    # 0.04 is more than five standard deviations of a token's share of the draws. One standard deviation is at most
    # sqrt(0.25 / DRAWS), which is 0.0079.
    assert counts == pytest.approx(np.exp(LOGITS), abs=0.04)


def test_a_low_temperature_sharpens_and_a_high_temperature_flattens_the_distribution() -> None:
    def share(temperature: float) -> float:
        sampler = sampler_of(temperature, None, None, seed=1)
        return sum(sampler.draw(log_softmax(LOGITS)) == 1 for _ in range(DRAWS)) / DRAWS

    assert share(0.5) == pytest.approx(0.25 / 0.345, abs=0.04)
    assert share(100.0) == pytest.approx(0.25, abs=0.04)


def test_top_k_keeps_the_k_most_probable() -> None:
    assert drawn(sampler_of(1.0, 2, None, seed=1)) == {1, 2}
    assert drawn(sampler_of(1.0, 100, None, seed=1)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.49, {1}), (0.51, {1, 2}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_add_up_to_p(top_p: float, kept: set[int]) -> None:
    assert drawn(sampler_of(1.0, None, top_p, seed=1)) == kept


def test_top_k_comes_before_top_p() -> None:
    # Among the top 2 tokens, token 1 has the share 2/3, which is enough for top_p 0.6. Among all four tokens, token 1
    # would have the share 1/2, which is less than top_p.
    assert drawn(sampler_of(1.0, 2, 0.6, seed=1)) == {1}
    assert drawn(sampler_of(1.0, None, 0.6, seed=1)) == {1, 2}


def test_equal_seeds_sample_equal_tokens() -> None:
    def run(seed: int) -> list[int]:
        sampler = sampler_of(1.0, None, None, seed)
        return [sampler.draw(log_softmax(LOGITS)) for _ in range(50)]

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_extreme_temperatures_sample_a_token(temperature: float) -> None:
    tokens = drawn(sampler_of(temperature, None, 0.9, seed=1))
    assert tokens == ({1} if temperature < 1 else {0, 1, 2, 3})


def test_log_probabilities_do_not_overflow() -> None:
    logprobs = log_softmax(np.array([1000.0, 999.0, -1000.0], np.float32))
    assert np.exp(logprobs).sum() == pytest.approx(1.0)
    assert logprobs[0] - logprobs[1] == pytest.approx(1.0)


def test_equal_logits_are_ordered_by_id_up_to_the_vocabulary() -> None:
    vocabulary = name_vocabulary()
    logits = np.array([0, 1, 0, 1, 0], np.float32)
    assert largest(logits, 100).ids == [1, 3, 0, 2, 4]
    assert [one.token for one in listed(largest(logits, 2), 2, vocabulary)] == ["<unk>", "read"]
