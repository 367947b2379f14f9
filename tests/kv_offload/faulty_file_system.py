"""A file system that fails or stalls on command, and helpers for the tests of the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kv_blocks import BLOCK_BYTES, identity, payload
from sojourn_server.kv_offload.shared_store import HEADER_BYTES, FileSystem, PutOutcome, SharedStore

FILE_BYTES = HEADER_BYTES + BLOCK_BYTES


OPERATIONS = frozenset({"read", "replace", "unlink", "mkdir", "set_mtime", "stat", "scan"})
"""Operations of ``FileSystem`` with one part. ``write`` has several."""


class FaultyFiles(FileSystem):
    """The real file system, which calls ``before`` each part of an operation, with the part's name and its
    path. If ``before`` raises, the operation raises the same error: a write may leave a part of its file."""

    def __init__(self, before: Callable[[str, Path], None] | None = None) -> None:
        self.before = before or (lambda name, path: None)

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in OPERATIONS:
            return method

        def operation(*arguments: Any) -> Any:
            self.before(name, arguments[name == "replace"])
            return method(*arguments)

        return operation

    def write(self, path: Path, content: Sequence[memoryview]) -> None:
        self.before("create", path)
        whole = b"".join(content)
        super().write(path, [memoryview(whole[: len(whole) // 2])])
        self.before("write", path)
        path.unlink()
        super().write(path, content)
        self.before("close", path)


WRITES = frozenset({"create", "write", "close", "replace", "mkdir"})
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
    return SharedStore(root, model, budget_bytes=blocks * FILE_BYTES, **options)


def put(store: SharedStore, key: bytes, parent: bytes = b"") -> PutOutcome:
    return store.put(key, [payload(key)], parent=parent)


def get(store: SharedStore, key: bytes) -> bytes:
    found = bytearray(BLOCK_BYTES)
    store.get_into(key, [found])
    return bytes(found)
