"""Tests of the retries, with a clock and servers that exist only in the test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from wane.client.errors import DeadlineExceeded, Overloaded, Unavailable, Unreachable, WaneError
from wane.client.servers import Outcome, Servers

THREE = ("http://a", "http://b", "http://c")
LOST = "reset"


def reply(status: int, code: str = "", **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, json={"code": code, "detail": "why"} if code else {"is": "fine"})


class Play(Servers):
    """Runs a request against outcomes. Records the requests, and how long it waited before each."""

    def __init__(self, addresses: Sequence[str], outcomes: Sequence[Outcome], takes_s: float = 0) -> None:
        super().__init__(addresses)
        self.now_s, self.pause = 100.0, 0.0
        self.outcomes, self.takes_s = list(outcomes), takes_s
        self.clock, self.sleep = lambda: self.now_s, self._sleep  # type: ignore[assignment]
        self.asked: list[str] = []
        self.sent: list[httpx.Request] = []
        self.timeouts_s: list[float] = []
        self.waited: list[float] = []

    async def _sleep(self, seconds: float) -> None:
        self.pause += seconds
        self.now_s += seconds

    async def attempt(self, request: httpx.Request, timeout_s: float, address: str, *_: Any) -> Outcome:
        self.asked.append(address[-1])
        self.sent.append(request)
        self.timeouts_s.append(timeout_s)
        self.waited.append(self.pause)
        self.pause = 0.0
        self.now_s += self.takes_s
        return self.outcomes.pop(0)

    def run(self, deadline_s: float = 10) -> dict[str, Any]:
        request, body = "POST /v1/predict", {"input": "a"}
        return asyncio.run(self.ask(dict[str, Any], request, body, self.now_s + deadline_s))


@pytest.mark.parametrize("failure", [LOST, reply(502), reply(503, "unavailable"), reply(504)], ids=repr)
def test_the_next_address_is_asked_at_once(failure: Outcome) -> None:
    play = Play(THREE, [failure, failure, reply(200)])
    assert play.run() == {"is": "fine"}
    assert play.asked == ["a", "b", "c"]
    assert play.waited == [0, 0, 0]


def test_the_address_that_answered_is_asked_first_afterwards() -> None:
    play = Play(THREE, [LOST, reply(200), reply(200)])
    play.run()
    play.run()
    assert play.asked == ["a", "b", "b"]


def test_it_waits_longer_after_each_round() -> None:
    play = Play(THREE[:2], [LOST] * 6 + [reply(200)])
    play.run()
    assert play.asked == list("abababa")
    first, second, third = play.waited[2], play.waited[4], play.waited[6]
    assert play.waited[1::2] == [0, 0, 0]
    assert 0.05 <= first <= 0.1 <= second <= 0.2 <= third <= 0.4


def test_an_overloaded_server_is_asked_again_after_its_retry_after() -> None:
    play = Play(THREE, [reply(429, "overloaded", **{"retry-after": "3"}), reply(200)])
    play.run()
    assert play.asked == ["a", "a"]
    assert play.waited == [0, 3]


def test_retry_after_in_a_document_and_as_a_date_is_read() -> None:
    told = httpx.Response(429, json={"code": "rate_limited", "detail": "why", "retry_after_s": 2})
    play = Play(THREE, [told, reply(429, **{"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}), reply(200)])
    play.run()
    assert play.waited[1] == 2
    assert 0 < play.waited[2] < 1


def test_each_address_has_its_own_retry_after() -> None:
    asks = [reply(503, **{"retry-after": seconds}) for seconds in ("5", "1", "3")]
    play = Play(THREE, [*asks, reply(503, **{"retry-after": "4"}), LOST, reply(200)])
    play.run()
    assert play.asked == list("abcbcc")
    assert play.waited[:5] == [0, 0, 0, 1, 2]
    assert 0 < play.waited[5] < 1


def test_an_address_with_a_retry_after_is_passed_over() -> None:
    play = Play(THREE[:2], [reply(503, **{"retry-after": "5"}), *[LOST] * 3, reply(200)])
    play.run()
    assert play.asked == list("abbbb")
    assert 0 < sum(play.waited) < 5


@pytest.mark.parametrize("told", ["NaN", "-1", "Infinity"])
def test_a_retry_after_that_is_no_duration_is_ignored(told: str) -> None:
    play = Play(THREE[:1], [httpx.Response(429, text=f'{{"retry_after_s": {told}}}'), reply(200)])
    play.run()
    assert 0 < play.waited[1] < 1


def test_the_wait_between_attempts_stays_bounded() -> None:
    assert 1 <= Servers(THREE).pause_s(10**6) <= 2


def test_the_time_of_an_attempt_is_capped() -> None:
    play = Play(THREE[:1], [reply(200)])
    play.run(deadline_s=1e300)
    assert (play.timeouts_s[0], play.sent[0].headers["x-request-timeout-ms"]) == (86400, "86400000")


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    play = Play(THREE, [reply(429, "quota_exceeded", **{"retry-after": "60"})])
    with pytest.raises(Overloaded) as raised:
        play.run()
    assert raised.value.retry_after_s == 60
    assert play.now_s == 100


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500])
def test_a_refusal_is_not_sent_again(status: int) -> None:
    play = Play(THREE, [reply(status, "x"), reply(200)])
    with pytest.raises(WaneError):
        play.run()
    assert play.asked == ["a"]


def test_all_attempts_are_within_the_deadline() -> None:
    play = Play(THREE, [LOST] * 1000, takes_s=0.3)
    with pytest.raises(Unreachable, match="does not answer: reset"):
        play.run(deadline_s=10)
    assert 108 < play.now_s <= 110.3
    assert all(0 < timeout_s <= 10 for timeout_s in play.timeouts_s)


def test_an_attempt_and_its_server_are_told_the_time_that_is_left() -> None:
    play = Play(THREE, [LOST, reply(200)], takes_s=4)
    play.run(deadline_s=10)
    assert play.timeouts_s == [10, 6]
    assert [request.headers["x-request-timeout-ms"] for request in play.sent] == ["10000", "6000"]


def test_the_last_error_is_raised() -> None:
    play = Play(THREE[:1], [reply(503, "unavailable"), reply(504, "deadline_exceeded")], takes_s=5)
    with pytest.raises(DeadlineExceeded):
        play.run(deadline_s=9)
    assert issubclass(Unreachable, Unavailable)


def test_without_retry_a_request_is_sent_once() -> None:
    play = Play(THREE, [reply(503, "unavailable"), reply(200)])
    play.retry = False
    with pytest.raises(Unavailable):
        play.run()
    assert play.asked == ["a"]


def test_the_body_of_all_attempts_is_the_same() -> None:
    play = Play(THREE, [reply(503), reply(200)])
    play.run()
    first, second = play.sent
    assert first.content == second.content == b'{"input": "a"}'
