"""Compares the waiting times of a worker's jobs with queueing theory, and tests workers (threads) that share
processors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import simpy

from research.scaling.worker import Cores, Worker

SERVICE_S = 0.001
JOBS = 200_000


def mean_wait_s(load: float, service: Callable[[np.random.Generator], float]) -> float:
    """Returns the mean waiting time of jobs that arrive as a Poisson process at one worker."""
    env, random = simpy.Environment(), np.random.default_rng(1)
    worker, waits = Worker(env), list[float]()

    def arrivals() -> simpy.events.ProcessGenerator:
        for gap in random.exponential(SERVICE_S / load, JOBS):
            yield env.timeout(float(gap))
            seconds, begun = service(random), env.now
            worker.do(seconds, lambda begun=begun, seconds=seconds: waits.append(env.now - begun - seconds))  # type: ignore[misc]

    env.process(arrivals())
    env.run()
    assert len(waits) == JOBS
    return float(np.mean(waits))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_jobs_of_constant_length_wait_as_the_pollaczek_khinchine_formula_says(load: float) -> None:
    theory_s = SERVICE_S * load / (2 * (1 - load))
    assert mean_wait_s(load, lambda _: SERVICE_S) == pytest.approx(theory_s, rel=0.05)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_jobs_of_exponential_length_wait_twice_as_long_as_constant_ones(load: float) -> None:
    theory_s = SERVICE_S * load / (1 - load)
    assert mean_wait_s(load, lambda random: float(random.exponential(SERVICE_S))) == pytest.approx(theory_s, rel=0.07)


def test_two_threads_on_one_processor_take_the_sum_of_their_times() -> None:
    env = simpy.Environment()
    cores, ended = Cores(env, 1), dict[str, float]()
    first, second = Worker(env, cores), Worker(env, cores)
    first.do(1.0, lambda: ended.update(long=env.now))
    second.do(0.01, lambda: ended.update(short=env.now))
    env.run()
    assert ended["long"] == pytest.approx(1.01)
    assert ended["short"] < 0.05  # the two jobs share the processor, so the short job does not wait for the long job


def test_two_threads_on_two_processors_do_not_delay_each_other() -> None:
    env = simpy.Environment()
    cores, ended = Cores(env, 2), list[float]()
    for _ in range(2):
        Worker(env, cores).do(1.0, lambda: ended.append(env.now))
    env.run()
    assert ended == pytest.approx([1.0, 1.0])
