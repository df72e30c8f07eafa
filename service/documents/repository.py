"""The repository of models, as the Open Inference Protocol has it."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


class LoadedDocument(TypedDict):
    """A model that is served now."""

    name: str
    version: str
    state: Condition


class UnloadedDocument(TypedDict):
    """A model that is not served any more."""

    name: str
    state: Condition


class RepositoryEntryDocument(TypedDict):
    """One version of a model; `version` is empty where its manifest cannot be read, `reason` where it is simply ready.
    A model has several entries while one version takes another's place."""

    name: str
    version: str
    state: Condition
    reason: str


class ProtocolFailureDocument(TypedDict):
    """A failure, as the Open Inference Protocol has it; `code` as in a problem document."""

    error: str
    code: str
    retryable: bool
    request_id: str
