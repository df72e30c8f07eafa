"""A small client of Wane's HTTP API, for `wane compare` and `wane report`. It uses httpx."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import httpx
from pydantic import TypeAdapter, ValidationError

from wane.service.api.schemas.models import ModelListDocument
from wane.service.engine.stats import Report
from wane.service.observability.tracing import Parent, Tracing

Document = dict[str, Any]

TIMEOUT_S = 60
KEY_VARIABLE = "WANE_API_KEY"
PARENT_VARIABLE = "TRACEPARENT"


class CommandError(Exception):
    """The command failed because of its arguments, its input or a server. The message says why."""


class ClientError(Exception):
    """The server is unreachable, rejected a request, or is not a Wane server. The message is for the user."""


class Client:
    """One connection to one server. Every method raises ClientError."""

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        key: str | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`key` is the API key. The default is the value of the environment variable WANE_API_KEY. `tracing` records a
        span for every call. If the environment variable TRACEPARENT is set, each span has the parent that this variable
        names.
        """
        self._url = url
        self._tracing = tracing
        self._parent = Parent.of(os.environ.get(PARENT_VARIABLE, "").encode())
        key = key or os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, transport=transport, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[Document]:
        """Returns the documents of all models. The default model is the first."""
        return list(self._get("/v1/models", ModelListDocument)["data"])

    def report(self) -> Document:
        """Returns the server's statistics."""
        return self._get("/v1/report", Report)

    def post(self, path: str, body: Document) -> Document:
        """Returns the server's answer to a POST request with a JSON body."""
        response = self._answered("POST", path, body)
        try:
            document: Document = response.json()
        except ValueError as error:
            raise ClientError(f"{self._url} does not answer POST {path} as Wane does: {error}") from error
        return document

    def delete(self, path: str) -> None:
        """Deletes the resource at `path`."""
        self._answered("DELETE", path)

    def _get(self, path: str, kind: Any) -> Document:
        """Returns the document at `path`. Validates it against a schema, to detect a server that is not a Wane server
        or has an incompatible version."""
        response = self._answered("GET", path)
        try:
            TypeAdapter(kind).validate_json(response.content, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            why = f"{place}: {first['msg']}" if place else first["msg"]
            raise ClientError(f"{self._url} does not answer GET {path} as Wane does: {why}") from error
        document: Document = response.json()
        return document

    def _answered(self, method: str, path: str, body: Document | None = None) -> httpx.Response:
        """Returns the server's response if its status is a success. Raises ClientError otherwise."""
        calling: AbstractContextManager[dict[str, str]] = nullcontext({})
        if self._tracing is not None:
            calling = self._tracing.calling(method, path, self._parent)
        try:
            with calling as headers:
                response = self._http.request(method, path, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClientError(f"{self._url} does not answer: {error}") from error
        if response.is_success:
            return response
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            detail = response.text[:200]
        raise ClientError(f"{method} {path}: {response.status_code}: {detail}")


@contextmanager
def traced() -> Iterator[Tracing | None]:
    """Yields the object that traces the calls of one command. Yields None if the environment variables of OpenTelemetry
    do not enable tracing."""
    logging.basicConfig(format="%(message)s")
    tracing = Tracing.open(os.environ)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()
