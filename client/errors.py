"""The errors of the client, as one class hierarchy: that of the server's errors, with the same names and codes.
Unreachable and NotWane are the client's own.

An error with an unknown code has the class of its status: an unknown code with status 404 is a NotFound. Invalid
arguments raise ValueError, before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

OF_CODE: dict[str, type[WaneError]] = {}
OF_STATUS: dict[int, type[WaneError]] = {}


class WaneError(Exception):
    """A request failed. `code` is the server's code, `status` the HTTP status (0 without an answer), `detail` the
    server's sentence, and `document` the server's whole problem document. `retry_after_s` is the number of seconds
    after which the server asks for a retry, or None."""

    code = "internal"

    def __init_subclass__(cls, code: str = "", of: Sequence[int] = ()) -> None:
        """The code of a class is its name, unless it is given. `of`: it is the class of unknown codes with one of these
        statuses."""
        cls.code = code or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        OF_CODE[cls.code] = cls
        OF_STATUS.update(dict.fromkeys(of, cls))

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        document: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.document, self.retry_after_s = status, dict(document or {}), retry_after_s
        self.code = str(self.document.get("code") or type(self).code)
        self.detail = str(self.document.get("detail") or message)


OF_CODE[WaneError.code] = WaneError


class NotJson(WaneError, of=(400,)): ...


class InvalidRequest(WaneError, of=(422,)):
    """The server refused the request. `field` names the invalid field, or is None."""

    @property
    def field(self) -> str | None:
        return self.document.get("field")


class Unauthorized(WaneError, of=(401,)): ...


class Forbidden(WaneError, of=(403,)): ...


class NotFound(WaneError, of=(404,)): ...


class UnknownModel(NotFound): ...


class UnknownSession(NotFound):
    """No server has the session, and the client cannot make it again from the tokens that it remembers."""


class Conflict(WaneError, of=(409,)):
    """The request contradicts the session on the server."""


class SessionExists(Conflict): ...


class PositionConflict(Conflict):
    """The session on the server is not where this client left it. `position` is the session's position there."""

    @property
    def position(self) -> int:
        return int(self.document["position"])


class IdempotencyKeyReused(PositionConflict): ...


class EarlierStepFailed(Conflict): ...


class TokenizerChanged(Conflict): ...


class LoadFailed(WaneError): ...


class BodyTimeout(WaneError, of=(408,)): ...


class TooLarge(WaneError, of=(413,)): ...


class UnsupportedMedia(WaneError, code="unsupported_media_type", of=(415,)): ...


class Overloaded(WaneError, of=(429,)): ...


class RateLimited(Overloaded): ...


class QuotaExceeded(Overloaded): ...


class Unavailable(WaneError, of=(502, 503)): ...


class Unreachable(Unavailable):
    """No server answered: the connection failed or was lost, or the deadline passed."""


class DeadlineExceeded(WaneError, of=(504,)): ...


class Abandoned(WaneError): ...


class NotWane(WaneError):
    """The answer is not one of Wane's. The message says what is wrong with it."""


def error_of(request: str, status: int, document: Any, text: str, retry_after_s: float | None) -> WaneError:
    """Returns the error for a refused request. `document` is the answer's JSON: a problem document, an error in
    OpenAI's format, or anything else, such as a proxy's page, of which `text` is the beginning."""
    found: dict[str, Any] = document if isinstance(document, dict) else {}
    if isinstance(of_openai := found.get("error"), dict):
        found = {"detail": of_openai.get("message"), "field": of_openai.get("param"), **of_openai}
    code, detail = str(found.get("code") or ""), found.get("detail") or text
    kind = OF_CODE.get(code) or OF_STATUS.get(status, WaneError)
    if issubclass(kind, PositionConflict) and type(found.get("position")) is not int:
        kind = Conflict
    message = f"{request}: {status}{' ' * bool(code)}{code}: {detail}"
    return kind(message, status=status, document=found, retry_after_s=retry_after_s)
