"""A file system that fails, transfers less or stalls on command, and helpers for the tests of the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kv_blocks import BLOCK_BYTES, identity, payload
from sojourn_server.kv_offload.block_file import HEADER_BYTES
from sojourn_server.kv_offload.file_system import FileEntry, FileSystem
from sojourn_server.kv_offload.shared_store import PutOutcome, SharedStore

FILE_BYTES = HEADER_BYTES + BLOCK_BYTES


class FaultyFiles(FileSystem):
    """The real file system, which calls ``before`` each operation and transfers at most ``max_bytes`` at a
    time.

    ``before`` gets the operation's name and its path (for a descriptor, the path of its file). If ``before``
    raises, the operation raises the same error.
    """

    def __init__(
        self, before: Callable[[str, Path], None] | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.before = before or (lambda name, path: None)
        self.max_bytes = max_bytes
        self.paths: dict[int, Path] = {}
        """Open descriptors and their paths."""

    def open(self, path: Path, flags: int) -> int:
        self.before("create" if flags & os.O_CREAT else "open", path)
        fd = super().open(path, flags)
        self.paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        path = self.paths.pop(fd)
        super().close(fd)  # like the real one, which frees the descriptor even if it fails
        self.before("close", path)

    def size(self, fd: int) -> int:
        self.before("size", self.paths[fd])
        return super().size(fd)

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self.before("readv", self.paths[fd])
        return super().readv(fd, self._short(buffers))

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self.before("writev", self.paths[fd])
        return super().writev(fd, self._short(buffers))

    def replace(self, source: Path, target: Path) -> None:
        self.before("replace", target)
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        super().unlink(path)

    def mkdir(self, path: Path, *, parents: bool) -> None:
        self.before("mkdir", path)
        super().mkdir(path, parents=parents)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        self.before("set_mtime", path)
        super().set_mtime(path, mtime_ns)

    def stat(self, path: Path) -> tuple[int, int]:
        self.before("stat", path)
        return super().stat(path)

    def scan(self, path: Path) -> list[FileEntry]:
        self.before("scan", path)
        return super().scan(path)

    def _short(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        if self.max_bytes is None:
            return list(buffers)
        short, room = [], self.max_bytes
        for view in buffers:
            short.append(view[:room])
            room -= len(short[-1])
        return short


WRITES = frozenset({"create", "writev", "close", "replace", "mkdir"})
"""Operations that a full disk can refuse."""


class FailAt:
    """Raise ``code`` at the ``at``-th operation (from 0) of those in ``names``, and at all later ones."""

    def __init__(self, names: frozenset[str], code: int, at: int = 0) -> None:
        self.names = names
        self.code = code
        self.at = at
        self.seen = 0

    @property
    def fired(self) -> bool:
        return self.seen > self.at

    def __call__(self, name: str, path: Path) -> None:
        if name in self.names:
            self.seen += 1
            if self.fired:
                raise OSError(self.code, os.strerror(self.code), str(path))


def broken(*names: str, code: int = errno.EIO) -> FailAt:
    return FailAt(frozenset(names), code)


def files_below(path: Path) -> list[str]:
    """Names of the blocks' files, including half-written files."""
    return sorted(file.name for file in path.glob("*/*"))


def open_store(root: Path, blocks: int = 10, **options: Any) -> SharedStore:
    model = options.pop("model", identity())
    return SharedStore.open(root, model, budget_bytes=blocks * FILE_BYTES, **options)


def put(store: SharedStore, key: bytes, parent: bytes = b"") -> PutOutcome:
    return store.put(key, [payload(key)], parent=parent)


def get(store: SharedStore, key: bytes) -> bytes:
    found = bytearray(BLOCK_BYTES)
    store.get_into(key, [found])
    return bytes(found)
