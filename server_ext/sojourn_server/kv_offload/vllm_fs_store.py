"""A ``BlockStore`` in the folders of vLLM's ``fs`` offloading tier, shared with stock vLLM engines.

Layout of vLLM 0.32 (``vllm/v1/kv_offload/file_mapper.py`` and ``tiering/fs``); a test checks it:

    ROOT/MODEL_<12 hex digits>/config.json               the fields whose SHA-256 gives the digits
    ROOT/MODEL_<12 hex digits>_r0/abc/de_g0/abcde….bin   a block; its name is the key in hex

A file holds one chunk of vLLM's: a Full Block (one layer after the other, and within a layer one engine block
after the other), padded to whole pages. So the tier's ``block_size`` must be ``KvIdentity.block_tokens``.

There is no header and no checksum, so a file of the right size is trusted, as in vLLM. A file of another size
is removed. Neither vLLM nor this store limits the folder's size, so the operator must clean it up. This
module imports no vLLM.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from .block_file import (
    NO_SPACE,
    BlockCorrupt,
    BlockDefect,
    Buffer,
    KvIdentity,
    byte_views,
    read_all,
    write_file,
)
from .disk_store import BlockNotFound, PutOutcome, StoreError, block_payload
from .file_system import FileSystem, LocalFileSystem

PAGE_BYTES = 4096
"""Chunks are padded to a multiple of this size, vLLM's ``mmap.PAGESIZE``."""

_DIGEST_DIGITS = 12
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFsLayout:
    """The fields from which vLLM's ``FileMapper`` derives the folder's name, for one worker and one cache
    group.

    ``parallel_agnostic``: vLLM's field of this name, which depends on the attention layout. With one worker
    it affects only the folder's name.
    """

    model_name: str
    dtype: str
    engine_block_tokens: int
    blocks_per_file: int
    layer_names: Sequence[str]
    parallel_agnostic: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a later vLLM release adds to ``config.json``."""

    def fields(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        found: dict[str, Any] = {
            "model_name": self.model_name,
            "tokens_per_hash": self.engine_block_tokens,
            "blocks_per_file": self.blocks_per_file,
            **dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1),
            "dtype": self.dtype,
            "kv_cache_groups": [
                {"tokens_per_block": self.engine_block_tokens, "layer_names": list(self.layer_names)}
            ],
            "inference_engine": "vllm",
        }
        if not self.parallel_agnostic:
            found["parallel_agnostic"] = False
        return {**found, **self.extra}

    def folder(self, root: Path) -> Path:
        """Return the folder of ``config.json``. The blocks are in another folder, whose name has ``_r0``
        appended."""
        text = json.dumps(self.fields(), sort_keys=True, separators=(",", ":"))
        digits = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
        return root / f"{self.model_name.replace('/', '_')}_{digits}"

    def block_path(self, root: Path, key: bytes) -> Path:
        """Return the path of a block's file, in the first cache group."""
        name = key.hex()
        return Path(f"{self.folder(root)}_r0") / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"


class VllmFsStore:
    """A ``BlockStore`` in the folders of vLLM's ``fs`` tier. ``put`` returns ``DISK_FULL``, but not ``FULL``,
    because there is no budget."""

    def __init__(
        self,
        root: str | Path,
        identity: KvIdentity,
        layout: VllmFsLayout,
        *,
        files: FileSystem | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        """Make the folder and its ``config.json`` as vLLM does, if they are missing. Raises ``StoreError``.
        Raises ``ValueError`` if ``layout`` and ``identity`` disagree, or if there are several workers."""
        tokens = layout.engine_block_tokens * layout.blocks_per_file
        if tokens != identity.block_tokens:
            raise ValueError(
                f"files of {tokens} tokens each; expected {identity.block_tokens}, as in a Full Block"
            )
        if len(layout.layer_names) != identity.layers:
            raise ValueError(
                f"{len(layout.layer_names)} layer names; expected {identity.layers}, as in a block"
            )
        if identity.tp_size != 1:
            raise ValueError(f"vLLM's layout is supported for one worker, not for {identity.tp_size}")
        self._root = Path(os.path.realpath(root))
        self.identity = identity
        self._layout = layout
        self._files = files or LocalFileSystem()
        self._files.confine(self._root, private=False)  # stock engines of other users share the folders
        self._writer = uuid.uuid4().hex  # process ids repeat across containers
        self._numbers = count()
        self._padding = memoryview(bytes(-identity.block_bytes % page_bytes))
        self._file_bytes = identity.block_bytes + len(self._padding)
        folder = layout.folder(self._root)
        config = json.dumps(layout.fields(), indent=2, sort_keys=True).encode()
        try:
            self._files.mkdir(folder, parents=True)
            if not any(entry.name == _CONFIG for entry in self._files.scan(folder)):
                partial = self._partial(folder / _CONFIG)
                write_file(self._files, partial, [memoryview(config)], fsync=False)
                self._files.replace(partial, folder / _CONFIG)
        except OSError as error:
            raise StoreError("opening vLLM's store", folder, error) from error

    def close(self) -> None:
        """Do nothing, because the store holds no resource."""

    def leading(self, keys: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(lambda key: self._has(self._path(key)), keys))

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        path = self._path(key)
        payload = block_payload(self.identity, buffers, writable=True)
        try:
            if self._read(path, payload):
                return
        except FileNotFoundError as error:
            raise BlockNotFound(key) from error
        except OSError as error:
            raise StoreError("reading vLLM's block", path, error) from error
        with contextlib.suppress(OSError):
            self._files.unlink(path)
        raise BlockCorrupt(path, BlockDefect.LENGTH)

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers`` as the block of ``key``. ``parent`` is ignored, because the layout has no place
        for it. Returns and raises what ``BlockStore.put`` does."""
        path = self._path(key)
        payload = block_payload(self.identity, buffers, writable=False)
        try:
            return self._put(path, [*payload, *byte_views([self._padding])])
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise StoreError("writing vLLM's block", path, error) from error
            return PutOutcome.DISK_FULL

    def _put(self, path: Path, content: Sequence[memoryview]) -> PutOutcome:
        if self._has(path):
            return PutOutcome.ALREADY
        partial = self._partial(path)
        try:
            try:
                write_file(self._files, partial, content, fsync=False)
            except FileNotFoundError:
                self._files.mkdir(path.parent, parents=True)
                write_file(self._files, partial, content, fsync=False)
            self._files.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(partial)
            raise
        return PutOutcome.STORED

    def _read(self, path: Path, payload: Sequence[memoryview]) -> bool:
        """Read a block's file. Returns false if the file has the wrong size. vLLM accepts a longer file. This
        store does not, because a longer file was written with another block size."""
        fd = self._files.open(path, os.O_RDONLY)
        try:
            return self._files.size(fd) == self._file_bytes and read_all(self._files, fd, payload)
        finally:
            self._files.close(fd)

    def _has(self, path: Path) -> bool:
        """Return whether ``path`` is a file of a block's size. Raises ``StoreError`` for too many open
        files."""
        try:
            fd = self._files.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise StoreError("looking for vLLM's block", path, error) from error
            return False
        try:
            return self._files.size(fd) == self._file_bytes
        finally:
            self._files.close(fd)

    def _path(self, key: bytes) -> Path:
        return self._layout.block_path(self._root, key)

    def _partial(self, path: Path) -> Path:
        """Return a unique temporary name, because processes on several machines may write the same block."""
        return path.with_name(f"{path.name}_{self._writer}_{next(self._numbers)}.tmp")
