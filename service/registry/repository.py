"""The folder of bundles. Lists its models and versions, and detects changed bundles.

A bundle is `NAME` or, to keep several versions of a model, `NAME/VERSION` in that folder. The server does not use a
folder whose name ends in `.withdrawn` (`Repository.withdraw`). If a model has several bundles, the highest version is
used. A bundle is identified by the digest of its manifest, which contains the digests of all other files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wane.models.bundle_checks import MANIFEST, BundleError, manifest_bytes, parse_manifest
from wane.service.errors import LoadFailed, UnknownModel, truncate_repr

Signature = set[tuple[Path, int, int, int]]
"""The files of a model's bundles, each with its path, inode, size in bytes and modification time in nanoseconds."""


WITHDRAWN = ".withdrawn"


class RegistryError(Exception):
    """The folder contains no bundle, a version cannot be withdrawn, or a required model was not loaded. The message is
    for the operator. A server exits after this error."""


@dataclass(frozen=True, slots=True)
class FoundBundle:
    """A bundle as its manifest describes it. `folder` is the bundle's path in the folder of bundles, `NAME` or
    `NAME/VERSION`. For an unreadable bundle, `name` is the first part of `folder`, `version` is empty, and `reason` is
    the error. `history_tokens`: see `Manifest`."""

    path: Path
    folder: str
    name: str
    version: str
    digest: str
    reason: str | None = None
    history_tokens: int = 1


class Repository:
    """The folder of bundles, or the single bundle, that the settings name. Every method reads the disk and blocks."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, Signature] | None = None
        self._handled: dict[str, Signature] = {}

    def paths(self) -> Sequence[Path]:
        """Returns the folder of every bundle. Raises RegistryError if there is no bundle."""
        if (self._root / MANIFEST).is_file():
            return [self._root]
        if not self._root.is_dir():
            raise RegistryError(f"bundles: {self._root} is not a folder")
        paths = {path.parent for path in self._root.glob(f"*/{MANIFEST}")}
        paths |= {path.parent for path in self._root.glob(f"*/*/{MANIFEST}") if path.parents[1] not in paths}
        used = sorted(path for path in paths if not path.name.endswith(WITHDRAWN))
        if not used:
            raise RegistryError(f"bundles: {self._root} contains no bundle (a folder with a {MANIFEST})")
        return used

    def signatures(self) -> dict[str, Signature]:
        """Returns the signature of the bundles of every model, by the model's name. If it changes, a bundle of the
        model was added, changed or deleted. Of the files, only the manifests are read."""
        signatures = defaultdict[str, Signature](set)
        for path in self._present():
            with suppress(OSError):  # the bundle was deleted meanwhile
                statuses = [(file, file.stat()) for file in path.iterdir()]
                signatures[self.look(path).name] |= {
                    (at, status.st_ino, status.st_size, status.st_mtime_ns) for at, status in statuses
                }
        return signatures

    def changed(self) -> Sequence[str]:
        """Returns the names of the models whose bundles have changed since an earlier call returned them, sorted. The
        first call regards the current bundles as loaded. A change is returned when two successive calls have found the
        same files, so that no bundle is loaded while it is being copied. A model without bundles is never returned."""
        before, self._seen = self._seen, self.signatures()
        if before is None:
            self._handled = self._seen
        if self._seen != before:
            return []
        handled, self._handled = self._handled, self._seen
        return sorted(name for name, files in self._seen.items() if files != handled.get(name))

    def list(self) -> list[FoundBundle]:
        """Returns every bundle, sorted by name and version."""
        bundles = [self.look(path) for path in self._present()]
        return sorted(bundles, key=lambda bundle: (bundle.name, int(bundle.version or 0)))

    def find(self, name: str) -> FoundBundle:
        """Returns the latest bundle of a model. Raises UnknownModel if there is none, and LoadFailed if it cannot be
        read or if two different bundles have the latest version."""
        bundles = self.list()
        of_model = [bundle for bundle in bundles if bundle.name == name and bundle.reason is None]
        if not of_model:
            unreadable = next((bundle.reason for bundle in bundles if bundle.name == name), None)
            if unreadable is not None:
                raise LoadFailed(name, unreadable)
            names = ", ".join(sorted({bundle.name for bundle in bundles if bundle.reason is None})) or "none"
            raise UnknownModel(f"there is no bundle of model {truncate_repr(name)}; models with a bundle: {names}")
        last = of_model[-1]
        if len({bundle.digest for bundle in of_model if bundle.version == last.version}) > 1:
            raise LoadFailed(name, f"two different bundles have version {last.version}")
        return last

    def look(self, path: Path) -> FoundBundle:
        """Reads the manifest of a bundle."""
        folder = path.name if path == self._root else path.relative_to(self._root).as_posix()
        try:
            contents = manifest_bytes(path)
            manifest = parse_manifest(path, contents)
        except BundleError as error:
            name, _, _ = folder.partition("/")
            return FoundBundle(path, folder, name, "", "", tell(error, path, folder))
        return FoundBundle(
            path,
            folder,
            manifest.name,
            manifest.version,
            hashlib.sha256(contents).hexdigest(),
            history_tokens=manifest.history_tokens,
        )

    def withdraw(self, name: str) -> tuple[FoundBundle, FoundBundle, str]:
        """Renames the folder of a model's highest version, so that servers use the version before it. Returns the
        withdrawn bundle, the bundle before it, and the folder's new name. Raises RegistryError if there is no version
        before it."""
        of_model = [bundle for bundle in self.list() if bundle.name == name and bundle.reason is None]
        if not of_model:
            raise RegistryError(f"there is no bundle of model {name!r} in {self._root}")
        last, earlier = of_model[-1], [bundle for bundle in of_model if bundle.version != of_model[-1].version]
        if not earlier:
            raise RegistryError(f"model {name!r} has no version before {last.version} in {self._root}")
        if sum(bundle.version == last.version for bundle in of_model) > 1:
            raise RegistryError(f"several bundles of model {name!r} have version {last.version}: remove all but one")
        withdrawn, number = last.path.with_name(last.path.name + WITHDRAWN), 1
        while withdrawn.exists():  # an earlier bundle of this version was withdrawn, too
            number += 1
            withdrawn = last.path.with_name(f"{last.path.name}.{number}{WITHDRAWN}")
        last.path.rename(withdrawn)
        return last, earlier[-1], withdrawn.relative_to(self._root).as_posix()

    def _present(self) -> Sequence[Path]:
        try:
            return self.paths()
        except RegistryError:
            return []


def tell(error: Exception, path: Path, folder: str) -> str:
    """Returns the error's message, with the path of the bundle replaced by its path in the folder of bundles."""
    return str(error).replace(str(path), folder)
