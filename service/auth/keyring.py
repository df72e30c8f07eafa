"""The valid API keys, which are read again when their file changes, and a token bucket for the rate limit of each
key."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest
from pathlib import Path

from wane.service.auth.keys import Key, KeysError, digest, of_file, of_text, weak
from wane.service.errors import RateLimited, Unauthorized
from wane.service.settings import Settings
from wane.service.types.request import Owner

logger = logging.getLogger("wane.keys")

ROUNDING = 1e-9
"""A call that lacks fewer tokens than this is granted, because the shortage is a rounding error."""


class TokenBucket:
    """A token bucket that holds at most `burst` tokens and gains `rate` tokens a second. A call for more than `burst`
    tokens is granted when the bucket is full, and leaves the bucket with a debt. Therefore a large call can succeed,
    and still costs its full amount."""

    __slots__ = ("_burst", "_clock", "_held", "_rate", "_since_s")

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        """`key` must have a rate. `clock` returns seconds. The bucket is full at the start."""
        self._clock = clock
        self._held = math.inf
        self._since_s = clock()
        self.limit(key)

    def limit(self, key: Key) -> None:
        """Sets the rate and the burst of a key. Keeps the number of tokens, up to the burst."""
        assert key.rate is not None, "the key has no rate: this is a bug"
        self._rate = key.rate
        self._burst = key.burst or max(key.rate, 1.0)
        self._held = min(self._burst, self._held)

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


MakeBucket = Callable[[Key], TokenBucket]
"""Makes the token bucket of a key that has a rate."""

SELECTOR_BYTES = 16
"""The number of digest bytes by which a key is looked up. After the lookup, the whole digests are compared in constant
time."""


class Principal:
    """The holder of an API key. The same object is kept when the key's limits change or the key gets more permissions.
    `revoked` becomes true when the key is removed, loses a permission or changes its name. The client of an open
    WebSocket must then authenticate again."""

    __slots__ = ("_bucket", "_make_bucket", "key", "owner", "revoked")

    def __init__(self, key: Key, make_bucket: MakeBucket, before: Principal | None = None) -> None:
        """`before` is the previous holder of the key, whose token bucket the new holder keeps."""
        self._make_bucket = make_bucket
        self._bucket: TokenBucket | None = None if before is None else before._bucket
        self.revoked = False
        self.give(key)

    def give(self, key: Key) -> None:
        """Replaces the key's permissions and limits. Keeps the number of tokens in the token bucket."""
        self.key = key
        self.owner = Owner(key.name, key.sessions)
        if key.rate is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = self._make_bucket(key)
        else:
            self._bucket.limit(key)

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

    def __init__(self, keys: Sequence[Key], make_bucket: MakeBucket = TokenBucket) -> None:
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
        before = self._principals
        self._principals = {}
        for key in keys:
            principal = before.pop(key.digest[:SELECTOR_BYTES], None)
            if principal is None:
                principal = Principal(key, self._make_bucket)
            elif principal.key.name != key.name or not key.may_all(principal.key):
                principal.revoked = True
                principal = Principal(key, self._make_bucket, principal)
            elif principal.key != key:
                principal.give(key)
            self._principals[key.digest[:SELECTOR_BYTES]] = principal
        for removed in before.values():
            removed.revoked = True


LOOK_S = 1.0

Signature = tuple[int, int, int]
"""A file's inode, size in bytes, and modification time in nanoseconds."""


class KeySource:
    """Reads the API keys from the environment, a file, or both, and reloads the file when it changes. `keyring` is None
    if there are no keys: every request is then accepted.

    The file is checked once a second. A changed file is read when two consecutive checks have found the same inode,
    size and modification time. This avoids reading a file that is still being written. If the file cannot be read, the
    keys stay unchanged.
    """

    def __init__(self, settings: Settings, make_bucket: MakeBucket = TokenBucket) -> None:
        """`make_bucket`: see `Keyring`. Raises KeysError if a list of keys is invalid or the file cannot be read."""
        self._path = settings.api_keys_file
        self._others: list[Key] = []  # the keys from the environment, which never change
        self._seen: Signature | None = None
        self._known: Signature | None = None
        if settings.api_keys is not None:
            text = settings.api_keys.get_secret_value()
            try:
                self._others = of_text(text)
            except KeysError as error:
                raise KeysError(f"WANE_API_KEYS: {error}") from None
            for name in weak(text):
                logger.warning("the key of %s is too short to be secure; `wane key` makes a secure key", name)
        keys = self._others if self._path is None else self._read(self._path)
        self.keyring = Keyring(keys, make_bucket=make_bucket) if keys else None

    async def watch(self) -> None:
        """Calls `look` once a second, until it is cancelled. Returns at once if there is no key file."""
        while self._path is not None:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Checks the file. Reads it if it has changed since it was last read, and is unchanged since the last check.
        The file is small, so reading does not block the event loop for long."""
        assert self._path is not None, "there is no key file: this is a bug"
        try:
            now = _signature(self._path)
        except OSError:
            now = None  # the file is being replaced or is missing; `reload` logs a missing file at the next check
        settled, self._seen = now == self._seen, now
        if settled and now != self._known:
            self._known = now
            self.reload()

    def reload(self) -> None:
        """Replaces the keys with the keys of the file. The keys stay unchanged if the file is invalid."""
        assert self._path is not None and self.keyring is not None, "there is no key file: this is a bug"
        try:
            keys = self._read(self._path)
        except KeysError as error:
            logger.warning("the keys stay as they are: %s", error)
            return
        self.keyring.replace(keys)
        logger.info("%d keys were read from %s", len(keys), self._path)

    def _read(self, path: Path) -> list[Key]:
        """Returns the keys from the file and from the environment. The message of KeysError has the file's name and the
        reason."""
        try:
            self._seen = self._known = _signature(path)
            keys = of_file(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise KeysError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise KeysError(f"{path} is not UTF-8 text") from None
        except KeysError as error:
            raise KeysError(f"{path}, {error}") from None
        digests = {key.digest for key in keys}
        return keys + [key for key in self._others if key.digest not in digests]


def _signature(path: Path) -> Signature:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
