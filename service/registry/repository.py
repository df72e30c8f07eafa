"""The folder of bundles. Lists its models and versions, and detects changed bundles.

If a model has several bundles, the highest version is used. A bundle is identified by the digest of its manifest. The
manifest contains the digests of all other files.
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
"""The files of a bundle, each with its name, inode, size in bytes and modification time in nanoseconds."""


class RepositoryError(Exception):
    """The folder contains no bundle. The message is for the operator."""


@dataclass(frozen=True, slots=True)
class FoundBundle:
    """A bundle as its manifest describes it. For an unreadable bundle `name` is the folder's name, `version` is empty,
    and `reason` is the error. `history_tokens`: see `Manifest`."""

    path: Path
    name: str
    version: str
    digest: str
    reason: str | None = None
    history_tokens: int = 1


class Repository:
    """The folder of bundles, or the single bundle, that the settings name. Every method reads the disk and blocks."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def paths(self) -> Sequence[Path]:
        """Returns the folder of every bundle. Raises RepositoryError if there is no bundle."""
        if (self._root / MANIFEST).is_file():
            return [self._root]
        if not self._root.is_dir():
            raise RepositoryError(f"bundles: {self._root} is not a folder")
        paths = sorted(path.parent for path in self._root.glob(f"*/{MANIFEST}"))
        if not paths:
            raise RepositoryError(f"bundles: {self._root} contains no bundle (a folder with a {MANIFEST})")
        return paths

    def signatures(self) -> dict[Path, Signature]:
        """Returns the signature of every bundle. A changed signature shows that the bundle has changed, without reading
        its files."""
        found: dict[Path, Signature] = {}
        for path in self._present():
            try:
                statuses = [(file.name, file.stat()) for file in path.iterdir()]
            except OSError:  # the bundle was deleted meanwhile
                continue
            found[path] = frozenset((name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in statuses)
        return found

    def list(self) -> list[FoundBundle]:
        """Returns every bundle, sorted by name and version."""
        found = [look(path) for path in self._present()]
        return sorted(found, key=lambda one: (one.name, int(one.version or 0)))

    def find(self, name: str) -> FoundBundle:
        """Returns the latest bundle of a model. Raises UnknownModel if there is none, and LoadFailed if it cannot be
        read or if two different bundles have the latest version."""
        found = self.list()
        of_model = [one for one in found if one.name == name and one.reason is None]
        if not of_model:
            unreadable = next((one.reason for one in found if one.name == name), None)
            if unreadable is not None:
                raise LoadFailed(name, unreadable)
            names = ", ".join(sorted({one.name for one in found if one.reason is None})) or "none"
            raise UnknownModel(f"there is no bundle of model {truncate_repr(name)}; models with a bundle: {names}")
        last = of_model[-1]
        if len({one.digest for one in of_model if one.version == last.version}) > 1:
            raise LoadFailed(name, f"two different bundles have version {last.version}")
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
    return FoundBundle(path, manifest.name, manifest.version, digest, history_tokens=manifest.history_tokens)


def tell(error: Exception, path: Path) -> str:
    """Returns the error's message, with the path of the bundle replaced by the name of the bundle's folder."""
    return str(error).replace(str(path), path.name)


logger = logging.getLogger("wane.engine")


class RepositoryPoller:
    """Polls the folder of bundles, and loads bundles that have changed.

    A changed bundle is loaded once two successive polls find the same files, so that a bundle is not loaded while it is
    being copied. A bundle that could not be loaded is retried when it changes again. If a bundle is deleted, its model
    is served until it is unloaded.
    """

    def __init__(self, repository: Repository, load: Callable[[str], Awaitable[object]]) -> None:
        """Regards the current bundles as loaded. `load` is called with the name of a model whose bundle has changed.
        Blocks."""
        self._repository = repository
        self._load = load
        self._known = self._seen = repository.signatures()

    async def run(self, every_s: float) -> None:
        """Polls every `every_s` seconds until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except Exception:  # the disk may be unavailable for some time, so polling continues
                logger.exception("the folder of bundles could not be read")

    async def look(self) -> None:
        """Loads the bundles that changed before the previous poll and have not changed since."""
        before, self._seen = self._seen, await asyncio.to_thread(self._repository.signatures)
        settled: dict[Path, Signature] = {path: one for path, one in self._seen.items() if before.get(path) == one}
        changed = [path for path, one in settled.items() if self._known.get(path) != one]
        self._known = {path: one for path, one in self._known.items() if path in self._seen} | settled
        for path in changed:
            found = await asyncio.to_thread(look, path)
            try:
                await self._load(found.name)
            except WaneError as error:
                logger.warning("bundle %s has changed, but was not loaded: %s", path.name, error.message)
