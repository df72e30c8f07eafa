"""The valid keys, which can be replaced while in use, and a token bucket for each owner's rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hmac import compare_digest

from wane.service.auth.keys import Key, digest
from wane.service.errors import RateLimited, Unauthorized
from wane.service.types import Owner

ROUNDING = 1e-9
"""A smaller shortage is a rounding error."""


class TokenBucket:
    """Holds at most `burst`, and is refilled by `rate` a second. A call for more than `burst` is granted when the
    bucket is full, and leaves a debt. So a large call is not refused for ever, and still costs its full amount."""

    __slots__ = ("_burst", "_clock", "_held", "_rate", "_since_s")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        """`clock` in seconds. The bucket starts full."""
        self._clock = clock
        self._rate = rate
        self._burst = self._held = burst
        self._since_s = clock()

    def take(self, amount: float, before: float = 0.0) -> float:
        """Takes `amount` and returns 0, or takes nothing and returns the seconds until a retry can succeed.

        `before` was taken for the same call. It is returned to the bucket if `amount` is refused."""
        now_s = self._clock()
        held = min(self._burst, self._held + (now_s - self._since_s) * self._rate)
        self._since_s = now_s
        missing = min(before + amount, self._burst) - (held + before)
        if missing > ROUNDING:
            self._held = min(self._burst, held + before)
            return missing / self._rate
        self._held = held - amount
        return 0.0

    def adopt(self, before: TokenBucket) -> None:
        """Takes over the level of the owner's bucket, which had other limits."""
        self._held = min(self._burst, before._held)
        self._since_s = before._since_s


SELECTOR_BYTES = 16
"""Keys are looked up by the first half of their digest. Then the whole digests are compared in constant time."""


class Principal:
    """The holder of a key. It stays the same when the key's limits change or permissions are added. It is `revoked`
    when the key is removed, loses permissions or changes its name: an open WebSocket must then authenticate again."""

    __slots__ = ("_bucket", "_clock", "key", "owner", "revoked")

    def __init__(self, key: Key, clock: Callable[[], float], before: Principal | None = None) -> None:
        """`before`: the previous holder, whose bucket is kept."""
        self._clock = clock
        self._bucket: TokenBucket | None = None if before is None else before._bucket
        self.revoked = False
        self.give(key)

    def give(self, key: Key) -> None:
        """Replaces the key's permissions and limits. Keeps the level of its bucket."""
        before = self._bucket
        self.key = key
        self.owner = Owner(key.name, key.sessions)
        self._bucket = None
        if key.rate is not None:
            self._bucket = TokenBucket(key.rate, key.burst or max(key.rate, 1.0), self._clock)
            if before is not None:
                self._bucket.adopt(before)

    def charge(self, requests: float, before: float = 0.0) -> None:
        """Charges a number of requests of one call, after `before` were charged for it already.

        Raises RateLimited, and charges none of them, if their sum exceeds the rate. Raises Unauthorized if the key is
        revoked.
        """
        if self.revoked:
            raise Unauthorized("the API key is no longer valid")
        if self._bucket is None:
            return
        wait_s = self._bucket.take(requests, before)
        if wait_s:
            raise RateLimited(f"key {self.key.name} may make {self.key.rate:g} requests a second", wait_s)


class Keyring:
    """Finds the holders of keys."""

    def __init__(self, keys: Sequence[Key], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._principals: dict[bytes, Principal] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._principals)

    def find(self, key: bytes) -> Principal | None:
        """Returns the holder of a key; None for an unknown key."""
        hashed = digest(key)
        principal = self._principals.get(hashed[:SELECTOR_BYTES])
        if principal is None or not compare_digest(principal.key.digest, hashed):
            return None
        return principal

    def replace(self, keys: Sequence[Key]) -> None:
        """Replaces all keys."""
        before = self._principals
        self._principals = {}
        for key in keys:
            principal = before.pop(key.digest[:SELECTOR_BYTES], None)
            if principal is None:
                principal = Principal(key, self._clock)
            elif principal.key.name != key.name or not key.may_all(principal.key):
                principal.revoked = True
                principal = Principal(key, self._clock, principal)
            elif principal.key != key:
                principal.give(key)
            self._principals[key.digest[:SELECTOR_BYTES]] = principal
        for removed in before.values():
            removed.revoked = True
