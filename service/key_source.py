"""The keys that the settings name: of the environment, of a file, or of both; or none, and then everybody may ask."""

from __future__ import annotations

import asyncio
import logging

from service.key_file import KeyFile
from service.keyring import Keyring
from service.keys import Key, of_text, weak
from service.settings import Settings

logger = logging.getLogger("wane.keys")


class KeySource:
    """Reads the keys at start, and goes on reading those of a file."""

    def __init__(self, settings: Settings) -> None:
        """Raises KeysError for a file that cannot be read, or holds what are no keys."""
        keys: list[Key] = []
        if settings.api_keys is not None:
            text = settings.api_keys.get_secret_value()
            keys = of_text(text)
            for name in weak(text):
                logger.warning(
                    "the key of %s is short enough to be found by trying; `python -m service key` makes one", name
                )
        self._file = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file, keys)
        if self._file is not None:
            keys = self._file.read()
        self.keyring = Keyring(keys) if keys else None

    @property
    def has_file(self) -> bool:
        """Whether there is a file to read."""
        return self._file is not None

    def watch(self) -> asyncio.Task[None] | None:
        """The task that looks at the file now and then, if there is one; to be cancelled."""
        if self._file is None or self.keyring is None:
            return None
        return asyncio.create_task(self._file.run(self.keyring))

    def reload(self) -> None:
        """Reads the file now, if there is one. A broken one leaves the keys as they are."""
        if self._file is not None and self.keyring is not None:
            self._file.reload(self.keyring)
