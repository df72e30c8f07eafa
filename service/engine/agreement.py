"""How far two answers to the same question are apart, and the running figures over all such pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.engine.distribution import log_softmax
from service.engine.types import Agreement

# Two float32 runs of the same model over the same tokens, in different batches or by different graphs, differ by
# rounding. Measured total variations stay under 1e-6; a bound is violated, or a first place proved, only beyond it.
FLOAT32_ROUNDING = 1e-5


def compare(
    recurrent_logits: NDArray[np.float32],
    window_logits: NDArray[np.float32],
    recurrent_hidden: NDArray[np.float32],
    window_hidden: NDArray[np.float32],
    error_bound: float | None,
) -> Agreement:
    """Compares the two answers at temperature 1. logits: float32 (V); hidden: float32 (H), the output layer's input.

    total_variation = sum |p - q| / 2; kl = sum p log(p / q), with p recurrent and q window, in nats;
    state_distance = |hidden - hidden'|_2; max_logit_difference is over logits as they are.
    `error_bound` bounds the total variation. The first token is proved equal where the bound is 0 and the window's
    first token leads by more than rounding could have made up.
    """
    p, q = log_softmax(recurrent_logits), log_softmax(window_logits)
    exact = error_bound == 0.0
    second, first = np.partition(np.exp(q), -2)[-2:]
    return Agreement(
        top1_match=bool(p.argmax() == q.argmax()),
        top1_proved=exact and bool(first - second > 2 * FLOAT32_ROUNDING),
        total_variation=min(float(np.abs(np.exp(p) - np.exp(q)).sum()) / 2, 1.0),
        kl=max(float((np.exp(p) * (p - q)).sum()), 0.0),
        max_logit_difference=float(np.abs(recurrent_logits - window_logits).max()),
        state_distance=float(np.linalg.norm(recurrent_hidden.astype(np.float64) - window_hidden)),
        state_error_bound=0.0 if exact else None,
        error_bound=error_bound,
    )


@dataclass(slots=True)
class AgreementStatistics:
    """Running figures over every pair that was compared; nothing is sampled."""

    compared: int = 0
    top1_matches: int = 0
    top1_proved: int = 0
    total_variation_sum: float = 0.0
    total_variation_max: float = 0.0
    max_logit_difference: float = 0.0
    bound_violations: int = 0

    def add(self, agreement: Agreement) -> None:
        """Counts one pair."""
        self.compared += 1
        self.top1_matches += agreement.top1_match
        self.top1_proved += agreement.top1_proved
        self.total_variation_sum += agreement.total_variation
        self.total_variation_max = max(self.total_variation_max, agreement.total_variation)
        self.max_logit_difference = max(self.max_logit_difference, agreement.max_logit_difference)
        self.bound_violations += violates(agreement)

    def document(self) -> dict[str, object]:
        """The figures as `/v1/report` shows them; rates and means of nothing are null."""
        count = self.compared
        return {
            "compared": count,
            "top1_match_rate": self.top1_matches / count if count else None,
            "total_variation": {
                "mean": self.total_variation_sum / count if count else None,
                "max": self.total_variation_max if count else None,
            },
            "max_logit_difference": self.max_logit_difference if count else None,
            "bound_violations": self.bound_violations,
            "top1_proved_rate": self.top1_proved / count if count else None,
        }


def violates(agreement: Agreement) -> bool:
    """Whether the pair is further apart than its bound, where there is one, and rounding allow."""
    bound = agreement.error_bound
    return bound is not None and agreement.total_variation > bound + FLOAT32_ROUNDING
