"""Authenticates requests, and checks their keys' permissions.

A client sends its key as `Authorization: Bearer KEY`. A browser cannot set that header. For a WebSocket it sends the
key as a subprotocol, `bearer.KEY`, with the subprotocol `wane`. For a page it sends the key as the password of
`Authorization: Basic`, which is accepted for reading only, because browsers also send it with requests that other sites
cause. A subprotocol is a token (RFC 9110, 5.6.2), which cannot contain `/` or `=`. A key with these characters is sent
as base64url without padding, after Kubernetes' prefix. Any other key may be sent like that too.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error
from collections.abc import Mapping, Sequence

from starlette.types import Scope

from wane.service.auth.keyring import Keyring, Principal
from wane.service.auth.keys import Permission
from wane.service.errors import Forbidden, Unauthorized

OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
METRICS = "/metrics"
REPOSITORY = "/v2/repository/models/"  # the prefix of the paths that load and unload models
READING = frozenset({"GET", "HEAD"})
SUBPROTOCOL = "wane"
SUBPROTOCOL_KEY = "bearer."
ENCODED_KEY = "base64url.bearer.authorization.k8s.io."  # Kubernetes' convention for keys that are not tokens
HOW = "send a key as `Authorization: Bearer KEY`"


class Authenticator:
    """Admits requests that their keys permit."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Returns the holder of the request's key; None on an open path. Raises Unauthorized."""
        if routed(scope) in OPEN:
            return None
        key = presented(scope, headers)
        principal = None if key is None else self._keyring.find(key)
        if principal is None:
            why = f"the request has no API key; {HOW}" if key is None else "the API key is not valid"
            raise Unauthorized(why, basic=b"text/html" in headers.get(b"accept", b"") and may_read(scope))
        return principal

    def admit(self, scope: Scope, principal: Principal) -> None:
        """Checks the key's permission, and charges one request. Raises Forbidden, RateLimited."""
        needed = permission(routed(scope))
        if not principal.key.may(needed):
            raise Forbidden(f"key {principal.key.name} does not have the scope {needed}")
        principal.charge(1.0)


def routed(scope: Scope) -> str:
    """Returns the path without the prefix at which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def permission(path: str) -> Permission:
    """Returns the permission that a path needs."""
    if path == METRICS:
        return Permission.METRICS
    return Permission.ADMIN if path.startswith(REPOSITORY) else Permission.USE


def presented(scope: Scope, headers: Mapping[bytes, bytes]) -> bytes | None:
    """Returns the request's key, valid or not; None if it has no key."""
    given = headers.get(b"authorization")
    if given is None:
        return None if scope["type"] == "http" else of_subprotocols(scope.get("subprotocols", ()))
    scheme, _, credentials = given.partition(b" ")
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
    """Returns the key among a WebSocket's subprotocols, decoded if necessary."""
    for one in offered:
        if one.startswith(SUBPROTOCOL_KEY):
            return one.removeprefix(SUBPROTOCOL_KEY).encode()
        if one.startswith(ENCODED_KEY):
            encoded = one.removeprefix(ENCODED_KEY)
            try:
                return b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
            except ValueError:  # also for characters outside the alphabet
                return b""
    return None


def may_read(scope: Scope) -> bool:
    """Whether a request only reads, so that a browser's password is accepted."""
    return scope["type"] == "http" and scope["method"] in READING


def chosen(scope: Scope) -> str | None:
    """Returns the subprotocol for accepting a WebSocket, if the client offered it."""
    return SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None
