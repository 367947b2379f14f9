"""File operations of a store, and the check that a store's folder is this user's alone.

KV reveals prompts and determines a model's answers, so a store belongs to one user. Its folder is made with
mode 0700 and checked once, when it is opened (``check_private``). A user who can rename folders in the
store's root can replace the store later. So choose a root that others cannot write, or a sticky one such as
``/tmp``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class StoredFile(NamedTuple):
    mtime_ns: int
    size: int
    path: str


class FileSystem:
    """All file operations of a store; tests replace them to inject faults. Only the owner may access new
    files and folders. Methods raise ``OSError``."""

    def write(self, path: Path, content: Sequence[memoryview]) -> None:
        """Write a new file. After an error, a partly written file may remain."""
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            for part in content:
                file.write(part)

    def read(self, path: Path, buffers: Sequence[memoryview]) -> bool:
        """Fill ``buffers`` with a file. Returns false if the file has another length."""
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != sum(part.nbytes for part in buffers):
                return False
            return all(file.readinto(part) == part.nbytes for part in buffers)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing an existing file."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> None:
        """Make a folder and its missing parents. No error if the folder exists."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns))

    def stat(self, path: Path) -> tuple[int, int]:
        """Return (size in bytes, modification time in nanoseconds)."""
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns

    def scan(self, path: Path) -> list[StoredFile]:
        """Return the files of all folders in ``path``; no links."""
        found = []
        with os.scandir(path) as folders:
            for folder in [each.path for each in folders if each.is_dir(follow_symlinks=False)]:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:  # deleted meanwhile
                            continue
                        if stat.S_ISREG(status.st_mode):
                            found.append(StoredFile(status.st_mtime_ns, status.st_size, entry.path))
        return found


def check_private(store: Path) -> None:
    """Raise ``OSError`` if another user (except root) can change what is in the folder ``store``."""
    me, status = os.geteuid(), store.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != me or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "a folder"
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(
            errno.EPERM,
            f"{store} is {kind} of user {status.st_uid} with mode {mode:04o}; expected a folder of "
            f"user {me}, who runs this, that only its owner can write, because others can change the KV: "
            f"name another directory, or delete what others wrote and run chmod go-w {store}",
            str(store),
        )
