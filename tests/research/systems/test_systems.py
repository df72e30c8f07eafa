"""Tests that a run of each system reaches its known answers, and that the known answers are right."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from research.systems import (
    bidirectional,
    bptt_by_hand,
    continuous_time,
    copy_memory,
    encoder_decoder,
    gradient_cliff,
    nonlinear_dynamics,
    peepholes,
    real_valued,
    scheduled_sampling,
    skip_in_time,
    unstable_training,
)
from research.systems.__main__ import NAMES, system
from research.systems.system import Answer, generator, normal


@pytest.mark.parametrize("name", NAMES)
def test_a_run_reaches_every_known_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_memory, "DELAYS", (4, 7, 8, 16))
    answers = system(name).measure(0).answers
    assert [answer for answer in answers if not answer.holds] == []
    assert any(answer.known is not None for answer in answers)
    assert len({answer.what for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        (Answer("x", 1, 1.1, 0.2), True),
        (Answer("x", 1, 1.3, 0.2), False),
        (Answer("x", 1, 0.7, 0.2), False),
        (Answer("x", 1, math.nan, 0.2), False),
        (Answer("x", 1, 0.5, relation="at most"), True),
        (Answer("x", 1, 1.5, relation="at most"), False),
        (Answer("x", 1, math.nan, relation="at most"), False),
        (Answer("x", 1, 1.5, relation="at least"), True),
        (Answer("x", 1, 0.5, relation="at least"), False),
        (Answer("x", None, 0.5), True),
    ],
)
def test_an_answer_holds_only_within_its_tolerance(answer: Answer, holds: bool) -> None:
    assert answer.holds == holds


def test_the_best_error_of_one_plain_unit_is_the_smallest_over_a_grid() -> None:
    delay, steps = 5, torch.arange(400, dtype=torch.float64)
    w = torch.linspace(0.5, 0.99, 491, dtype=torch.float64)
    response = w[:, None] ** steps
    target = (steps == delay).double()
    gain = response[:, delay] / response.square().sum(1)
    errors = (gain[:, None] * response - target).square().sum(1)
    assert skip_in_time.best_plain_error(delay) == pytest.approx(float(errors.min()), abs=1e-6)


def test_teacher_forcing_leaves_only_the_answer_to_the_unseen_word_untrained() -> None:
    rows = scheduled_sampling.optimum(0)
    noise = scheduled_sampling.NOISE
    expected = [1 - noise, 0, noise, 0, 1 - noise, noise, 1 / 3, 1 / 3, 1 / 3]
    assert rows.flatten().tolist() == pytest.approx(expected)
    _, unknown = scheduled_sampling.free_running(rows)
    assert unknown[-1] == pytest.approx(noise / (noise + 2 / 3), abs=1e-6)  # the chain's stationary share
    assert scheduled_sampling.optimum(0.5)[2].tolist() == pytest.approx([0.45, 0.45, 0.1])


@pytest.mark.parametrize("way", encoder_decoder.WAYS)
def test_a_decoder_gets_the_context_in_the_named_way_only(way: str) -> None:
    network = encoder_decoder.EncoderDecoder(way, generator(0))
    x = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]])
    first, second = network(x)
    assert not torch.equal(first, second)
    loss = nn.functional.cross_entropy(network(x, x).flatten(0, 1), x.flatten())
    loss.backward()
    as_input = network.weights[4]  # multiplies the context at each step
    assert (as_input.grad is not None) == (way in ("input", "both"))
    with torch.no_grad():
        as_input.zero_()
    first, second = network(x)
    assert torch.equal(first, second) == (way == "input")


def test_the_backward_direction_reads_from_the_end() -> None:
    random = generator(0)
    weights = [normal(random, 16, 16, scale=0.1), normal(random, 16, 1), normal(random, 16)]
    x = normal(random, 5, 3, 1)
    there = bidirectional.direction(weights, x.flip(0), backward=False).flip(0)
    assert torch.equal(bidirectional.direction(weights, x, backward=True), there)


def test_the_best_monotone_sequence_is_the_best_over_all_partitions() -> None:
    target = peepholes.spikes(3, 8)

    def error(values: torch.Tensor, cuts: tuple[int, ...]) -> float:
        blocks = [values[a:b] for a, b in itertools.pairwise((0, *cuts, len(values)))]
        means = [float(block.mean()) for block in blocks]
        if means != sorted(means):
            return math.inf
        return sum(float((block - mean).square().sum()) for block, mean in zip(blocks, means, strict=True)) / len(
            values
        )

    partitions = [cuts for size in range(8) for cuts in itertools.combinations(range(1, 8), size)]
    best = min(error(values, cuts) for values in (target, -target) for cuts in partitions)
    assert peepholes.best_monotone_error(target) == pytest.approx(best, abs=1e-12)


def test_the_output_of_a_unit_without_peepholes_moves_in_one_direction() -> None:
    weights = normal(generator(0), 500, 8, scale=3)
    steps = peepholes.outputs(weights, 20, peepholes=False).diff(dim=1)
    assert bool(((steps >= -1e-12).all(1) | (steps <= 1e-12).all(1)).all())
    steps = peepholes.outputs(weights, 20, peepholes=True).diff(dim=1)
    assert not bool(((steps >= -1e-12).all(1) | (steps <= 1e-12).all(1)).all())


def test_no_readout_of_states_that_are_close_costs_less_than_the_bound() -> None:
    random = generator(0)
    symbols = torch.arange(copy_memory.SYMBOLS)
    for delay in (4, 8, 12, 16):
        apart = copy_memory.LARGEST_READOUT * copy_memory.FACTOR**delay * 2 * math.sqrt(copy_memory.UNITS)
        ideal = torch.eye(copy_memory.SYMBOLS, dtype=torch.float64) * apart / math.sqrt(2)  # pairwise distance `apart`
        for logits in (ideal, *(ideal + normal(random, copy_memory.SYMBOLS) for _ in range(20))):
            loss = float(nn.functional.cross_entropy(logits, symbols))
            assert loss >= copy_memory.least_loss(delay)


def test_the_projection_changes_only_the_singular_values_over_the_limit() -> None:
    matrix = torch.diag(torch.tensor([3.0, 0.5, -2.0]))
    copy_memory.project(matrix, 0.8)
    assert torch.allclose(matrix, torch.diag(torch.tensor([0.8, 0.5, -0.8])))


def test_the_discretised_input_matrix_is_its_formula() -> None:
    W, U = continuous_time.discretise(0.3)
    A, B = continuous_time.A, continuous_time.B
    expected = torch.linalg.inv(A) @ (torch.linalg.matrix_exp(0.3 * A) - torch.eye(2, dtype=torch.float64)) @ B
    assert torch.allclose(U, expected, atol=1e-14)
    assert torch.allclose(W, torch.linalg.matrix_exp(0.3 * A), atol=1e-14)


def test_the_fixed_point_solves_its_equation() -> None:
    level, gain = nonlinear_dynamics.LEVEL, nonlinear_dynamics.GAIN
    assert math.tanh(gain * level) == pytest.approx(level, abs=1e-15)
    assert gain > 1 > gain * (1 - level**2)


def test_the_weight_doubles_in_every_step_once_it_does_in_the_first() -> None:
    w, horizon = unstable_training.UNSTABLE, 8
    assert unstable_training.strength(w, horizon) >= 3
    for n in range(1, 4):
        after = w * (1 - unstable_training.ALPHA / n * horizon * w ** (2 * horizon - 2))
        assert abs(after) >= 2 * abs(w)
        w = after
    assert not unstable_training.falls([1.0])
    assert not unstable_training.grows([1.0], 2)


def test_descent_takes_the_steps_of_its_formula() -> None:
    w, horizon, expected = unstable_training.UNSTABLE, 6, []
    for n in range(1, unstable_training.STEPS + 2):
        expected.append(2 * horizon * math.log(abs(w)) - math.log(2))
        w *= 1 - unstable_training.ALPHA / n * horizon * w ** (2 * horizon - 2)
    assert unstable_training.log_losses(unstable_training.UNSTABLE, horizon) == pytest.approx(expected, abs=1e-9)


def test_the_error_far_ahead_is_the_variance_of_the_signal() -> None:
    far = real_valued.variance_ahead(300)
    a1, a2 = real_valued.A1, real_valued.A2
    by_yule_walker = real_valued.NOISE**2 * (1 - a2) / ((1 + a2) * ((1 - a2) ** 2 - a1**2))
    assert far == pytest.approx(by_yule_walker, rel=1e-9)
    rates = real_valued.signal(generator(0), 20_000, 1)
    assert float(rates.var()) == pytest.approx(far, rel=4 * math.sqrt(2 / 20_000))
    assert float(rates.mean()) == pytest.approx(real_valued.MEAN, abs=4 * math.sqrt(far / 20_000))


def test_a_gradient_is_final_only_after_the_following_step() -> None:
    """Without what h_t receives from step t+1, the recurrent weights' gradient is wrong."""
    random = generator(0)
    shapes = ((5, 5), (5, 7), (5,), (7, 5), (7,))
    weights = [normal(random, *shape, scale=0.5) for shape in shapes]
    words = torch.randint(7, (bptt_by_hand.STEPS + 1,), generator=random)
    right = bptt_by_hand.backward(weights, words)
    cut = bptt_by_hand.backward([torch.zeros(5, 5, dtype=torch.float64), *weights[1:]], words)
    assert bptt_by_hand.relative_distance(cut[0], right[0]) > 0.1


def test_the_edge_of_the_cliff_has_the_slope_of_the_threshold() -> None:
    edge = torch.tensor(gradient_cliff.edge(), dtype=torch.float64)
    assert float(gradient_cliff.slope(edge)) == pytest.approx(gradient_cliff.THRESHOLD, rel=1e-9)
