"""The exceptions that can be raised while a request is answered, as one class hierarchy.

    WaneError                     code                  status  retryable
    ├── NotJson                   not_json              400     no
    ├── Unauthorized              unauthorized          401     no   (carries `basic`)
    ├── Forbidden                 forbidden             403     no
    ├── InvalidRequest            invalid_request       422     no
    ├── NotFound                  not_found             404     no
    │   ├── UnknownModel          unknown_model         404     no
    │   └── UnknownSession        unknown_session       404     no
    ├── Conflict
    │   ├── SessionExists         session_exists        409     no
    │   ├── PositionConflict      position_conflict     409     no   (carries `position`)
    │   │   └── IdempotencyKeyReused  idempotency_key_reused  409  no   (carries `position`)
    │   ├── EarlierStepFailed     earlier_step_failed   409     no   (in a call of many steps)
    │   └── TokenizerChanged      tokenizer_changed     409     no
    ├── LoadFailed                load_failed           422     no
    ├── BodyTimeout               body_timeout          408     yes
    ├── TooLarge                  too_large             413     no
    ├── UnsupportedMedia          unsupported_media_type  415   no
    ├── Overloaded                overloaded            429     yes  (carries `retry_after_s`)
    │   ├── RateLimited           rate_limited          429     yes
    │   └── QuotaExceeded         quota_exceeded        429     yes
    ├── Unavailable               unavailable           503     yes  (carries `retry_after_s`)
    ├── DeadlineExceeded          deadline_exceeded     504     yes
    └── Abandoned                 abandoned             499     no   (the client has disconnected)

This module imports no framework. For each format of errors (problem documents, OpenAI's format, the Open Inference
Protocol's), one function converts these exceptions to that format. `BundleError` (models/bundle.py) and `DeviceError`
(service/runners) are not in this hierarchy, because they end the process at startup.
"""

from __future__ import annotations

REPR_MAX_CHARACTERS = 64


def truncate_repr(value: object) -> str:
    """Returns the repr of a client's value for an error message. Truncates the repr, because the value may be as long
    as the request's body."""
    text = repr(value[: REPR_MAX_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= REPR_MAX_CHARACTERS + 2 else f"{text[:REPR_MAX_CHARACTERS]}..."


class WaneError(Exception):
    """A failure of a request, with a stable code and a message for the client."""

    code = "internal"
    http_status = 500
    retryable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def extra(self) -> dict[str, object]:
        """Returns additional fields of the failure that help the client to recover."""
        return {}


class NotJson(WaneError):
    """The body is not JSON, or has a number with too many digits. The message has the position of the error."""

    code = "not_json"
    http_status = 400


class InvalidRequest(WaneError):
    """The body is JSON, but the request is invalid. `field` names the invalid field, or is None if no single field is
    invalid."""

    code = "invalid_request"
    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def extra(self) -> dict[str, object]:
        return {} if self.field is None else {"field": self.field}


class Unauthorized(WaneError):
    """The request has no API key or an invalid key. `basic` is true if the client may be a browser, which can ask its
    user for a key."""

    code = "unauthorized"
    http_status = 401

    def __init__(self, message: str, *, basic: bool = False) -> None:
        super().__init__(message)
        self.basic = basic


class Forbidden(WaneError):
    """The request has a valid key that lacks the necessary scope, or a page whose origin is not allowed opens a
    WebSocket."""

    code = "forbidden"
    http_status = 403


class NotFound(WaneError):
    """No resource exists at the path."""

    code = "not_found"
    http_status = 404


class UnknownModel(NotFound):
    code = "unknown_model"


class UnknownSession(NotFound):
    code = "unknown_session"


class Conflict(WaneError):
    http_status = 409


class SessionExists(Conflict):
    code = "session_exists"


class PositionConflict(Conflict):
    """The request's expected position differs from the session's position. `position` is the session's position."""

    code = "position_conflict"

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def extra(self) -> dict[str, object]:
        return {"position": self.position}


class IdempotencyKeyReused(PositionConflict):
    """The step has the idempotency key of the session's last step, but other tokens or another position. `position` is
    the session's position."""

    code = "idempotency_key_reused"


class EarlierStepFailed(Conflict):
    """An earlier step of the same session in the same call failed, so this step was not run."""

    code = "earlier_step_failed"

    def __init__(self, session: str) -> None:
        super().__init__(
            f"an earlier step of session {truncate_repr(session)} in this call failed, so this step was not run"
        )


class TokenizerChanged(Conflict):
    """The session's tokens are from another tokenizer than that of the served model version. No loaded version of the
    model can run these tokens."""

    code = "tokenizer_changed"

    def __init__(self, session: str, model: str, version: str) -> None:
        super().__init__(
            f"session {truncate_repr(session)} was started with another tokenizer than that of version {version} of "
            f"model {model}, which is the served version: start a new session"
        )


class LoadFailed(WaneError):
    """A model was not loaded. The server continues to serve the models that it served before."""

    code = "load_failed"
    http_status = 422

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {truncate_repr(model)} was not loaded: {reason}")
        self.reason = reason


class BodyTimeout(WaneError):
    """The body was not received within the body timeout."""

    code = "body_timeout"
    http_status = 408
    retryable = True


class TooLarge(WaneError):
    code = "too_large"
    http_status = 413


class UnsupportedMedia(WaneError):
    """The body has an encoding that the server does not read."""

    code = "unsupported_media_type"
    http_status = 415


class Overloaded(WaneError):
    code = "overloaded"
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The key has exceeded its rate limit."""

    code = "rate_limited"


class QuotaExceeded(Overloaded):
    """The owner of the request's API key has reached its quota of sessions. A session must be deleted or expire before
    the owner can create another."""

    code = "quota_exceeded"

    def __init__(self, owner: str, most: int) -> None:
        super().__init__(f"{owner} has {most} sessions, which is its quota", retry_after_s=60)


class Unavailable(WaneError):
    code = "unavailable"
    http_status = 503
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(WaneError):
    code = "deadline_exceeded"
    http_status = 504
    retryable = True


class Abandoned(WaneError):
    code = "abandoned"
    http_status = 499
