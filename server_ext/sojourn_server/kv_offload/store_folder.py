"""The folder of a ``DiskStore``: its manifest, its lock, and the search for such folders.

The manifest describes the folder's content. The lock names the process that has the store open. The docstring
of ``disk_store`` describes the layout, and says when a folder is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from .block_file import FORMAT_VERSION, KvIdentity, OffloadError, read_file, sync_folder, write_file
from .file_system import FileSystem, check_private

MANIFEST = "manifest.json"
_LOCK = "lock"
_KIND = "sojourn KV store"
"""Marks a manifest as sojourn's, because other software uses the same file name."""
_OF_THIS_FORMAT = {"kind": _KIND, "format": FORMAT_VERSION}
_FIELDS = {*_OF_THIS_FORMAT, *(field.name for field in fields(KvIdentity))}
_MANIFEST_BYTES = 1 << 16
_DIGITS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STORE = re.compile(rf"[0-9a-f]{{{_DIGITS}}}(-{_NAME.pattern})?")
_MAX_LISTED = 5
"""Maximum number of differences that an error lists."""
_THIS_PROCESS = "this process itself"


class StoreInUse(OffloadError):
    """Raised if the store is already open, in this process or another; ``holder`` describes the process."""

    def __init__(self, store: Path, holder: str) -> None:
        self.what = f"the KV store {store} is in use by {holder}"
        another = "a name of its own" if store_name(store) is None else "another name"
        self.advice = (
            f"One engine at a time writes a store. Give this one {another} (--kv-disk-name): then it writes "
            "beside the others there and reads theirs too. Or give it a directory of its own, another than "
            f"{store.parent}, or stop the engine that has it"
        )
        if holder != _THIS_PROCESS:
            # The id is a worker's, which the operator has never seen.
            self.advice += (
                f" ({holder} is one of its workers: `ps -ef --forest` shows which command that is, unless it "
                "runs in another container)"
            )
        super().__init__(f"{self.what}. {self.advice}")
        self.path = store
        self.holder = holder


class ManifestMismatch(NamedTuple):
    """A manifest field with an unexpected value."""

    field: str
    found: Any
    expected: Any


class IncompatibleStore(OffloadError):
    """Raised if a store, or every store in the root folder, is for another ``KvIdentity`` or format."""

    def __init__(self, path: Path, differences: Sequence[ManifestMismatch], advice: str) -> None:
        listed = "; ".join(
            f"{d.field:.100}: found {d.found!r:.100}, expected {d.expected!r:.100}"
            for d in differences[:_MAX_LISTED]
        )
        self.what = f"the KV store {path} is for another model or configuration ({listed})"
        self.advice = advice
        super().__init__(f"{self.what}. {advice}")
        self.path = path
        self.differences = tuple(differences)


class StoreLock:
    """The lock that lets only one process have a store open. The operating system releases it when the
    process ends for any reason."""

    # A POSIX lock, not one of ``flock``: it belongs to the process, so a forked child that outlives the
    # process does not keep it. It does not exclude threads of the same process, so ``_held`` does.
    _guard = threading.Lock()
    _held: dict[Path, int] = {}  # noqa: RUF012

    def __init__(self, store: Path) -> None:
        """Take the lock. Raises ``StoreInUse`` and ``OSError``."""
        self._store = store
        with self._guard:
            if self._held.get(store) == os.getpid():
                raise StoreInUse(store, _THIS_PROCESS)
            self._fd, holder = _open_lock(store, os.O_CREAT)
            if holder is not None:
                os.close(self._fd)
                raise StoreInUse(store, holder)
            with contextlib.suppress(OSError):  # if the disk is full, later messages lack the id
                os.ftruncate(self._fd, 0)
                os.write(self._fd, f"{os.getpid()}\n".encode())
            self._held[store] = os.getpid()

    def release(self) -> None:
        """Release the lock. Idempotent. The lock file stays, because removing it would race with another
        process that opens the store."""
        with self._guard:
            if self._held.get(self._store) == os.getpid() and self._fd >= 0:
                del self._held[self._store]
                os.close(self._fd)
                self._fd = -1

    @classmethod
    def holder(cls, store: Path) -> str | None:
        """Return a description of the process that has the store open; ``None`` if the store is not open.
        Takes the lock for an instant. Raises ``OSError``."""
        with cls._guard:
            # Closing the lock's file here would release our own lock.
            if cls._held.get(store) == os.getpid():
                return _THIS_PROCESS
            with contextlib.suppress(FileNotFoundError):
                fd, holder = _open_lock(store)
                os.close(fd)
                return holder
            return None


