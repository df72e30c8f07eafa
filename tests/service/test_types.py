from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest

from wane.service.errors import InvalidRequest
from wane.service.types.common import Mode
from wane.service.types.request import CompareRequest, GenerateRequest, PredictRequest, ScoreRequest, StepRequest

SOME = (1, 2)

BAD: list[tuple[str, Callable[[], object], str]] = [
    ("tokens", lambda: PredictRequest(()), "the input is empty"),
    ("tokens", lambda: StepRequest("s", ()), "the input is empty"),
    ("tokens", lambda: ScoreRequest(()), "the input is empty"),
    ("tokens", lambda: GenerateRequest(()), "the input is empty"),
    ("tokens", lambda: CompareRequest(()), "the input is empty"),
    ("session", lambda: PredictRequest(SOME, session="s"), "not both"),
    ("window", lambda: PredictRequest(SOME, window=0), "window is 0, but must be at least 1"),
    ("window", lambda: GenerateRequest(SOME, window=-3), "window is -3"),
    ("tolerance", lambda: PredictRequest(SOME, tolerance=nan), "tolerance is nan"),
    ("tolerance", lambda: PredictRequest(SOME, tolerance=-0.1), "from 0 to 1"),
    ("tolerance", lambda: ScoreRequest(SOME, tolerance=inf), "tolerance is inf"),
    (
        "tolerance",
        lambda: PredictRequest(SOME, mode=Mode.WINDOW, tolerance=0.0),
        "mode is window: use tolerance only in mode auto",
    ),
    (
        "tolerance",
        lambda: PredictRequest(SOME, mode=Mode.RECURRENT, tolerance=1.0),
        "mode is recurrent: use tolerance only in mode auto",
    ),
    ("tolerance", lambda: PredictRequest(mode=Mode.BOTH, tolerance=0.5, session="s"), "mode is both"),
    (
        "window",
        lambda: PredictRequest(SOME, mode=Mode.RECURRENT, window=3),
        "recurrent: use window only in mode auto or window or both",
    ),
    (
        "window",
        lambda: GenerateRequest(SOME, mode=Mode.RECURRENT, window=3),
        "mode is recurrent: use window only in mode window",
    ),
    ("window", lambda: GenerateRequest(SOME, window=3), "mode is auto: use window only in mode window"),
    ("top_k", lambda: PredictRequest(SOME, top_k=0), "top_k is 0"),
    ("top_k", lambda: StepRequest("s", SOME, top_k=0), "top_k is 0"),
    ("expected_position", lambda: StepRequest("s", SOME, expected_position=-1), "expected_position is -1"),
    ("idempotency_key", lambda: StepRequest("s", SOME, idempotency_key=""), "has 0 characters"),
    ("idempotency_key", lambda: StepRequest("s", SOME, idempotency_key="k" * 256), "1 to 255"),
    ("max_tokens", lambda: GenerateRequest(SOME, max_tokens=0), "max_tokens is 0"),
    ("temperature", lambda: GenerateRequest(SOME, temperature=nan), "temperature is nan"),
    ("temperature", lambda: GenerateRequest(SOME, temperature=inf), "temperature is inf"),
    ("temperature", lambda: GenerateRequest(SOME, temperature=-1.0), "0 or more"),
    ("top_k", lambda: GenerateRequest(SOME, top_k=0), "top_k is 0"),
    ("top_p", lambda: GenerateRequest(SOME, top_p=nan), "top_p is nan"),
    ("top_p", lambda: GenerateRequest(SOME, top_p=0.0), "over 0"),
    ("top_p", lambda: GenerateRequest(SOME, top_p=1.5), "at most 1"),
    ("seed", lambda: GenerateRequest(SOME, seed=-1), "seed is -1"),
    ("stop[1]", lambda: GenerateRequest(SOME, stop=("a", "")), r"stop\[1\] has 0 characters"),
    ("stop[0]", lambda: GenerateRequest(SOME, stop=("x" * 257,)), r"stop\[0\] has 257"),
    ("stop", lambda: GenerateRequest(SOME, stop=("a",) * 17), "17 strings"),
    ("mode", lambda: GenerateRequest(SOME, mode=Mode.BOTH), "auto, recurrent or window"),
    ("windows", lambda: CompareRequest(SOME, windows=()), "windows holds 0"),
    ("windows[1]", lambda: CompareRequest(SOME, windows=(8, 0)), r"windows\[1\] is 0"),
    ("repeat", lambda: CompareRequest(SOME, repeat=0), "from 1 to 1000"),
    ("repeat", lambda: CompareRequest(SOME, repeat=1001), "repeat is 1001"),
]


@pytest.mark.parametrize(("field", "make", "message"), BAD, ids=[f"{f}-{m}" for f, _, m in BAD])
def test_an_invalid_request_is_refused_with_the_field(field: str, make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        make()
    assert caught.value.extra() == {"field": field}


@pytest.mark.parametrize(
    "make",
    [
        lambda: PredictRequest(session="s"),
        lambda: PredictRequest(SOME, tolerance=0.0),
        lambda: PredictRequest(SOME, tolerance=1.0),
        lambda: GenerateRequest(SOME, temperature=0.0, top_p=1.0, seed=2**64, stop=("a",) * 16),
        lambda: StepRequest("s", SOME, expected_position=0, idempotency_key="k" * 255),
    ],
)
def test_the_limits_of_every_range_are_accepted(make: Callable[[], object]) -> None:
    assert make() == make()
