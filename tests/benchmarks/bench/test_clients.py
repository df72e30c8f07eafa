"""Tests the load generators against a stub server: the requests that they send, their counts, and their errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.bench import open_loop, socket_loop, wrk
from benchmarks.bench.connections import BadAnswer, HttpAnswers, http_request, text_frame
from tests.benchmarks.bench.stub import message, ok, serving

ANSWER = b'{"predictions":[]}'


def test_an_open_loop_sends_every_request_once_and_in_order() -> None:
    with serving(lambda number, body: ok(ANSWER)) as stub:
        made = (http_request("/step", f'{{"tokens":[{number}]}}') for number in itertools.count())
        timed = open_loop.drive(stub.port, made, np.linspace(0, 0.02, 40), connections=1)
    assert timed.requests == 40
    assert stub.asked == [b'{"tokens":[%d]}' % number for number in range(40)]
    assert timed.lag_p99_ms is not None


def test_a_latency_starts_when_the_request_is_due() -> None:
    with serving(lambda number, body: ok(ANSWER)) as stub:
        made = (http_request("/step", "{}") for _ in itertools.count())
        timed = open_loop.drive(stub.port, made, np.full(20, -0.5), connections=2)
    assert timed.p50_ms >= 500
    assert timed.lag_p99_ms is not None and timed.lag_p99_ms >= 500


def test_arrivals_match_the_rate_and_repeat_with_the_seed() -> None:
    due = open_loop.poisson(1000, 5, seed=3)
    assert due.size == 5000
    assert (np.diff(due) > 0).all()
    assert due[-1] == pytest.approx(5, rel=0.1)
    np.testing.assert_array_equal(due, open_loop.poisson(1000, 5, seed=3))


def test_a_refusal_ends_an_open_loop_with_its_message() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull"
    with serving(lambda number, body: refusal) as stub, pytest.raises(BadAnswer, match=r"429.*full"):
        open_loop.drive(stub.port, (http_request("/", "{}") for _ in itertools.count()), np.zeros(3))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_in_pieces_is_reassembled(size: int) -> None:
    data, answers = ok(b"x" * 300), HttpAnswers()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    given = [answers.receive(piece) for piece in pieces]
    assert given == [None] * (len(pieces) - 1) + [b"x" * 300]


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"], ids=["end", "chunked"]
)
def test_an_invalid_answer_is_refused(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        HttpAnswers().receive(data)


@pytest.mark.parametrize("padding", [0, 500, 60_000])
def test_every_socket_sends_again_after_an_answer(padding: int) -> None:
    """The stub server also sends pings. Checks that the client does not count them as messages."""
    answer = ANSWER + b" " * padding
    with serving(lambda number, body: message(b"?", kind=0x9) + message(answer)) as stub:
        frames = itertools.cycle([text_frame('{"tokens":[7]}')])
        timed = socket_loop.drive(stub.port, ["/a", "/b", "/c"], frames, b'"predictions"', 0.05)
    assert timed.requests == len(stub.asked) >= 3
    assert set(stub.asked) == {b'{"tokens":[7]}'}


def test_a_message_without_predictions_ends_a_socket_loop() -> None:
    with serving(lambda number, body: message(b'{"code":"gone"}')) as stub, pytest.raises(BadAnswer, match="gone"):
        socket_loop.drive(stub.port, ["/a"], itertools.cycle([text_frame("{}")]), b'"predictions"', 0.05)


def test_a_closed_socket_ends_a_socket_loop() -> None:
    with serving(lambda number, body: message(b"\x03\xf4", kind=0x8)) as stub, pytest.raises(BadAnswer, match="closed"):
        socket_loop.drive(stub.port, ["/a"], itertools.cycle([text_frame("{}")]), b'"predictions"', 0.05)


def test_the_counts_of_wrk_are_parsed() -> None:
    printed = 'Running\n{"requests":9,"seconds":1.5,"failed":0,"p50_ms":1,"p90_ms":2,"p99_ms":3,"longest_ms":4}\n'
    timed = wrk.parse(printed)
    assert (timed.requests, timed.seconds, timed.p99_ms, timed.lag_p99_ms) == (9, 1.5, 3, None)


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("unable to connect", "unable to connect"),
        ('{"requests":9,"seconds":1,"failed":2,"p50_ms":1,"p90_ms":2,"p99_ms":3,"longest_ms":4}', "2 requests failed"),
        ('{"requests":0,"seconds":1,"failed":0,"p50_ms":0,"p90_ms":0,"p99_ms":0,"longest_ms":0}', "no request"),
    ],
    ids=["no count", "failures", "nothing"],
)
def test_a_failed_load_gives_no_figures(printed: str, told: str) -> None:
    with pytest.raises(wrk.LoadFailed, match=told):
        wrk.parse(printed)
