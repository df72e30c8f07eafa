"""The learning rate of each training step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wane.training.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, decay_start: int | None) -> float:
    """Returns the learning rate of `step`, counted from 0. `decay_start`: the step at which the decay of the schedule
    `plateau` began, None before the decay."""
    peak = config.learning_rate
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    match config.schedule:
        case "constant":
            return peak
        case "inverse_time":
            return peak / (step - config.warmup + 1)
        case "cosine":
            done = (step - config.warmup) / max(1, config.steps - config.warmup)
            return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        case "plateau":
            if decay_start is None or step < decay_start:
                return peak
            return peak * max(0.0, 1 - (step - decay_start + 1) / config.decay_steps)
