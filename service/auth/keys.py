"""Parses API keys from a file and from the environment, with their owners, permissions and limits.

A line of the file is one key. `wane key NAME` creates a key and prints its line. Every line ends in a newline.

    # name:sha256:digest, then any of: scope (use, metrics, admin; joined by +), rate (requests a second),
    # burst (requests), sessions
    alice:sha256:9f86d081884c7d65...
    bob:sha256:60303ae22b998861...    rate=100 burst=200 sessions=1000
    prometheus:sha256:fd61a03af4f7...   scope=metrics

In the environment, a key is `name:key` or `name:key:scope`, with commas between keys. An owner may have several keys,
which give access to the same sessions. A new key can therefore replace an old key without an interruption.

The file has SHA-256 hashes of keys. A fast hash is enough, because a key has 256 random bits, which nobody can guess. A
password would require a slow hash.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[A-Za-z0-9._~+/-]{1,256}={0,2}")  # the syntax of a `Bearer` token (RFC 6750)
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
PREFIX = "wane_"  # a prefix that scanners for leaked secrets can recognise
RANDOM_BYTES = 32
WEAK_CHARACTERS = 20  # a shorter key is probably not random
ALGORITHM = "sha256"
HASHED = re.compile(rf"([^:]*):{ALGORITHM}:([0-9a-f]{{64}})")


class KeysError(Exception):
    """A list of keys is invalid. The message names the line or the position of the invalid key, and never contains a
    key or a digest."""


class Permission(StrEnum):
    """A permission of a key. `use` permits all requests of clients. `metrics` permits reading the metrics. `admin`
    permits every request, including loading and unloading models."""

    USE = "use"
    METRICS = "metrics"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the owner `name`. `digest` is the key's SHA-256. `rate` is the key's limit in requests a second, and
    `burst` the size of its token bucket in requests. `sessions` is the owner's quota of sessions. None means no limit.
    """

    name: str
    digest: bytes
    permissions: frozenset[Permission] = frozenset({Permission.USE})
    rate: float | None = None
    burst: float | None = None
    sessions: int | None = None

    def may(self, permission: Permission) -> bool:
        return permission in self.permissions or Permission.ADMIN in self.permissions

    def may_all(self, other: Key) -> bool:
        """Returns whether the key has all permissions of `other`."""
        return Permission.ADMIN in self.permissions or other.permissions <= self.permissions

    def line(self) -> str:
        """Returns the key's line in a file."""
        words = [f"{self.name}:{ALGORITHM}:{self.digest.hex()}"]
        if self.permissions != {Permission.USE}:
            words.append(f"scope={'+'.join(sorted(self.permissions))}")
        for option in ("rate", "burst", "sessions"):
            value = getattr(self, option)
            if value is not None:
                words.append(f"{option}={value:.15g}")
        return " ".join(words)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def make_key(name: str, words: Sequence[str] = ()) -> tuple[str, Key]:
    """Creates a key for `name`. Returns the key's text and its `Key`, whose `line` belongs in the key file. `words` are
    options in the syntax of the file.

    Raises KeysError.
    """
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    return key, _key(name, digest(key.encode()), words)


def of_file(text: str) -> list[Key]:
    """Returns the keys of a file. The message of KeysError names the invalid line. The last line must end in a newline,
    too, because a truncated line could be a valid key with fewer limits.
    """
    if text and not text.endswith("\n"):
        raise KeysError(f"line {len(text.splitlines())}: it does not end in a newline, and may be truncated")
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if (hashed := HASHED.fullmatch(words[0])) is None:
                raise KeysError(f"it must begin with NAME:{ALGORITHM}: and 64 hexadecimal digits in lower case")
            keys.append(_key(hashed[1], bytes.fromhex(hashed[2]), words[1:]))
        except KeysError as error:
            raise KeysError(f"line {number}: {error}") from None
    return _checked(keys)


def of_text(text: str) -> list[Key]:
    """Returns the keys of the environment. The message of KeysError names the position of the invalid key."""
    keys: list[Key] = []
    for number, entry in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        name, _, rest = entry.partition(":")
        key, _, scope = rest.partition(":")
        try:
            if KEY.fullmatch(key) is None:
                rule = "where KEY is 1 to 256 letters, digits and . _ ~ + / - ="
                raise KeysError(f"it must be NAME:KEY or NAME:KEY:SCOPE, {rule}")
            keys.append(_key(name, digest(key.encode()), [f"scope={scope}"] if scope else ()))
        except KeysError as error:
            raise KeysError(f"key {number}: {error}") from None
    return _checked(keys)


def weak(text: str) -> list[str]:
    """Returns the names of the keys from the environment that are too short to be secure."""
    entries = (entry.strip().split(":") for entry in text.split(","))
    return [entry[0] for entry in entries if len(entry) > 1 and len(entry[1]) < WEAK_CHARACTERS]


def _key(name: str, digest: bytes, words: Sequence[str]) -> Key:
    if NAME.fullmatch(name) is None:
        raise KeysError("a name must be 1 to 64 letters, digits and . _ -")
    options: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if option not in ("scope", "rate", "burst", "sessions") or not equals:
            raise KeysError(f"{name} has an unknown option; the options are scope=, rate=, burst= and sessions=")
        if option in options:
            raise KeysError(f"{name} has {option} twice")
        options[option] = value
    rate, burst, sessions = (_number(name, options, option) for option in ("rate", "burst", "sessions"))
    try:
        permissions = frozenset(map(Permission, options.get("scope", Permission.USE).split("+")))
    except ValueError:
        raise KeysError(f"{name} has an unknown scope; the scopes are {', '.join(Permission)}") from None
    if rate is None and burst is not None:
        raise KeysError(f"{name} has a burst, but no rate")
    if sessions is not None and sessions != int(sessions):
        raise KeysError(f"{name} has sessions={options['sessions']}, which is not a whole number")
    return Key(name, digest, permissions, rate, burst, None if sessions is None else int(sessions))


def _number(name: str, options: dict[str, str], option: str) -> float | None:
    """Returns an option's value, which must be above 0. Returns None if the option is absent."""
    value = options.get(option)
    if value is None:
        return None
    if NUMBER.fullmatch(value) is None or float(value) <= 0:
        raise KeysError(f"{name} has a {option} that is not a number above 0")
    return float(value)


def _checked(keys: list[Key]) -> list[Key]:
    """Returns the keys. Raises KeysError if the list is empty or contains a key twice."""
    if not keys:
        raise KeysError("it contains no keys")
    if len({key.digest for key in keys}) < len(keys):
        raise KeysError("it lists a key twice")
    return keys