def _open_lock(store: Path, flags: int = 0) -> tuple[int, str | None]:
    """Open a store's lock file and try to take the lock. Returns the file's descriptor, and a description of
    the process that has the lock; ``None`` if this process has it now."""
    fd = os.open(store / _LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    for wait_s in (0.1, 0.0):  # twice: another start's check has the lock for an instant
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd, None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise
        time.sleep(wait_s)
    # The process's id in its container, if it runs in one.
    return fd, f"process {os.pread(fd, 20, 0).decode('ascii', 'replace').strip() or 'unknown'}"


def is_store_name(name: str) -> bool:
    """Return whether a store may have this name: 1 to 64 letters, digits, ``.``, ``_`` and ``-``, beginning
    with a letter or digit."""
    return _NAME.fullmatch(name) is not None


def folder_name(identity: KvIdentity, name: str | None) -> str:
    """Return the name of a store's folder. ``name``: the store's name; ``None`` if it has none."""
    digits = identity.digest().hex()[:_DIGITS]
    return digits if name is None else f"{digits}-{name}"


def store_name(store: Path) -> str | None:
    """Return the store's name, taken from the name of its folder; ``None`` if the store has no name."""
    return store.name[_DIGITS + 1 :] or None


def check_stores(root: Path, known: Mapping[str, Any], weights: str | None, name: str | None = None) -> None:
    """Check that a starting engine will be able to open its store in ``root``. Changes no file.

    ``root``: a path without symbolic links. ``known``: known fields of the engine's ``KvIdentity``.
    ``weights``: the beginning of the identity's field ``model``, up to a space; ``None`` if unknown.
    ``name``: name of the store that the engine will write; ``None`` if it has none.

    Raises the errors that the engine itself would raise later: ``IncompatibleStore`` if there are stores but
    none matches; ``StoreInUse`` if all matching stores named ``name`` are open; and ``OSError``.
    """
    found = matching_stores(FileSystem(), root, known, weights)
    # Raise only if all these stores are open. A store that is not open may be the engine's own, because only
    # a part of the engine's identity is known.
    holders = {store: StoreLock.holder(store) for store in found if store_name(store) == name}
    for path, holder in holders.items():
        if holder is not None and all(holders.values()):
            raise StoreInUse(path, holder)


def matching_stores(
    files: FileSystem,
    root: Path,
    known: Mapping[str, Any],
    weights: str | None = None,
    *,
    beginning: str = "",
) -> list[Path]:
    """Return the stores in ``root`` whose manifests have the fields ``known``, and weights that begin with
    ``weights`` and a space. Only folders with a name that starts with ``beginning`` are considered. The list
    is empty if there is no store or no root. Raises ``IncompatibleStore`` if there are stores but none
    matches, and ``OSError``."""
    others: list[tuple[list[ManifestMismatch], Path]] = []
    found: list[Path] = []
    try:
        names = sorted(entry.name for entry in files.scan(root) if entry.is_folder)
    except FileNotFoundError:
        return []
    for store in (root / name for name in names if _STORE.fullmatch(name) and name.startswith(beginning)):
        manifest: dict[str, Any] | ManifestMismatch | None
        try:
            check_private(store)
            manifest = _read_manifest(files, store)
        except OSError as error:  # for example, another user's
            manifest = ManifestMismatch(MANIFEST, error.strerror, "one that can be read")
        if manifest is None:
            continue
        differences = _manifest_mismatches(manifest, {**_OF_THIS_FORMAT, **known})
        if isinstance(manifest, dict) and weights is not None:
            model = manifest.get("model")
            if not str(model).startswith(f"{weights} "):
                differences.append(ManifestMismatch("model", model, f"{weights} …"))
        if differences:
            others.append((differences, store))
        else:
            found.append(store)
    if others and not found:
        differences, store = min(others, key=lambda other: len(other[0]))
        advice = "Name another directory, or delete that store if its blocks are no longer wanted."
        raise IncompatibleStore(store, differences, advice)
    return found


def claim_folder(files: FileSystem, path: Path, identity: KvIdentity) -> None:
    """Check that the manifest in ``path`` is for ``identity``. In an empty folder, write this manifest.
    Raises ``IncompatibleStore`` for another manifest, or for other files without a manifest. Raises
    ``OSError``."""
    advice = "Name another directory, or delete this one if what it holds is no longer wanted."
    manifest = _read_manifest(files, path)
    if manifest is not None:
        if differences := _manifest_mismatches(manifest, _manifest(identity)):
            raise IncompatibleStore(path, differences, advice)
        return
    partial = path / f"{MANIFEST}.partial"
    if {entry.name for entry in files.scan(path)} - {_LOCK, partial.name}:
        raise IncompatibleStore(path, [ManifestMismatch(MANIFEST, "none", "one beside the blocks")], advice)
    content = json.dumps(_manifest(identity), indent=2).encode() + b"\n"
    try:
        write_file(files, partial, [memoryview(content)], fsync=True)
        files.replace(partial, path / MANIFEST)
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(partial)
        raise
    sync_folder(files, path)


def _read_manifest(files: FileSystem, path: Path) -> dict[str, Any] | ManifestMismatch | None:
    """Return the manifest in ``path``: ``None`` if there is none, and a ``ManifestMismatch`` if it is not
    sojourn's. Raises ``OSError``."""
    try:
        content = read_file(files, path / MANIFEST, _MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        return ManifestMismatch(MANIFEST, content[:40].decode("utf-8", "replace"), f"that of a {_KIND}")
    return found


def _manifest_mismatches(
    manifest: dict[str, Any] | ManifestMismatch, expected: Mapping[str, Any]
) -> list[ManifestMismatch]:
    """Return the fields of a manifest that differ from ``expected``, and the fields with unknown names."""
    if isinstance(manifest, ManifestMismatch):
        return [manifest]
    return [
        ManifestMismatch(name, manifest.get(name), expected.get(name))
        for name in (*expected, *sorted(manifest.keys() - _FIELDS))
        if manifest.get(name) != expected.get(name)
    ]


def _manifest(identity: KvIdentity) -> dict[str, Any]:
    return {**_OF_THIS_FORMAT, **asdict(identity)}
