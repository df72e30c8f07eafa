"""Where keys come from: the environment, a file, or both. Without either, every request is accepted.

The file is read at start, and again whenever it has changed. A file that cannot be read leaves the keys as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from wane.service.auth.keyring import Keyring
from wane.service.auth.keys import Key, KeysError, of_file, of_text, weak
from wane.service.settings import Settings

logger = logging.getLogger("wane.keys")

LOOK_S = 1.0

Signature = tuple[int, int, int]
"""Of a file: its inode, its size in bytes, and when it was written, in nanoseconds."""


class KeyFile:
    """Gives a keyring the keys of a file, beside others that stay.

    The file is looked at once a second, and read when it has changed and then stayed as it is from one look to the
    next, so that one which is still being written is left alone; `reload` reads it at once.
    """

    def __init__(self, path: Path, others: Sequence[Key] = ()) -> None:
        self._path = path
        self._others = others
        self._seen: Signature | None = None
        self._known: Signature | None = None

    def read(self) -> list[Key]:
        """The keys of the file, and the others. Raises KeysError naming the file and what is wrong with it."""
        try:
            self._seen = self._known = self._signature()
            keys = of_file(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise KeysError(f"{self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise KeysError(f"{self._path} is no text") from None
        except KeysError as error:
            raise KeysError(f"{self._path}, {error}") from None
        digests = {key.digest for key in keys}
        return keys + [key for key in self._others if key.digest not in digests]

    async def run(self, keyring: Keyring) -> None:
        """Looks again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(keyring)

    def look(self, keyring: Keyring) -> None:
        """Reads the file if it has changed, and has settled since the last look. It is small, and read in no time."""
        try:
            now = self._signature()
        except OSError:
            now = None  # it is being put in its place: told of once it has settled
        settled, self._seen = now == self._seen, now
        if settled and now != self._known:
            self._known = now
            self.reload(keyring)

    def reload(self, keyring: Keyring) -> None:
        """Gives the keyring what the file holds now, if that can be read."""
        try:
            keys = self.read()
        except KeysError as error:
            logger.warning("the keys stay as they are: %s", error)
            return
        keyring.replace(keys)
        logger.info("%d keys were read from %s", len(keys), self._path)

    def _signature(self) -> Signature:
        status = self._path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns


class KeySource:
    """Reads the keys at start, and goes on reading those of a file."""

    def __init__(self, settings: Settings) -> None:
        """Raises KeysError for a value that is no list of keys, or a file that cannot be read."""
        keys: list[Key] = []
        if settings.api_keys is not None:
            text = settings.api_keys.get_secret_value()
            try:
                keys = of_text(text)
            except KeysError as error:
                raise KeysError(f"WANE_API_KEYS: {error}") from None
            for name in weak(text):
                logger.warning("the key of %s is short enough to be found by trying; `wane key` makes one", name)
        self._file = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file, keys)
        if self._file is not None:
            keys = self._file.read()
        self.keyring = Keyring(keys) if keys else None

    @property
    def has_file(self) -> bool:
        """Whether there is a file to read."""
        return self._file is not None

    def poller(self) -> asyncio.Task[None] | None:
        """The task that looks at the file now and then, if there is one; to be cancelled."""
        if self._file is None or self.keyring is None:
            return None
        return asyncio.create_task(self._file.run(self.keyring))

    def reload(self) -> None:
        """Reads the file now, if there is one. A broken one leaves the keys as they are."""
        if self._file is not None and self.keyring is not None:
            self._file.reload(self.keyring)
