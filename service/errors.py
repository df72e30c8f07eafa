"""The exceptions that can be raised while a request is answered, as one class hierarchy.

This module imports no framework. For each format of errors (problem documents, OpenAI's format, the Open Inference
Protocol's), one function converts these exceptions to that format. `BundleError` (models/bundle.py) and `DeviceError`
(service/runners) are not in this hierarchy, because they end the process at startup.
"""

from __future__ import annotations

import json
import re

REPR_MAX_CHARACTERS = 64


def truncate_repr(value: object) -> str:
    """Returns the repr of a client's value for an error message. Truncates the repr, because the value may be as long
    as the request's body."""
    text = repr(value[: REPR_MAX_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= REPR_MAX_CHARACTERS + 2 else f"{text[:REPR_MAX_CHARACTERS]}..."


def as_json(value: object) -> str:
    """Returns a value as JSON for a message. Escapes all characters but ASCII if a terminal would not print some."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


class WaneError(Exception):
    """A failure of a request, with a stable code, a status of HTTP, and a message for the client. If `retryable`, the
    same request may succeed later."""

    code = "internal"
    http_status = 500
    retryable = False

    def __init_subclass__(cls, code: str = "", status: int | None = None, retryable: bool | None = None) -> None:
        """The code of a class is its name, unless it is given. A class has the status of its base class, unless it is
        given."""
        cls.code = code or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        cls.http_status = cls.http_status if status is None else status
        cls.retryable = cls.retryable if retryable is None else retryable

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        """`retry_after_s` is for statuses 429 and 503: after so many seconds, the client may try again."""
        super().__init__(message)
        self.message, self.retry_after_s = message, retry_after_s

    def extra(self) -> dict[str, object]:
        """Returns additional fields of the failure that help the client to recover."""
        return {}


def as_result(error: Exception) -> Exception:
    """Returns an error as the result of one of several requests. A request's own failure loses its traceback, because
    that holds the frame of the caller, which holds the results: a cycle, which only the garbage collector would free.
    """
    return error.with_traceback(None) if isinstance(error, WaneError) else error


class NotJson(WaneError, status=400):
    """The body is not JSON, or has a number with too many digits. The message has the position of the error."""


class InvalidRequest(WaneError, status=422):
    """The body is JSON, but the request is invalid. `field` names the invalid field, or is None if no single field is
    invalid."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def extra(self) -> dict[str, object]:
        return {} if self.field is None else {"field": self.field}


class Unauthorized(WaneError, status=401):
    """The request has no API key or an invalid key. `basic` is true if the client may be a browser, which can ask its
    user for a key."""

    def __init__(self, message: str, *, basic: bool = False) -> None:
        super().__init__(message)
        self.basic = basic


class Forbidden(WaneError, status=403):
    """The request has a valid key that lacks the necessary scope, or a page whose origin is not allowed opens a
    WebSocket."""


class NotFound(WaneError, status=404):
    """No resource exists at the path."""


class UnknownModel(NotFound): ...


class UnknownSession(NotFound): ...


class Conflict(WaneError, status=409): ...


class SessionExists(Conflict): ...


class PositionConflict(Conflict):
    """The request's expected position differs from the session's position. `position` is the session's position."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def extra(self) -> dict[str, object]:
        return {"position": self.position}


class IdempotencyKeyReused(PositionConflict):
    """The step has the idempotency key of the session's last step, but other tokens or another position. `position` is
    the session's position."""


class EarlierStepFailed(Conflict):
    """An earlier step of the same session in the same call failed, so this step was not run."""

    def __init__(self, session: str) -> None:
        super().__init__(
            f"an earlier step of session {truncate_repr(session)} in this call failed, so this step was not run"
        )


class TokenizerChanged(Conflict):
    """The session's tokens are from another tokenizer than that of the served model version. No loaded version of the
    model can run these tokens."""

    def __init__(self, session: str, model: str, version: str) -> None:
        super().__init__(
            f"session {truncate_repr(session)} was started with another tokenizer than that of version {version} of "
            f"model {model}, which is the served version: start a new session"
        )


class LoadFailed(WaneError, status=422):
    """A model was not loaded. The server continues to serve the models that it served before."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {truncate_repr(model)} was not loaded: {reason}")
        self.reason = reason


class BodyTimeout(WaneError, status=408, retryable=True):
    """The body was not received within the body timeout."""


class TooLarge(WaneError, status=413): ...


class UnsupportedMedia(WaneError, code="unsupported_media_type", status=415):
    """The body has an encoding that the server does not read."""


class Overloaded(WaneError, status=429, retryable=True): ...


class RateLimited(Overloaded):
    """The key has exceeded its rate limit."""


class QuotaExceeded(Overloaded):
    """The owner of the request's API key has reached its quota of sessions. A session must be deleted or expire before
    the owner can create another."""

    def __init__(self, owner: str, most: int) -> None:
        super().__init__(f"{owner} has {most} sessions, which is its quota", retry_after_s=60)


class Unavailable(WaneError, status=503, retryable=True): ...


class DeadlineExceeded(WaneError, status=504, retryable=True): ...


class Abandoned(WaneError, status=499): ...
