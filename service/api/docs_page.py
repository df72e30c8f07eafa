"""Renders the page `/docs` as plain HTML, without resources from other sites.

`/docs` shows the routes of the OpenAPI description in groups. Each route has its summary, its parameters, the fields of
its body and of its answer, its examples as curl commands, and a form that sends an example. `/docs` also shows the
messages of the WebSocket route, which OpenAPI cannot describe. The only script is the one that sends a form.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from wane.service.api.schemas.sessions import StreamBody

SCRIPT = """
const key = document.getElementById('key')
key.value = sessionStorage.getItem('wane-key') || ''
key.addEventListener('change', () => sessionStorage.setItem('wane-key', key.value))
addEventListener('submit', async event => {
  event.preventDefault()
  const form = event.target, answer = form.querySelector('output'), body = form.elements.body
  const path = form.dataset.path.replace(/{([a-z]+)}/g, (_, name) => encodeURIComponent(form.elements[name].value))
  answer.textContent = '...'
  try {
    const headers = {'content-type': 'application/json'}
    if (key.value) headers.authorization = 'Bearer ' + key.value
    const response = await fetch('.' + path, {method: form.dataset.method, headers, body: body?.value})
    let shown = await response.text()
    try { shown = JSON.stringify(JSON.parse(shown), null, 2) } catch {}
    answer.textContent = response.status + ' ' + response.statusText + '\\n' + shown
  } catch (error) { answer.textContent = String(error) }
})
"""
"""Sends a form of the page `/docs` as a request, and shows the answer. The console keeps its key at the same place."""

DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
"""Response headers of the pages. They tell a browser to load nothing from other sites, to run no script but `SCRIPT`,
and never to show the page in a frame."""

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #1c2733 }
details { border: 1px solid #d4dbe2; border-radius: 6px; margin: .5em 0; padding: .4em .8em }
summary { cursor: pointer } summary b { display: inline-block; min-width: 4.5em; color: #0b6e99 }
table { border-collapse: collapse; margin: .5em 0 1em; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .2em 1em .2em 0; border-top: 1px solid #e8edf1 }
th { font-weight: 600; border-top: 0 } code, pre { font: 14px/1.4 monospace }
textarea { width: 100%; font: 14px/1.4 monospace; box-sizing: border-box } output { display: block }
output:not(:empty), pre { background: #f3f6f8; padding: .6em; white-space: pre-wrap; overflow-wrap: anywhere }
h4 { margin: .8em 0 0 }
"""
KEY = """<label>API key of the forms, if this server asks for one: <input id="key" type="password"></label>"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
{content}
</html>
"""
MOST_LIMIT = 1e15
"""The largest limit that the page shows. Larger limits only mean that the field is a 64-bit integer."""
MOST_DEPTH = 3
"""The number of nesting levels of objects that a table of fields shows."""

STREAM = "/v1/sessions/{session}/stream"
CLOSES = (
    (1002, "a frame is malformed"),
    (1007, "a text is not UTF-8"),
    (1008, "the key is missing, wrong or revoked, or a message came too slowly or in too many frames"),
    (1009, "the message exceeds the largest body size"),
    (1011, "unexpected failure; the server's log has the error under the request id"),
    (1012, "the server is loading or stopping: connect again"),
    (1013, "the key exceeded its rate limit, or the server receives too many bytes: connect again later"),
    (4404, "the session does not exist"),
    (4409, "the session is not at the message's expected position, or the idempotency key was used for another step"),
)
"""Close codes of the WebSocket route."""

Schema = Mapping[str, Any]
Member = tuple[str, Schema, bool]
"""A row of a table of fields: the dotted name of a field, the field's schema, and whether the field is required."""


def api_page(openapi: Schema) -> str:
    """Returns the page `/docs` for an OpenAPI description."""
    components = openapi["components"]["schemas"]
    about = marked(openapi["info"]["description"])
    parts = [f'<h1>Wane: the API</h1>\n<p>{about} For programs: <a href="openapi.json">openapi.json</a>.</p>', KEY]
    for group in openapi["tags"]:
        parts.append(f"<h2>{escape(group['description'])}</h2>")
        for path, operations in openapi["paths"].items():
            for method, operation in operations.items():
                if group["name"] in operation["tags"]:
                    parts += _operation(path, method, operation, components)
        if group["name"] == "sessions":
            parts += _stream(components)
    parts.append(f"<script>{SCRIPT}</script>")
    return PAGE.format(title="Wane: the API", style=STYLE, content="\n".join(parts))


def _operation(path: str, method: str, operation: Schema, components: Schema) -> Iterator[str]:
    yield f"<details><summary><b>{method.upper()}</b> <code>{path}</code> {marked(operation['summary'])}</summary>"
    yield f"<p>{marked(operation['description'])}</p><h4>Parameters</h4>"
    rows: list[Member] = []
    values: dict[str, str] = {}
    for parameter in operation["parameters"]:
        name, schema = parameter["name"], parameter["schema"]
        meaning = f"{parameter['in']}: {parameter['description']}"
        rows.append((name, schema | {"description": meaning}, parameter["required"]))
        if parameter["in"] == "path":
            values[name] = schema["examples"][0]
    yield from _table(rows, components)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        yield "<h4>Body</h4>"
        yield from _fields(body["schema"], components)
    examples = [example["value"] for example in (body or {}).get("examples", {}).values()]
    for example in examples:
        yield _curl(path.format(**values), method, example)
    yield from _form(path, method, values, examples)
    for status, response in operation["responses"].items():
        answer = response.get("content", {}).get("application/json", {}).get("schema")
        if answer is not None and status.isdigit():
            yield f"<h4>Answer {status}</h4>"
            yield from _fields(answer, components)
    yield "</details>"


