"""Measures all statements, as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence

from research.theory.curve import Result
from research.theory.descent import CONSTANT, DECAYING, RATES, Advance, growth, proposition2, theorem1
from research.theory.instance import KINDS, Constants, Instance
from research.theory.lemmas import lemma1, lemma2, lemma3, served

FACTORS = (0.5, 0.75, 0.9)
LAMBDA = 0.75
"""The lambda of the instances that are trained."""

TRAINED_TOKENS = 60
THEOREM_STEPS, STEPS, GROWTH_STEPS = 100, 200, 400


def stages(steps: int = STEPS, growth_steps: int = GROWTH_STEPS, theorem_steps: int = THEOREM_STEPS) -> int:
    """Returns how often `compute` calls `advance`."""
    return len(KINDS) * len(FACTORS) + len(RATES) * steps + 2 * growth_steps + theorem_steps


def compute(
    seeds: Sequence[int],
    advance: Advance = lambda: None,
    steps: int = STEPS,
    growth_steps: int = GROWTH_STEPS,
    theorem_steps: int = THEOREM_STEPS,
) -> Result:
    """Measures every statement on random instances of each of `seeds`. The three numbers are steps of gradient descent:
    of Proposition 2, of the growth of a small difference, and of Theorem 1."""
    found: Result = {"seeds": list(seeds), "lemma 1": [], "lemma 2": [], "lemma 3": []}
    for kind in KINDS:
        for factor in FACTORS:
            instance = Instance.random(kind, factor, seeds)
            constants = Constants.of(instance)
            name = {"kind": kind, "factor": factor}
            found["lemma 1"].append(name | lemma1(instance, constants))
            found["lemma 2"].append(name | lemma2(instance, constants))
            found["lemma 3"].append(name | lemma3(instance, constants, seeds[0]))
            advance()
    found["served"] = served()
    instance = Instance.random("gaussian", LAMBDA, seeds, TRAINED_TOKENS)
    found["proposition 2"] = {
        "factor": LAMBDA,
        "steps": steps,
        "rates": proposition2(instance, Constants.of(instance), steps, advance),
        "growth": [growth(instance, growth_steps, rate, advance) for rate in (DECAYING, CONSTANT)],
    }
    instance = Instance.random("gaussian", LAMBDA, seeds)
    measured = theorem1(instance, Constants.of(instance), theorem_steps, advance)
    found["theorem 1"] = {"factor": LAMBDA, "steps": theorem_steps, **measured}
    return found
