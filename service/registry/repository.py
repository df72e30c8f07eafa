"""The folder of bundles: which models it holds, at which version, and which bundles have changed.

Of several bundles of one model the highest version counts. A bundle is identified by the digest of its manifest, which
holds the digests of all its other files.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wane.models.bundle_checks import MANIFEST, BundleError, read_manifest
from wane.service.errors import LoadFailed, UnknownModel, WaneError, truncate_repr

Signature = frozenset[tuple[str, int, int, int]]
"""Of a bundle, every file: its name, its inode, its size in bytes, and when it was written, in nanoseconds."""


class RepositoryError(Exception):
    """The folder holds nothing that can be served; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class FoundBundle:
    """A bundle by its manifest. One that cannot be read has its folder's name, no version, and a `reason`.
    `max_window`: tokens."""

    path: Path
    name: str
    version: str
    digest: str
    reason: str | None = None
    max_window: int = 1


class Repository:
    """The folder, or one bundle, that the settings name. Every method reads the disk, and blocks."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def paths(self) -> Sequence[Path]:
        """Every bundle's folder. Raises RepositoryError if there is none."""
        if (self._root / MANIFEST).is_file():
            return [self._root]
        if not self._root.is_dir():
            raise RepositoryError(f"bundles is {self._root}, which is no folder")
        paths = sorted(path.parent for path in self._root.glob(f"*/{MANIFEST}"))
        if not paths:
            raise RepositoryError(f"bundles is {self._root}, which holds no bundle (a folder with a {MANIFEST})")
        return paths

    def signatures(self) -> dict[Path, Signature]:
        """What tells, without reading the files, whether bundles have changed."""
        found: dict[Path, Signature] = {}
        for path in self._present():
            try:
                statuses = [(file.name, file.stat()) for file in path.iterdir()]
            except OSError:  # gone again
                continue
            found[path] = frozenset((name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in statuses)
        return found

    def list(self) -> list[FoundBundle]:
        """Every bundle, by name and version."""
        found = [look(path) for path in self._present()]
        return sorted(found, key=lambda one: (one.name, int(one.version or 0)))

    def find(self, name: str) -> FoundBundle:
        """The bundle of a model. Raises UnknownModel; LoadFailed if it cannot be read, or is not the only one."""
        found = self.list()
        of_model = [one for one in found if one.name == name and one.reason is None]
        if not of_model:
            unreadable = next((one.reason for one in found if one.name == name), None)
            if unreadable is not None:
                raise LoadFailed(name, unreadable)
            names = ", ".join(sorted({one.name for one in found if one.reason is None})) or "none"
            raise UnknownModel(f"there is no bundle of model {truncate_repr(name)}; the bundles hold {names}")
        last = of_model[-1]
        if len({one.digest for one in of_model if one.version == last.version}) > 1:
            raise LoadFailed(name, f"two bundles that differ hold version {last.version} of it")
        return last

    def _present(self) -> Sequence[Path]:
        try:
            return self.paths()
        except RepositoryError:
            return []


def look(path: Path) -> FoundBundle:
    """Reads the manifest of a bundle."""
    try:
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
        manifest = read_manifest(path)
    except (BundleError, OSError) as error:
        return FoundBundle(path, path.name, "", "", tell(error, path))
    return FoundBundle(path, manifest.name, manifest.version, digest, max_window=manifest.max_window)


def tell(error: Exception, path: Path) -> str:
    """The message of a bundle's failure, in which only the bundle's own folder is named."""
    return str(error).replace(str(path), path.name)


logger = logging.getLogger("wane.engine")


class RepositoryPoller:
    """Loads bundles that change in the folder.

    A bundle is loaded once it has changed and then stayed as it is from one look to the next, so that one which is
    still being copied is left alone. One that could not be loaded is tried again when it changes again. A bundle that
    is gone changes nothing: its model is served until it is unloaded.
    """

    def __init__(self, repository: Repository, load: Callable[[str], Awaitable[object]]) -> None:
        """Takes what the folder holds now as known. `load` takes the name of a model. Blocks."""
        self._repository = repository
        self._load = load
        self._known = self._seen = repository.signatures()

    async def run(self, every_s: float) -> None:
        """Looks every `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except Exception:  # a disk that is away comes back, and so does the watch
                logger.exception("the bundles' folder could not be looked at")

    async def look(self) -> None:
        """Loads what has changed before the last look, and not since."""
        before, self._seen = self._seen, await asyncio.to_thread(self._repository.signatures)
        settled: dict[Path, Signature] = {path: one for path, one in self._seen.items() if before.get(path) == one}
        changed = [path for path, one in settled.items() if self._known.get(path) != one]
        self._known = {path: one for path, one in self._known.items() if path in self._seen} | settled
        for path in changed:
            found = await asyncio.to_thread(look, path)
            try:
                await self._load(found.name)
            except WaneError as error:
                logger.warning("%s has changed, and was not loaded: %s", path.name, error.message)