def _stream(components: Schema) -> Iterator[str]:
    """Renders the WebSocket route. A message has the fields of a step's request body, and an answer has the fields of a
    step's answer."""
    yield f"<details><summary><b>WS</b> <code>{STREAM}</code> Answers many steps of a session</summary>"
    yield "<p>Each message is one step or one rewind. Messages are answered in order. A failed message gets the answer "
    yield '<code>{"error": ...}</code>, a problem document. The socket stays open, unless the failure has one of '
    yield "the close codes below.</p><h4>Message</h4>"
    yield from _fields({"$ref": "#/components/schemas/StreamBody"}, components)
    messages = "\n".join(json.dumps(example) for example in StreamBody.examples)
    yield f"<pre>{escape(messages)}</pre><h4>Answer</h4>"
    yield from _fields({"$ref": "#/components/schemas/Answer"}, components)
    yield "<h4>Close codes</h4><table>"
    for code, meaning in CLOSES:
        yield f"<tr><td>{code}</td><td>{escape(meaning)}</td></tr>"
    yield "</table></details>"


def _form(path: str, method: str, values: Mapping[str, str], examples: Sequence[object]) -> Iterator[str]:
    """Renders a form that sends the first example, which the reader may change. `values` are the path's parameters."""
    yield f'<form data-method="{method.upper()}" data-path="{path}">'
    for name, value in values.items():
        yield f'<label>{name} <input name="{name}" value="{escape(value)}" required></label> '
    if examples:
        yield f'<textarea name="body" rows="4">{escape(json.dumps(examples[0]))}</textarea>'
    yield "<button>Send</button><output></output></form>"


def _curl(path: str, method: str, body: object) -> str:
    address = f"http://127.0.0.1:8000{path}"
    command = f"curl -X {method.upper()} {address} -H 'content-type: application/json' -d '{json.dumps(body)}'"
    return f"<pre>{escape(command)}</pre>"


def _fields(schema: Schema, components: Schema) -> Iterator[str]:
    """Renders a table of an object's members, including the members of nested objects."""
    yield from _table(list(_members(schema, components)), components)


def _members(
    schema: Schema, components: Schema, prefix: str = "", depth: int = 1
) -> Iterator[tuple[str, Schema, bool]]:
    """Yields the fields of an object, including the fields of nested objects."""
    schema = _resolved(schema, components)
    for option in schema.get("anyOf", ()):
        if option.get("type") != "null":
            yield from _members(option, components, prefix, depth)
    required = schema.get("required", ())
    for name, member in schema.get("properties", {}).items():
        yield prefix + name, member, name in required
        if depth < MOST_DEPTH:
            inner, suffix = _inner(_resolved(member, components), components)
            yield from _members(inner, components, f"{prefix}{name}{suffix}.", depth + 1)


def _inner(schema: Schema, components: Schema) -> tuple[Schema, str]:
    """Returns the object schema of a member or of its list items, and the suffix that the page adds to the member's
    name: `[]` for a list."""
    for option in schema.get("anyOf", (schema,)):
        option = _resolved(option, components)
        if option.get("type") == "array" and isinstance(option.get("items"), dict):
            return option["items"], "[]"
        if "properties" in option:
            return option, ""
    return {}, ""


def _table(rows: Sequence[Member], components: Schema) -> Iterator[str]:
    yield "<table><tr><th>name</th><th>type</th><th>meaning</th></tr>"
    for name, schema, required in rows:
        mark = "" if required else " (optional)"
        kinds = dict.fromkeys(_kinds(schema, components))
        if not required and len(kinds) > 1:
            kinds.pop("null", None)
        kind = escape(" or ".join(kinds))
        yield f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{kind}</td><td>{_meaning(schema)}</td></tr>"
    yield "</table>"


def _kinds(schema: Schema, components: Schema) -> Iterator[str]:
    """Returns the names of a value's possible types."""
    schema = _resolved(schema, components)
    if "enum" in schema:
        yield " | ".join(json.dumps(value) for value in schema["enum"])
    elif "const" in schema:
        yield json.dumps(schema["const"])
    elif "anyOf" in schema or "oneOf" in schema:
        for option in schema.get("anyOf") or schema["oneOf"]:
            yield from _kinds(option, components)
    elif schema.get("type") == "array":
        yield f"list of {', '.join(dict.fromkeys(_kinds(schema.get('items', {}), components)))}"
    else:
        yield str(schema.get("type", "any"))


def _meaning(schema: Schema) -> str:
    """Returns a text with the description, the default and the limits of a value."""
    limits = {
        "minimum": "from {}",
        "exclusiveMinimum": "above {}",
        "maximum": "to {}",
        "exclusiveMaximum": "below {}",
        "minLength": "at least {} characters",
        "maxLength": "at most {} characters",
        "minItems": "at least {} items",
        "maxItems": "at most {} items",
    }
    options = [schema, *schema.get("anyOf", ())]
    notes = [
        text.format(f"{option[name]:g}")
        for option in options
        for name, text in limits.items()
        if name in option and abs(option[name]) < MOST_LIMIT
    ]
    if schema.get("default") is not None:
        notes.append(f"default {json.dumps(schema['default'])}")
    description = marked(schema.get("description", ""))
    return f"{description} ({escape('; '.join(notes))})" if notes else description


def marked(text: str) -> str:
    """Returns a text as HTML. What is between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _resolved(schema: Schema, components: Schema) -> Schema:
    """Returns the schema that a reference points to."""
    while "$ref" in schema:
        schema = components.get(schema["$ref"].rpartition("/")[2], {})
    return schema
