"""Pages for people: plain HTML, without scripts, and without anything that another site serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
"""What tells a browser to load nothing from elsewhere, to run nothing, and to show the page in no frame."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto }} td {{ padding: 0 1em 0.5em 0 }}</style>
{content}
</html>
"""
FIRST = """<p>Wane serves recurrent next-token models whose memory provably fades, as a stream or as a window of the
last k tokens, and says how far the two are apart: read <a href="docs">what there is to ask for</a>, or its <a
href="openapi.json">description</a> for programs, the <a href="v1/models">models</a> and the <a
href="v1/report">report</a>.</p>"""


def first() -> str:
    """The first page."""
    return PAGE.format(title="Wane", content=FIRST)


def reference(openapi: Mapping[str, Any]) -> str:
    """Every route of an OpenAPI description, and what it does."""
    rows = "\n".join(_rows(openapi))
    about = escape(openapi["info"].get("description", ""))
    content = f'<p>{about} All of it: <a href="openapi.json">openapi.json</a>.</p>\n<table>\n{rows}\n</table>'
    return PAGE.format(title="Wane: the API", content=content)


def _rows(openapi: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            told = escape(operation.get("description") or operation.get("summary", ""))
            yield f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td><td>{told}</td></tr>"
