"""A small client of the native protocol, over httpx: what `compare` and `report` speak."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import httpx
from pydantic import TypeAdapter, ValidationError

from wane.service.api.schemas.models import ModelListDocument
from wane.service.api.schemas.ops import ReportDocument
from wane.service.observability.tracing import Parent, Tracing

Document = dict[str, Any]

TIMEOUT_S = 60
KEY_VARIABLE = "WANE_API_KEY"
PARENT_VARIABLE = "TRACEPARENT"


class CommandError(Exception):
    """The command line asks for what cannot be done; the message says why."""


class ClientError(Exception):
    """The server could not be reached, refused, or is not a Wane server; the message is for a person to read."""


class Client:
    """One connection to one server. Every method raises ClientError."""

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        key: str | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`key`: the API key that is sent; if none is given, the one in the variable WANE_API_KEY, if it is set.
        `tracing`: every call is a span; their parent is the one of the variable TRACEPARENT, if it is set."""
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
        """Every model, the default first."""
        data: list[Document] = self._get("/v1/models", ModelListDocument)["data"]
        return data

    def report(self) -> Document:
        """What the server has measured."""
        return self._get("/v1/report", ReportDocument)

    def score(self, model: str, text: str) -> Document:
        """Token ids of `text`, and their log-probabilities."""
        return self._call("POST", "/v1/score", {"model": model, "input": text})

    def predict(self, model: str, tokens: Sequence[int], mode: str, window: int) -> Document:
        """What follows `tokens`."""
        body = {"model": model, "tokens": list(tokens), "mode": mode, "window": window}
        return self._call("POST", "/v1/predict", body)

    def compare(self, model: str, tokens: Sequence[int], windows: Sequence[int], repeat: int) -> Document:
        """Recurrent against windows of several sizes, for one model."""
        body = {"model": model, "tokens": list(tokens), "windows": list(windows), "repeat": repeat}
        compared: Document = self._call("POST", "/v1/compare", body)["models"][0]
        return compared

    def create_session(self, model: str) -> str:
        """A new session's id."""
        session: str = self._call("POST", "/v1/sessions", {"model": model})["session"]
        return session

    def step(self, session: str, tokens: Sequence[int], position: int, mode: str) -> Document:
        """Appends `tokens`, which start at `position`, and predicts what follows."""
        body = {"tokens": list(tokens), "expected_position": position, "mode": mode}
        return self._call("POST", f"/v1/sessions/{session}/tokens", body)

    def delete_session(self, session: str) -> None:
        """Ends a session."""
        self._call("DELETE", f"/v1/sessions/{session}")

    def _get(self, path: str, kind: Any) -> Document:
        """The document at `path`. Its schema tells that the server is a Wane server of a version understood here."""
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

    def _call(self, method: str, path: str, body: Document | None = None) -> Document:
        response = self._answered(method, path, body)
        try:
            document: Document = response.json() if response.content else {}
        except ValueError as error:
            raise ClientError(f"{self._url} does not answer {method} {path} as Wane does: {error}") from error
        return document

    def _answered(self, method: str, path: str, body: Document | None = None) -> httpx.Response:
        """The server's response, if it is a success."""
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
    """Tracing for the calls of one command, where OpenTelemetry's variables ask for it."""
    logging.basicConfig(format="%(message)s")
    tracing = Tracing.open(os.environ)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()
