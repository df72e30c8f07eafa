"""Authenticates requests, and checks the permissions of their API keys.

A client sends its key as `Authorization: Bearer KEY`. A browser can set that header neither for a WebSocket nor for a
page that it opens. For a WebSocket, a browser sends the key as a subprotocol, `bearer.KEY`, in addition to the
subprotocol `wane`. For a page, a browser sends the key as the password of `Authorization: Basic`. The server accepts
this password only for GET and HEAD requests, because a browser also sends the password with requests that other sites
trigger. A subprotocol is a token (RFC 9110, 5.6.2), which cannot contain `/` or `=`. A key with one of these characters
is sent in base64url without padding, with the prefix that Kubernetes uses. Any other key may be sent in this form, too.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from wane.service.auth.keyring import Keyring, Principal
from wane.service.auth.keys import Permission
from wane.service.errors import Forbidden, Unauthorized

OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
CONSOLE = "/console/"  # the prefix of the paths of the console's files; its page is `/`
METRICS = "/metrics"
REPOSITORY = "/v2/repository/models/"  # the prefix of the paths that load and unload models
READING = frozenset({"GET", "HEAD"})
SUBPROTOCOL = "wane"
SUBPROTOCOL_KEY = "bearer."
# Kubernetes' convention for keys that are not valid subprotocols.
ENCODED_KEY = "base64url.bearer.authorization.k8s.io."
FREE = "wane.free"
"""The key of a scope whose request is not charged, because another worker has charged the key for it."""
HOW = "send a key as `Authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Admits a request if its API key has the required permission. If `console`, reading the console's page and files
    requires no key."""

    keyring: Keyring
    console: bool = False

    def identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Returns the holder of the request's API key, or None if the path requires no key. Raises Unauthorized."""
        path = routed(scope)
        if path in OPEN or (self.console and may_read(scope) and (path == "/" or path.startswith(CONSOLE))):
            return None
        key = presented(scope, headers)
        principal = None if key is None else self.keyring.find(key)
        if principal is None:
            why = f"the request has no API key; {HOW}" if key is None else "the API key is not valid"
            raise Unauthorized(why, basic=b"text/html" in headers.get(b"accept", b"") and may_read(scope))
        return principal

    def admit(self, scope: Scope, principal: Principal) -> None:
        """Checks the permission of the API key, and charges the key for one request. Raises Forbidden, RateLimited."""
        needed = permission(routed(scope))
        if not principal.key.may(needed):
            raise Forbidden(f"key {principal.key.name} does not have the scope {needed}")
        if FREE not in scope:
            principal.charge(1.0)


def routed(scope: Scope) -> str:
    """Returns the path without the prefix at which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def permission(path: str) -> Permission:
    """Returns the permission that a path requires."""
    if path == METRICS:
        return Permission.METRICS
    return Permission.ADMIN if path.startswith(REPOSITORY) else Permission.USE


def presented(scope: Scope, headers: Mapping[bytes, bytes]) -> bytes | None:
    """Returns the request's API key, which may be invalid. Returns None if the request has no key."""
    header = headers.get(b"authorization")
    if header is None:
        return None if scope["type"] == "http" else of_subprotocols(scope.get("subprotocols", ()))
    scheme, _, credentials = header.partition(b" ")
    scheme = scheme.lower()
    if scheme == b"bearer":
        return credentials.strip()
    if scheme != b"basic" or not may_read(scope):
        return None
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except Error:
        return None


def of_subprotocols(offered: Sequence[str]) -> bytes | None:
    """Returns the API key from a WebSocket's subprotocols, or None if no subprotocol contains a key. Decodes a key in
    base64url. Returns an empty key if this key is invalid."""
    for subprotocol in offered:
        if subprotocol.startswith(SUBPROTOCOL_KEY):
            return subprotocol.removeprefix(SUBPROTOCOL_KEY).encode()
        if subprotocol.startswith(ENCODED_KEY):
            encoded = subprotocol.removeprefix(ENCODED_KEY)
            try:
                return b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
            except ValueError:  # is also raised for characters outside the base64 alphabet
                return b""
    return None


def may_read(scope: Scope) -> bool:
    """Returns whether a request only reads data. Only such a request may send its key as the password of
    `Authorization: Basic`."""
    return scope["type"] == "http" and scope["method"] in READING


def chosen(scope: Scope) -> str | None:
    """Returns the subprotocol with which the server accepts a WebSocket, or None if the client did not offer it."""
    return SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None
