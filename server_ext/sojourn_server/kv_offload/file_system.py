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


class FileEntry(NamedTuple):
    """One entry of a folder. For a symbolic link, ``is_file`` and ``is_folder`` are both false."""

    name: str
    is_file: bool
    is_folder: bool
    size: int
    mtime_ns: int


class FileSystem:
    """All file operations of a store; tests replace them to inject faults. Only the owner may access new
    files and folders. Methods raise ``OSError``."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Read into ``buffers`` from the current position. Returns the number of bytes read: 0 at the end of
        the file, otherwise possibly less than the buffers' size."""
        return os.readv(fd, buffers)

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Write ``buffers``. Returns the number of bytes written, which may be less than their size."""
        return os.writev(fd, buffers)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing an existing file."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path, *, parents: bool) -> None:
        """Make a folder; ``parents``: also its missing parents. No error if the folder exists."""
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def stat(self, path: Path) -> tuple[int, int]:
        """Return (size in bytes, modification time in nanoseconds)."""
        status = os.lstat(path)
        return status.st_size, status.st_mtime_ns

    def scan(self, path: Path) -> list[FileEntry]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                is_file, is_folder = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
                found.append(FileEntry(entry.name, is_file, is_folder, status.st_size, status.st_mtime_ns))
        return found


def check_private(store: Path) -> None:
    """Raise ``OSError`` if another user (except root) can change what is in the folder ``store``."""
    me, status = os.geteuid(), store.lstat()
    if stat.S_ISLNK(status.st_mode):
        why = (
            f"{store} is a symbolic link; expected none in a store, because it leads reads and writes "
            "elsewhere: find out who made it, and remove it"
        )
    elif status.st_uid != me:
        why = (
            f"the folder {store} belongs to user {status.st_uid}; expected one of user {me}, who runs this, "
            "because its owner can change the KV in it: name another directory, or run as its owner"
        )
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = (
            f"the folder {store} has mode {stat.S_IMODE(status.st_mode):04o}; expected one that only its "
            "owner can write, because others can change the KV in it: name another directory, or delete what "
            f"others wrote in it and run chmod go-w {store}"
        )
    else:
        return
    raise PermissionError(errno.EPERM, why, str(store))
