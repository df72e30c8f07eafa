"""The keys that are good now, and their owners' buckets; given new keys while it is in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hmac import compare_digest

from service.bucket import Bucket
from service.engine.ownership import Owner
from service.errors import RateLimited, Unauthorized
from service.keys import Key, digest

SELECTOR_BYTES = 16
"""By the first half of its digest a key is looked up, which may take longer or shorter; then the whole is compared, in
a time that does not tell where two digests differ. Neither half tells anything of the key."""


class Holder:
    """Whoever has a key. It outlives changes of how much the key may do; once the key is good no more, or for less, or
    for somebody else, it is `gone`, and whoever goes on with it, a WebSocket, has to come through the door again."""

    __slots__ = ("_bucket", "_clock", "gone", "key", "owner")

    def __init__(self, key: Key, clock: Callable[[], float], before: Holder | None = None) -> None:
        """`before`: who had the key until now, whose spending goes on."""
        self._clock = clock
        self._bucket: Bucket | None = None if before is None else before._bucket
        self.gone = False
        self.give(key)

    def give(self, key: Key) -> None:
        """The key may do this from now on. What was spent of its rate stays spent."""
        before = self._bucket
        self.key = key
        self.owner = Owner(key.name, key.sessions)
        self._bucket = None
        if key.rate is not None:
            self._bucket = Bucket(key.rate, key.burst or max(key.rate, 1.0), self._clock)
            if before is not None:
                self._bucket.adopt(before)

    def charge(self, requests: float, before: float = 0.0) -> None:
        """So many requests are made, in one call with those that were charged `before`. Raises RateLimited where they
        are too many together, and charges none of them; Unauthorized if the key is good no more."""
        if self.gone:
            raise Unauthorized("the key is good no more")
        if self._bucket is None:
            return
        wait_s = self._bucket.take(requests, before)
        if wait_s:
            raise RateLimited(f"key {self.key.name} may make {self.key.rate:g} requests a second", wait_s)


class Keyring:
    """Finds the holder of a key."""

    def __init__(self, keys: Sequence[Key], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._holders: dict[bytes, Holder] = {}
        self.replace(keys)

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._holders)

    def find(self, key: bytes) -> Holder | None:
        """Who has this key; None for one that is not good."""
        told = digest(key)
        holder = self._holders.get(told[:SELECTOR_BYTES])
        if holder is None or not compare_digest(holder.key.digest, told):
            return None
        return holder

    def replace(self, keys: Sequence[Key]) -> None:
        """These are the keys from now on, between one request and the next."""
        before = self._holders
        self._holders = {}
        for key in keys:
            holder = before.pop(key.digest[:SELECTOR_BYTES], None)
            if holder is None:
                holder = Holder(key, self._clock)
            elif holder.key.name != key.name or not key.may_all(holder.key):
                holder.gone = True
                holder = Holder(key, self._clock, holder)
            elif holder.key != key:
                holder.give(key)
            self._holders[key.digest[:SELECTOR_BYTES]] = holder
        for gone in before.values():
            gone.gone = True
