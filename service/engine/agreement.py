"""Compares two answers to the same request, and keeps statistics of all such comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from wane.service.engine.bounds import Bound
from wane.service.engine.logits import log_softmax
from wane.service.types.answer import Agreement
from wane.service.types.common import Result, says

# Two float32 runs over the same tokens, in different batches or graphs, differ by rounding. The measured total
# variations stay under 1e-6. A bound is violated only if it is exceeded by more than this constant.
FLOAT32_ROUNDING = 1e-5


class Source(StrEnum):
    """The reason for a comparison: the request's mode was `both`, or the answer was sampled and repeated in the other
    mode (`shadow.py`)."""

    BOTH = "both"
    SHADOW = "shadow"


def compare(
    recurrent_logits: NDArray[np.float32],
    window_logits: NDArray[np.float32],
    recurrent_hidden: NDArray[np.float32],
    window_hidden: NDArray[np.float32],
    bound: Bound | None,
    proved: bool,
    ids: NDArray[np.int64] | None = None,
) -> Agreement:
    """Compares the answers of the recurrent and the window mode at temperature 1. The logits are float32 (V). The
    hidden vectors, float32 (H), are the inputs of the output layer.

    Let p be the distribution of the recurrent mode and q the distribution of the window mode. `total_variation` is sum
    |p - q| / 2. `kl` is sum p log(p / q), in nats. `max_logit_difference` is the largest difference between the two
    logits of a token. `state_distance` is the 2-norm of the difference of the two hidden vectors.

    `bound` is the bound on the distance between the two answers. `proved` says whether the window's run alone proves
    that the most probable tokens of the two answers are equal. `ids` are the ids of the tokens that the answers may
    list, or None for all tokens. Only `top1_match` depends on `ids`.
    """
    p, q = log_softmax(recurrent_logits), log_softmax(window_logits)
    ranked_p, ranked_q = (p, q) if ids is None else (p[ids], q[ids])
    return Agreement(
        top1_match=not len(ranked_p) or bool(ranked_p.argmax() == ranked_q.argmax()),
        top1_proved=proved,
        total_variation=min(float(np.abs(np.exp(p) - np.exp(q)).sum()) / 2, 1.0),
        kl=max(float((np.exp(p) * (p - q)).sum()), 0.0),
        max_logit_difference=float(np.abs(recurrent_logits - window_logits).max()),
        state_distance=float(np.linalg.norm(recurrent_hidden.astype(np.float64) - window_hidden)),
        state_error_bound=None if bound is None else bound.state,
        error_bound=None if bound is None else bound.variation,
    )


class TotalVariationReport(Result):
    """The total variation over all comparisons."""

    mean: Annotated[float | None, says("the mean; null without a comparison")]
    max: Annotated[float | None, says("the maximum; null without a comparison")]


class ErrorBoundReport(Result):
    """The error bounds of the compared answers."""

    bounded: Annotated[int, says("the number of comparisons that had a bound")]
    mean: Annotated[float | None, says("the mean of these bounds; null: there was none")]
    max: Annotated[float | None, says("the largest of these bounds; null: there was none")]


class AgreementReport(Result):
    """The distance between the answers of the window and the recurrent mode, over all comparisons."""

    compared: Annotated[int, says("the number of comparisons")]
    top1_match_rate: Annotated[
        float | None, says("the share of comparisons with equal most probable tokens; null without a comparison")
    ]
    top1_proved_rate: Annotated[
        float | None, says("the share whose equality the window's run proves; null without a comparison")
    ]
    total_variation: Annotated[TotalVariationReport, says("the total variation between the two distributions")]
    max_logit_difference: Annotated[
        float | None, says("the largest difference between the two logits of a token; null without a comparison")
    ]
    error_bound: Annotated[ErrorBoundReport, says("the bounds of the total variation")]
    bound_violations: Annotated[int, says("the number of pairs of answers that contradict their bound or proof")]


class AgreementBySource(AgreementReport):
    """Agreement over all comparisons, and separately for each source."""

    sources: Annotated[
        dict[Source, AgreementReport],
        says("the same for each source: requests of mode `both`, and `shadow` samples of live answers"),
    ]


@dataclass(slots=True)
class AgreementStatistics:
    """Accumulates statistics of all compared pairs of answers."""

    compared: int = 0
    top1_matches: int = 0
    top1_proved: int = 0
    total_variation_sum: float = 0.0
    total_variation_max: float = 0.0
    max_logit_difference: float = 0.0
    bounded: int = 0
    error_bound_sum: float = 0.0
    error_bound_max: float = 0.0
    bound_violations: int = 0

    def add(self, agreement: Agreement) -> None:
        self.compared += 1
        self.top1_matches += agreement.top1_match
        self.top1_proved += agreement.top1_proved
        self.total_variation_sum += agreement.total_variation
        self.total_variation_max = max(self.total_variation_max, agreement.total_variation)
        self.max_logit_difference = max(self.max_logit_difference, agreement.max_logit_difference)
        if agreement.error_bound is not None:
            self.bounded += 1
            self.error_bound_sum += agreement.error_bound
            self.error_bound_max = max(self.error_bound_max, agreement.error_bound)
        self.bound_violations += violates(agreement)

    def report(self) -> AgreementReport:
        """Returns the statistics for `/v1/report`. Rates, means and maxima are null if there were no comparisons."""
        count, bounded = self.compared, self.bounded
        return AgreementReport(
            compared=count,
            top1_match_rate=self.top1_matches / count if count else None,
            top1_proved_rate=self.top1_proved / count if count else None,
            total_variation=TotalVariationReport(
                mean=self.total_variation_sum / count if count else None,
                max=self.total_variation_max if count else None,
            ),
            max_logit_difference=self.max_logit_difference if count else None,
            error_bound=ErrorBoundReport(
                bounded,
                mean=self.error_bound_sum / bounded if bounded else None,
                max=self.error_bound_max if bounded else None,
            ),
            bound_violations=self.bound_violations,
        )


def violates(agreement: Agreement) -> bool:
    """Returns whether a compared pair of answers contradicts its bound by more than rounding, or contradicts a proof.

    A pair contradicts a bound if its distance exceeds the bound. It contradicts a proof if the most probable tokens
    differ although they are proved equal. The state distance is not compared with a bound of 0, because that bound does
    not include rounding.
    """
    if agreement.top1_proved and not agreement.top1_match:
        return True
    if agreement.state_error_bound and agreement.state_distance > agreement.state_error_bound:
        return True
    bound = agreement.error_bound
    return bound is not None and agreement.total_variation > bound + FLOAT32_ROUNDING
