"""An answer in JSON, made once and sent with next to no work: most requests have one."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from pydantic_core import to_jsonable_python
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CONTENT_TYPE = (b"content-type", b"application/json")


class Reply(Response):
    """A document as an answer, as starlette's `Response` of it would be: but for a class that takes any content, with
    any encoding, it is half the work."""

    def __init__(
        self, document: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Every number in the document is finite: JSON has no others."""
        self.status_code = status
        self.background = None
        self.body = encode(document)
        self.raw_headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(self.body))]
        if headers:
            self.raw_headers += [(name.lower().encode("latin-1"), headers[name].encode("latin-1")) for name in headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


def encode(document: Mapping[str, object]) -> bytes:
    """A document as JSON. Every number in it is finite."""
    return orjson.dumps(document, default=to_jsonable_python)
