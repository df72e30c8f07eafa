"""Serves the console, a page at `/` for people who try the models in a browser. Its files are in `service/console/`.

The page and its files hold no data, so they need no API key. The page itself asks for a key where the API needs one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from wane.service.api.exchange import context
from wane.service.api.openapi import Router
from wane.service.errors import NotFound

FOLDER = Path(__file__).parents[2] / "console"
PAGE = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
"""The content types of the files that are served. Files with other names, such as licences, are served as plain
text."""
PAGE_HEADERS = {"referrer-policy": "no-referrer", "x-frame-options": "DENY"}
"""Response headers of every page. They tell a browser never to show the page in a frame."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    **PAGE_HEADERS,
}
"""They tell a browser to load nothing from other sites, and to run no script but the page's own."""
CHECKED = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a browser asks each time whether its copy is the file's latest version
}

router = Router(include_in_schema=False)


class File(NamedTuple):
    """A file of a page."""

    content: bytes
    content_type: str
    etag: str


@cache
def files(folder: Path = FOLDER, pattern: str = "*") -> dict[str, File]:
    """Returns the files in a folder whose names match a pattern, by their paths in the folder."""
    files_by_path = {}
    for path in sorted(folder.rglob(pattern)):
        if path.is_file():
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            content_type = f"{TYPES.get(path.suffix, 'text/plain')}; charset=utf-8"
            files_by_path[path.relative_to(folder).as_posix()] = File(content, content_type, etag)
    return files_by_path


def file_reply(request: Request, file: File | None, headers: Mapping[str, str]) -> Response:
    """Returns a file, or 304 if the browser has its latest version. Raises NotFound if `file` is None."""
    if file is None:
        raise NotFound("not found: there is no such file")
    context(request.scope).cacheable = True
    headers = {**headers, **CHECKED, "etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)


@router.on_get("/")
async def page(request: Request) -> Response:
    """Returns the page."""
    return await file(request, PAGE)


@router.on_get("/console/{path:path}")
async def file(request: Request, path: str) -> Response:
    """Returns a file of the page, or 304 if the browser has its latest version. Raises NotFound."""
    return file_reply(request, files().get(path), HEADERS)
