"""The valid API keys, which can be replaced while the server runs, and a token bucket for the rate limit of each
owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hmac import compare_digest

from wane.service.auth.keys import Key, digest
from wane.service.errors import RateLimited, Unauthorized
from wane.service.types.request import Owner

ROUNDING = 1e-9
"""A call that lacks fewer tokens than this is granted, because the shortage is a rounding error."""


class TokenBucket:
    """A token bucket that holds at most `burst` tokens and gains `rate` tokens a second. A call for more than `burst`
    tokens is granted when the bucket is full, and leaves the bucket with a debt. Therefore a large call can succeed,
    and still costs its full amount."""

    __slots__ = ("_burst", "_clock", "_held", "_rate", "_since_s")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        """`clock` returns seconds. The bucket is full at the start."""
        self._clock = clock
        self._rate = rate
        self._burst = self._held = burst
        self._since_s = clock()

    def take(self, amount: float, before: float = 0.0) -> float:
        """Takes `amount` tokens and returns 0. Takes nothing if there are too few tokens, and returns the seconds until
        a retry can succeed.

        `before` is the number of tokens that were already taken for the same call. If `amount` is refused, these tokens
        are returned to the bucket."""
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
        """Copies the number of tokens from the key's previous bucket, which had other limits."""
        self._held = min(self._burst, before._held)
        self._since_s = before._since_s


MakeBucket = Callable[[bytes, float, float, Callable[[], float]], TokenBucket]
"""Makes the token bucket of a key, from the key's digest, rate and burst, and a clock."""


def own_bucket(_: bytes, rate: float, burst: float, clock: Callable[[], float]) -> TokenBucket:
    """Returns a token bucket for this process alone."""
    return TokenBucket(rate, burst, clock)


SELECTOR_BYTES = 16
"""The number of digest bytes by which a key is looked up. After the lookup, the whole digests are compared in constant
time."""


class Principal:
    """The holder of an API key. The same object is kept when the key's limits change or the key gets more permissions.
    `revoked` becomes true when the key is removed, loses a permission or changes its name. The client of an open
    WebSocket must then authenticate again."""

    __slots__ = ("_bucket", "_clock", "_make_bucket", "key", "owner", "revoked")

    def __init__(
        self,
        key: Key,
        clock: Callable[[], float],
        before: Principal | None = None,
        make_bucket: MakeBucket = own_bucket,
    ) -> None:
        """`before` is the previous holder of the key. The new holder's token bucket starts with the number of tokens in
        the previous holder's bucket."""
        self._clock = clock
        self._make_bucket = make_bucket
        self._bucket: TokenBucket | None = None if before is None else before._bucket
        self.revoked = False
        self.give(key)

    def give(self, key: Key) -> None:
        """Replaces the key's permissions and limits. Keeps the number of tokens in the token bucket."""
        before = self._bucket
        self.key = key
        self.owner = Owner(key.name, key.sessions)
        self._bucket = None
        if key.rate is not None:
            self._bucket = self._make_bucket(key.digest, key.rate, key.burst or max(key.rate, 1.0), self._clock)
            if before is not None:
                self._bucket.adopt(before)

    def charge(self, requests: float, before: float = 0.0) -> None:
        """Charges the key for `requests` requests of one call. `before` is the number of other requests of the call
        that were already charged. If the call exceeds the rate limit, refunds these earlier requests and raises
        RateLimited. Raises Unauthorized if the key is revoked.
        """
        if self.revoked:
            raise Unauthorized("the API key is no longer valid")
        if self._bucket is None:
            return
        wait_s = self._bucket.take(requests, before)
        if wait_s:
            raise RateLimited(
                f"key {self.key.name} has exceeded its limit of {self.key.rate:g} requests a second", wait_s
            )


class Keyring:
    """Finds the holder of an API key."""

    def __init__(
        self,
        keys: Sequence[Key],
        clock: Callable[[], float] = time.monotonic,
        make_bucket: MakeBucket = own_bucket,
    ) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._make_bucket = make_bucket
        self._principals: dict[bytes, Principal] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._principals)

    def find(self, key: bytes) -> Principal | None:
        """Returns the holder of a key, or None if the key is unknown."""
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
                principal = Principal(key, self._clock, None, self._make_bucket)
            elif principal.key.name != key.name or not key.may_all(principal.key):
                principal.revoked = True
                principal = Principal(key, self._clock, principal, self._make_bucket)
            elif principal.key != key:
                principal.give(key)
            self._principals[key.digest[:SELECTOR_BYTES]] = principal
        for removed in before.values():
            removed.revoked = True
