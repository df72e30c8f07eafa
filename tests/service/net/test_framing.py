"""Tests of the ends of request bodies."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.service.net.http_cases import in_chunks
from wane.service.net.framing import Body


def passed(body: Body, parts: list[bytes]) -> bytes:
    """Passes the parts to the body. Returns the bytes that do not belong to it."""
    rest = b""
    for part in parts:
        left = part
        while left and not body.ended:
            left = left[body.take(left) :]
        rest += left
    return rest


def split(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted({0, len(data), *(rng.randint(0, len(data)) for _ in range(rng.randrange(8)))})
    return [data[begin:end] for begin, end in pairwise(cuts)]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["sized", "chunked"])
def test_the_end_of_a_body_is_found_however_the_bytes_are_split(is_chunked: bool) -> None:
    rng = random.Random(3)
    for _ in range(500):
        content = rng.randbytes(rng.choice((1, 2, 10, 300)))
        sent = in_chunks(rng, content) if is_chunked else content
        body, after = Body(None if is_chunked else len(content)), b"GET / HTTP/1.1\r\n"
        assert passed(body, split(rng, sent + after)) == after and body.ended
        body = Body(None if is_chunked else len(content))
        assert passed(body, split(rng, sent[:-1])) == b"" and not body.ended


def test_bytes_around_the_content_are_counted_since_the_last_content() -> None:
    body = Body(None)
    body.take(b"2;x=y\r\n")
    assert body.bare_bytes == 7
    body.take(b"{}\r\n0\r\n")
    assert body.bare_bytes == 3 and body.in_trailers
    body.take(b"x: y\r\n")
    assert body.bare_bytes == 9 and not body.ended
