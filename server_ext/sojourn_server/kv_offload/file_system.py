"""File operations of a store. They follow no symbolic links and use only folders private to this user.

Below a store's root, each folder is opened by name in its parent, with ``O_NOFOLLOW``, and each file in its
folder. So a store follows no link, even if another user replaces a folder with a link between two calls. New
files are created with ``O_EXCL``. KV determines a model's answers, so every folder below the root must belong
to this user and be writable by this user only. ``confine(private=False)`` switches the check of owners off.

The root may be a folder such as ``/tmp`` or a volume that the machine's administrator made. Other users may
create and rename entries in it, so everything below the root is checked on each access. A root that belongs
to another user (except user 0) is refused if other users may rename this user's folders in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags for opening any file. ``O_NONBLOCK`` has no effect on regular files. If a pipe is in the file's
place, the flag keeps the call from hanging."""
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class FileEntry(NamedTuple):
    """One entry of a folder. For a symbolic link, ``is_file`` and ``is_folder`` are both false."""

    name: str
    is_file: bool
    is_folder: bool
    size: int
    """Size in bytes; 0 if the entry is not a file."""
    mtime_ns: int


class FileSystem(Protocol):
    """All file operations of a store; tests replace it to inject faults. Methods raise ``OSError``."""

    def confine(self, root: Path, *, private: bool = True) -> None:
        """From now on, follow no symbolic links below ``root``, which must be a path without links itself.
        ``private``: also refuse folders that another user owns or can write to."""
        ...

    def open(self, path: Path, flags: int) -> int: ...
    def close(self, fd: int) -> None: ...
    def size(self, fd: int) -> int: ...
    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Read into ``buffers`` from the current position. Returns the number of bytes read: 0 at the end of
        the file, otherwise possibly less than the buffers' size."""
        ...

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Write ``buffers``. Returns the number of bytes written, which may be less than their size."""
        ...

    def fsync(self, fd: int) -> None: ...
    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target`` in the same folder, replacing an existing file."""
        ...

    def unlink(self, path: Path) -> None: ...
    def mkdir(self, path: Path, *, parents: bool) -> None:
        """Make a folder; ``parents``: also its missing parents. No error if the folder exists."""
        ...

    def set_mtime(self, path: Path, mtime_ns: int) -> None: ...
    def scan(self, path: Path) -> list[FileEntry]: ...


class LocalFileSystem:
    """The local file system. KV reveals prompts, so only the owner may access new files and stores."""

    def __init__(self, root: Path | None = None) -> None:
        """``root``: path without symbolic links. Below it, no symbolic link is followed. Without a root, only
        the last part of a file's path is checked for a link."""
        self._root = root
        self._private = True

    def confine(self, root: Path, *, private: bool = True) -> None:
        self._root = root
        self._private = private

    def open(self, path: Path, flags: int) -> int:
        with self._folder(path.parent) as folder:
            try:
                return os.open(path.name, flags | _FILE, 0o600, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise _link(path) from error
                raise

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        return os.readv(fd, buffers)

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        return os.writev(fd, buffers)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def replace(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        with self._folder(target.parent) as folder:
            os.replace(source.name, target.name, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, path: Path) -> None:
        with self._folder(path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)

    def mkdir(self, path: Path, *, parents: bool) -> None:
        root = self._root
        if root is None or path == root or not path.is_relative_to(root):
            path.mkdir(mode=0o700, parents=parents, exist_ok=True)
            return
        if parents:
            root.mkdir(parents=True, exist_ok=True)
            for above in reversed(path.parents[: len(path.relative_to(root).parts) - 1]):
                self._make_folder(above, 0o777)
        self._make_folder(path, 0o700)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        with self._folder(path.parent) as folder:
            os.utime(path.name, ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)

    def scan(self, path: Path) -> list[FileEntry]:
        found = []
        with self._folder(path) as folder, os.scandir(folder) as entries:
            for entry in entries:
                is_file = entry.is_file(follow_symlinks=False)
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                size = status.st_size if is_file else 0
                is_folder = entry.is_dir(follow_symlinks=False)
                found.append(FileEntry(entry.name, is_file, is_folder, size, status.st_mtime_ns))
        return found

    def _make_folder(self, path: Path, mode: int) -> None:
        with self._folder(path.parent) as above, contextlib.suppress(FileExistsError):
            os.mkdir(path.name, mode, dir_fd=above)
        with self._folder(path):
            pass  # an existing entry must be this user's folder

    @contextlib.contextmanager
    def _folder(self, path: Path) -> Iterator[int]:
        """Yield a descriptor of the folder, opened from the root without following links."""
        root = self._root
        if root is None or not path.is_relative_to(root):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            names: tuple[str, ...] = ()
        else:
            fd = os.open(root, _FOLDER)
            names = path.relative_to(root).parts
        try:
            here = root
            if here is not None and self._private:
                _check_root(os.fstat(fd), here)
            for name in names:
                assert here is not None
                here = here / name
                inner = _open_folder(name, fd, here)
                os.close(fd)
                fd = inner
                if self._private:
                    _check_own(os.fstat(fd), here)
            yield fd
        finally:
            os.close(fd)


def _open_folder(name: str, above: int, path: Path) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except NotADirectoryError as error:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise _link(path) from error
        raise


def _link(path: Path) -> OSError:
    return OSError(
        errno.ELOOP,
        f"{path} is a symbolic link; expected none in a store, because it leads reads and writes elsewhere: "
        "find out who made it, and remove it",
        str(path),
    )


def _check_own(status: os.stat_result, path: Path) -> None:
    me = os.geteuid()
    if status.st_uid != me:
        raise PermissionError(
            errno.EPERM,
            f"the folder {path} belongs to user {status.st_uid}; expected one of user {me}, who runs this, "
            "because its owner can change the KV in it: name another directory, or run as its owner",
            str(path),
        )
    if status.st_mode & _BY_OTHERS:
        raise PermissionError(
            errno.EPERM,
            f"the folder {path} has mode {stat.S_IMODE(status.st_mode):04o}; expected one that only its "
            "owner can write, because others can change the KV in it: name another directory, or delete what "
            f"others wrote in it and run chmod go-w {path}",
            str(path),
        )


def _check_root(status: os.stat_result, path: Path) -> None:
    """Raise ``PermissionError`` for a root of another user (except user 0) in which other users can rename
    this user's entries."""
    if status.st_uid in (0, os.geteuid()) or status.st_mode & stat.S_ISVTX or not status.st_mode & _BY_OTHERS:
        return
    raise PermissionError(
        errno.EPERM,
        f"the folder {path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; "
        f"expected one of user {os.geteuid()} or of root, or one that others cannot write, because others "
        "can replace the store in it: name another directory",
        str(path),
    )
