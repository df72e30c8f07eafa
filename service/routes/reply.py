"""An answer in JSON, made once and sent with next to no work: most requests have one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import orjson
from pydantic_core import to_jsonable_python
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

VALUES_AT_ONCE = 16_384
"""Values of a long list that are encoded in one turn of the event loop: the encoder does not let other threads run, so
that a thread would hold up the loop just as long."""

CONTENT_TYPE = (b"content-type", b"application/json")


class Reply(Response):
    """A document as an answer, as starlette's `Response` of it would be: but for a class that takes any content, with
    any encoding, it is half the work."""

    def __init__(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """`body` is JSON."""
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(self.body))]
        if headers:
            self.raw_headers += [(name.lower().encode("latin-1"), headers[name].encode("latin-1")) for name in headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


def encode(value: object) -> bytes:
    """A document, or a value of one, as JSON. Every number in it is finite: JSON has no others."""
    return orjson.dumps(value, default=to_jsonable_python)


async def encode_long(document: Mapping[str, object]) -> bytes:
    """As `encode`, the same bytes, of a document with long lists: other work runs between their pieces."""
    parts: list[bytes] = []
    for name, value in document.items():
        parts += (b"," if parts else b"{", encode(name), b":")
        if not isinstance(value, list) or len(value) <= VALUES_AT_ONCE:
            parts.append(encode(value))
            continue
        for start in range(0, len(value), VALUES_AT_ONCE):
            await asyncio.sleep(0)
            piece = encode(value[start : start + VALUES_AT_ONCE])
            parts += (b"," if start else b"[", piece[1:-1])
        parts.append(b"]")
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)
