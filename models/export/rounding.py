"""How far float32 graphs were seen to be from exact arithmetic, at export."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.manifest import Rounding
from models.parity import Run, Tensors, rounding_seen
from models.reference import Reference

STREAMS, STEPS = 16, 256
"""What is streamed: this many sequences from the zero state, one half the caller's tokens, one half random ones."""

SAFETY = 8.0
"""Two runs are compared and each rounds, so 2; the rest is room for tokens that were not tried."""


def measure_rounding(reference: Reference, run: Run, sample: list[int], diameter: float) -> Rounding:
    """Streams the `step` graph beside the float64 oracle, each with its own state. diameter: D."""
    tokens = _tokens(sample, reference.architecture.vocabulary_size)
    exact = reference.zero_state(STREAMS)
    fed: Tensors = {name: value.astype(np.float32) for name, value in exact.items()}
    worst = 0.0
    for column in tokens.T:
        logits, hidden, exact = reference.step(column, exact)
        outputs = run("step", {"tokens": column, **fed})
        fed = {name: outputs[f"next.{name}"] for name in fed}
        worst = max(worst, rounding_seen(outputs, {"hidden": hidden, "logits": logits}, diameter))
    return Rounding(measured=SAFETY * worst, tokens=tokens.size, safety=SAFETY)


def _tokens(sample: list[int], size: int) -> NDArray[np.int64]:
    """(STREAMS, STEPS): the sample over and over in the first half, each row further on in it; random ones below."""
    half = STREAMS // 2
    random = np.random.default_rng(2).integers(size, size=(STREAMS - half, STEPS), dtype=np.int64)
    given = np.resize(np.array(sample, dtype=np.int64), (half, STEPS))
    return np.concatenate([given, random])
