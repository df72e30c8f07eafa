"""Everything that can go wrong in answering a request, as one tree of exceptions.

    WaneError                     code                  status  retryable
    ├── NotJson                   not_json              400     no
    ├── Unauthorized              unauthorized          401     no   (carries `basic`: whether a browser may ask)
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
    ├── Overloaded                overloaded            429     yes  (carries `retry_after_s`)
    │   ├── RateLimited           rate_limited          429     yes
    │   └── QuotaExceeded         quota_exceeded        429     yes
    ├── Unavailable               unavailable           503     yes  (carries `retry_after_s`)
    ├── DeadlineExceeded          deadline_exceeded     504     yes
    └── Abandoned                 abandoned             499     no   (the client left; nobody reads this)

No framework is imported here: each protocol maps this tree to its own envelope, once.
`BundleError` and `DeviceError` (models/bundle.py, service/runners) end the process at start instead.
"""

from __future__ import annotations

REPR_MAX_CHARACTERS = 64


def truncate_repr(value: object) -> str:
    """What a client sent, as a message may repeat it: cut, for it may be as long as a body."""
    text = repr(value[: REPR_MAX_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= REPR_MAX_CHARACTERS + 2 else f"{text[:REPR_MAX_CHARACTERS]}..."


class WaneError(Exception):
    """A failure with a stable code; its message is for the client to read."""

    code = "internal"
    http_status = 500
    retryable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def extra(self) -> dict[str, object]:
        """Fields besides the message that help a client to go on."""
        return {}


class NotJson(WaneError):
    """The body is not JSON; the message says where it stops being it."""

    code = "not_json"
    http_status = 400


class InvalidRequest(WaneError):
    """Well-formed, but not valid; `field` names the part at fault, where there is one."""

    code = "invalid_request"
    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def extra(self) -> dict[str, object]:
        return {} if self.field is None else {"field": self.field}


class Unauthorized(WaneError):
    """No key, or one that is not good. `basic`: the client may be a browser, which asks its user for a key."""

    code = "unauthorized"
    http_status = 401

    def __init__(self, message: str, *, basic: bool = False) -> None:
        super().__init__(message)
        self.basic = basic


class Forbidden(WaneError):
    """The key is good, but not for this."""

    code = "forbidden"
    http_status = 403


class NotFound(WaneError):
    """There is nothing at the path."""

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
    """The step does not start where the session is; `position` is where it is."""

    code = "position_conflict"

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def extra(self) -> dict[str, object]:
        return {"position": self.position}


class IdempotencyKeyReused(PositionConflict):
    """The step carries the last step's key, but other tokens or another position; `position` is the session's."""

    code = "idempotency_key_reused"


class EarlierStepFailed(Conflict):
    """A step before this one, of the same session and in the same call, failed: this one was not taken."""

    code = "earlier_step_failed"

    def __init__(self, session: str) -> None:
        super().__init__(
            f"an earlier step of session {truncate_repr(session)} in this call failed, so this one was not taken"
        )


class TokenizerChanged(Conflict):
    """The session's tokens are another tokenizer's: no version of its model that is served here may run them."""

    code = "tokenizer_changed"

    def __init__(self, session: str, model: str, version: str) -> None:
        super().__init__(
            f"session {truncate_repr(session)} was started on another tokenizer than that of version {version} of "
            f"model {model}, which is served now: start a new session"
        )


class LoadFailed(WaneError):
    """A model was not loaded; whatever was served before still is."""

    code = "load_failed"
    http_status = 422

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {truncate_repr(model)} was not loaded: {reason}")
        self.reason = reason


class BodyTimeout(WaneError):
    """The body came in too slowly."""

    code = "body_timeout"
    http_status = 408
    retryable = True


class TooLarge(WaneError):
    code = "too_large"
    http_status = 413


class Overloaded(WaneError):
    code = "overloaded"
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The key has asked for more than it may at a time."""

    code = "rate_limited"


class QuotaExceeded(Overloaded):
    """The owner has all the sessions that it may have: until one is deleted, or ends."""

    code = "quota_exceeded"

    def __init__(self, owner: str, most: int) -> None:
        super().__init__(f"{owner} has {most} sessions, and may have no more", retry_after_s=60)


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
