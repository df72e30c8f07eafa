"""Loads API keys from the environment, a file, or both. Every request is accepted if there are no keys.

The file is checked once a second. A changed file is read when two consecutive checks have found the same inode, size
and modification time. This avoids reading a file that is still being written. If the file cannot be read, the keys stay
unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from wane.service.auth.keyring import Keyring, MakeBucket, own_bucket
from wane.service.auth.keys import Key, KeysError, of_file, of_text, weak
from wane.service.settings import Settings

logger = logging.getLogger("wane.keys")

LOOK_S = 1.0

Signature = tuple[int, int, int]
"""A file's inode, size in bytes, and modification time in nanoseconds."""


class KeySource:
    """Reads the API keys at startup, and reloads the key file when it changes. `keyring` is None if the server has no
    keys."""

    def __init__(self, settings: Settings, make_bucket: MakeBucket = own_bucket) -> None:
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

    @property
    def has_file(self) -> bool:
        """True if the settings name a key file."""
        return self._path is not None

    def poller(self) -> asyncio.Task[None] | None:
        """Starts a task that polls the key file, and returns it. The caller must cancel the task. Returns None if there
        is no key file."""
        return asyncio.create_task(self._poll()) if self.has_file else None

    async def _poll(self) -> None:
        while True:
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
