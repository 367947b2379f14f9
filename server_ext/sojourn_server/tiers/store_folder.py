"""Whose folder of blocks it is: claimed by a manifest, held by a lock, and never shared by mistake.

``disk_store`` says what lies in it, and when it is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .full_block import (
    FORMAT_VERSION,
    FileSystem,
    KvIdentity,
    TierError,
    read_file,
    sync_folder,
    write_file,
)

MANIFEST = "manifest.json"
_LOCK = "lock"
_KIND = "sojourn KV store"
"""What a manifest says it is of: other software has files of that name too."""
_MANIFEST_BYTES = 1 << 16
_STORE = re.compile(r"[0-9a-f]{16}")


class StoreInUse(TierError):
    """One process writes a store, and that is another one, or another part of this one."""


class Difference(NamedTuple):
    """A field of the manifest that is not as it should be."""

    field: str
    found: Any
    expected: Any


class ForeignStore(TierError):
    """A store for something else is where ours would be, or is the only one in the root."""

    def __init__(self, path: Path, differences: Sequence[Difference], advice: str) -> None:
        fields = "; ".join(f"{d.field}: found {d.found!r}, expected {d.expected!r}" for d in differences)
        super().__init__(f"the KV store {path} is for something else ({fields}). {advice}")
        self.path = path
        self.differences = tuple(differences)


class StoreLock:
    """One opener at a time. The system lets go of it when the process dies, however it dies."""

    # POSIX locks and not flock's: these belong to the process, so a child that it forked and that outlives
    # it does not keep the store locked. Within one process they exclude nobody; that is what _held is for.
    _guard = threading.Lock()
    _held: dict[Path, int] = {}  # noqa: RUF012
    """Store → the process that holds it: a forked child inherits the table, but not the locks."""

    def __init__(self, store: Path) -> None:
        """Raises ``StoreInUse`` and ``OSError``."""
        self._store = store
        with self._guard:
            if self._held.get(store) == os.getpid():
                raise StoreInUse(_in_use(store, "this process itself"))
            self._fd = os.open(store / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._take()
            except BaseException:
                os.close(self._fd)
                raise
            self._held[store] = os.getpid()

    def release(self) -> None:
        """Let go; nothing happens the second time. The file stays: to remove it would race with an opener."""
        with self._guard:
            if self._held.get(self._store) == os.getpid() and self._fd >= 0:
                del self._held[self._store]
                os.close(self._fd)
                self._fd = -1

    def _take(self) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            holder = os.read(self._fd, 20).decode("ascii", "replace").strip()
            raise StoreInUse(_in_use(self._store, f"process {holder or 'unknown'}")) from error
        with contextlib.suppress(OSError):  # on a full disk the next one refused learns no number
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"{os.getpid()}\n".encode())


def _in_use(store: Path, holder: str) -> str:
    return (
        f"the KV store {store} is in use by {holder}. One process writes a store: "
        "give each engine a directory of its own, or end the other one first"
    )


def refuse_others(files: FileSystem, path: Path, identity: KvIdentity) -> None:
    """Raise ``ForeignStore`` if the root has stores, but none for ``identity`` or another rank of it."""
    try:
        folders = sorted(entry.name for entry in files.scan(path.parent) if entry.is_folder)
    except FileNotFoundError:
        return
    others: list[tuple[list[Difference], Path]] = []
    for name in filter(_STORE.fullmatch, folders):
        try:
            differences = _differences(files, path.parent / name, identity)
        except OSError as error:  # another user's, say
            differences = [Difference(MANIFEST, error.strerror, "one that can be read")]
        if differences is None:
            continue
        if name == path.name or all(difference.field == "tp_rank" for difference in differences):
            return  # if the one of our name is not ours, claim_folder will say so
        others.append((differences, path.parent / name))
    if others:
        differences, nearest = min(others, key=lambda other: len(other[0]))
        advice = "Name another directory, or delete that store if its blocks are no longer wanted."
        raise ForeignStore(nearest, differences, advice)


def claim_folder(files: FileSystem, path: Path, identity: KvIdentity) -> None:
    """Check the manifest, or give an empty folder one. Raises ``ForeignStore`` and ``OSError``."""
    advice = "Name another directory, or delete this one if what it holds is no longer wanted."
    partial = path / f"{MANIFEST}.partial"
    differences = _differences(files, path, identity)
    if differences:
        raise ForeignStore(path, differences, advice)
    names = {entry.name for entry in files.scan(path)} - {_LOCK, partial.name}
    if differences is None:
        if names:
            raise ForeignStore(path, [Difference(MANIFEST, "none", "one beside the blocks")], advice)
        content = json.dumps(_manifest(identity), indent=2).encode() + b"\n"
        try:
            write_file(files, partial, [memoryview(content)], fsync=True)
            files.replace(partial, path / MANIFEST)
        except BaseException:
            with contextlib.suppress(OSError):
                files.unlink(partial)
            raise
        sync_folder(files, path)


def _differences(files: FileSystem, path: Path, identity: KvIdentity) -> list[Difference] | None:
    """Where the manifest in ``path`` differs from that of ``identity``; ``None`` where there is none.

    Raises ``OSError``.
    """
    expected = _manifest(identity)
    try:
        content = read_file(files, path / MANIFEST, _MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        return [Difference(MANIFEST, content[:40].decode("utf-8", "replace"), f"that of a {_KIND}")]
    fields = [*expected, *sorted(found.keys() - expected.keys())]
    return [
        Difference(name, found.get(name), expected.get(name))
        for name in fields
        if found.get(name) != expected.get(name)
    ]


def _manifest(identity: KvIdentity) -> dict[str, Any]:
    return {"kind": _KIND, "format": FORMAT_VERSION, **asdict(identity)}
