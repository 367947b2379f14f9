"""Stores Full Blocks on a disk, within a budget. Every engine with the same ``KvIdentity`` reads and writes
the same files. They outlive the process and are verified when read.

A Full Block is the KV of a fixed number of tokens: one layer after the other, and within a layer one engine
block after the other. It can be divided into its layers (Layer Blocks) without a copy, so callers may pass
one buffer per layer or one for all layers. The key of a Full Block is the chain hash of its last engine
block, which identifies all tokens up to the block's end (DualPath §4.1, A.5).

    ROOT/
      3f9a0c51d2e47b68/       a store; its name has the first 16 hex digits of the digest of its identity
        manifest.json         the ``KvIdentity`` in full, for people and for errors
        a7/a7c0….kv           a block; its name is the key in hex, its folder the key's first byte
        a7/a7c0….91fe….tmp    a block being written

A block's file is a header of 128 bytes and the KV of each layer, in order. Numbers are little-endian.

    offset  size  content (offset and size in bytes)
         0     8  magic
         8     2  version of the format
        10     2  length of the key in bytes
        12     4  CRC-32 of the KV
        16     8  length of the KV in bytes
        24    16  digest of the ``KvIdentity``: a chain hash does not identify the model
        40    64  key, padded with zeros
       104    20  zeros
       124     4  CRC-32 of the first 124 bytes

Equal keys mean equal content. So engines need no lock: a block that two of them write at once gets the
content of either. A file is renamed once it is written, so a reader finds a whole file or none. If the
machine fails, a renamed file may lack bytes; its length or a checksum reveals that.

A file's modification time is the time of its last use. When the files exceed the budget, the next writer
deletes the oldest ones. A block is a little older than its parent: the end of a context goes first.

KV reveals prompts and determines a model's answers, so a store belongs to one user. Its folder is made with
mode 0700 and checked once, when it is opened (``check_private``). A user who can rename folders in the
store's root can replace the store later. So choose one that others cannot write, or a sticky one (``/tmp``).

By default a root with only stores of other identities is refused. After a change of model or block size, a
second set of blocks on the disk is usually a mistake.

Every error after the store was opened is an ``OSError`` and concerns one block, which the engine can compute
again: ``FileNotFoundError`` if there is no such block (any more), ``BlockCorrupt`` if it was damaged.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
HEADER_BYTES = 128
FULL_BLOCK_TOKENS = 64
"""Default number of tokens of a Full Block (DualPath §4.1)."""
MANIFEST = "manifest.json"
TEMPORARY_NS = 3600 * 10**9
"""Age from which a temporary file counts as left by a writer that died."""
COUNT_NS = 60 * 10**9
"""A writer lists the files again after this time, because other engines write too. Fifty thousand files take
it a quarter of a second of a core. Until then nothing is written if the disk stays full after deletions,
because other data takes the room, or if no file can be deleted."""
COUNT_SHARE = 8
"""A store lists its files again once it has written this part of the room that it found: the files of so
many engines together exceed the budget by at most one block each."""
EVICTION_SHARE = 32
"""Part of the files that are deleted at once. The files need not be listed again for each block."""
CONTEXT_NS = 600 * 10**9
"""If a block's parent has not been used for so long, the block's whole context is marked as used."""
MAX_PARENTS = 1 << 16
"""Number of written blocks whose parents a store remembers."""

_KIND = "sojourn KV store"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_MAGIC = b"sjrnKV\r\n"  # broken by any transfer that converts line ends
_FIELDS = struct.Struct("<8sHHIQ16s64s20x")
_CHECKSUM = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview
"""Memory of single bytes."""

# CRC-32 over 2 MiB: zlib 6.8 GB/s, blake2b 1.3 GB/s (EPYC, Python 3.11); blake2b would be the slowest part of
# a read from the page cache. The checksum detects torn writes and flipped bits, not forgery.


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """The properties that two engines must have in common to read each other's blocks. Others
    use different stores."""

    model: str
    """Name and revision of the weights, or their fingerprint, and all other model settings that change KV."""
    kv_dtype: str
    """Data type of the KV, and how a block's bytes are ordered on this kind of machine."""
    block_tokens: int
    """Tokens of one Full Block (the unit of storage), a multiple of the engine's block size."""
    block_bytes: int
    """Bytes of one Full Block on this rank, over all layers. Every file's payload has this size."""
    layers: int
    """Number of layers on this rank."""
    hash_scheme: str
    """Algorithm, seed and block size of the engine's prefix hashes, as in ``sha256_cbor/seed=0/16``."""
    vllm_version: str
    """vLLM's version, which determines the layout within a layer."""
    tp_rank: int = 0
    tp_size: int = 1

    def digest(self) -> bytes:
        """Return a hash of all fields, 16 bytes long. Equal fields give equal digests in every process."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


class IncompatibleStore(Exception):
    """Raised if all stores in the root are for other identities. ``differences``: (field, found, expected),
    of the most similar store."""

    advice = "Name another directory, or delete that store if its blocks are no longer wanted."

    def __init__(self, path: Path, differences: Sequence[tuple[str, Any, Any]]) -> None:
        listed = "; ".join(
            f"{name}: found {found!r:.100}, expected {expected!r:.100}"
            for name, found, expected in differences
        )
        self.what = f"the KV store {path} is for another model or configuration ({listed})"
        super().__init__(f"{self.what}. {self.advice}")
        self.differences = tuple(differences)


class BlockCorrupt(OSError):
    """Raised if a file is not the expected block. The content of the buffers that the read should have filled
    is undefined. Its ``errno`` is ``EIO``, as for a block that the disk cannot read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EIO, f"KV block {path} cannot be used: {why}")


class PutOutcome(Enum):
    STORED = "stored"
    ALREADY = "already"
    """The store already had a block of this key. The given content was ignored."""
    FULL = "full"
    """The disk, a quota or the budget is full, and deletions made no room. Nothing of the block is left."""


class FileSystem:
    """All file operations of a store; tests replace them to inject faults. Only the owner may access new
    files and folders. Methods raise ``OSError``."""

    def write(self, path: Path, content: Sequence[Buffer]) -> None:
        """Write a new file. After an error, a partly written file may remain."""
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            for part in content:
                file.write(part)

    def read(self, path: Path, buffers: Sequence[bytearray | memoryview]) -> bool:
        """Fill ``buffers`` with a file. Returns false if the file has another length."""
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != sum(map(len, buffers)):
                return False
            return all(file.readinto(part) == len(part) for part in buffers)

    def write_whole(self, path: Path, content: Sequence[Buffer]) -> None:
        """Write a file under a temporary name beside ``path``, and rename it to ``path``. Its content must
        not change meanwhile. Nothing of it is left after an error, if the temporary file can be removed."""
        temporary = path.with_suffix(f".{os.urandom(8).hex()}.tmp")
        try:
            self.write(temporary, content)
            self.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is more useful
                self.unlink(temporary)
            raise

    replace = staticmethod(os.replace)
    stat = staticmethod(os.stat)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def set_mtime(self, path: Path, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns))

    def scan(self, path: Path) -> list[tuple[int, int, str]]:
        """Return (modification time, size, path) of the files of all folders in ``path``; no links."""
        found = []
        with os.scandir(path) as folders:
            for folder in folders:
                for entry in os.scandir(folder) if folder.is_dir(follow_symlinks=False) else ():
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append((status.st_mtime_ns, status.st_size, entry.path))
        return found


def blocks_per_full(engine_block_tokens: int, block_tokens: int) -> int:
    """Return the number of engine blocks per Full Block. Raises ``ValueError`` if ``block_tokens`` is not a
    positive multiple of ``engine_block_tokens``."""
    if engine_block_tokens < 1 or block_tokens < engine_block_tokens or block_tokens % engine_block_tokens:
        blocks = f"engine blocks of {engine_block_tokens}; choose a multiple of the engine's --block-size"
        raise ValueError(f"a Full Block of {block_tokens} tokens is not a whole number of {blocks}")
    return block_tokens // engine_block_tokens


def check_root(root: Path, known: Mapping[str, Any], weights: str | None = None) -> None:
    """Raise ``IncompatibleStore`` if ``root`` has stores, but none with the fields ``known`` of an engine's
    ``KvIdentity`` and a model that begins with ``weights`` and a space; ``OSError`` if none can be made."""
    found: dict[Path, list[tuple[str, Any, Any]]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(root)):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # not a store
                manifest = json.loads((root / name / MANIFEST).read_bytes())
                if manifest.get("kind") == _KIND:
                    found[root / name] = differences = [
                        (field, manifest.get(field), value)
                        for field, value in {"format": FORMAT_VERSION, **known}.items()
                        if manifest.get(field) != value
                    ]
                    if weights is not None and not str(manifest.get("model")).startswith(f"{weights} "):
                        differences.append(("model", manifest.get("model"), f"{weights} …"))
    if found and all(found.values()):
        raise IncompatibleStore(*min(found.items(), key=lambda each: len(each[1])))
    if not found:
        parent = next(folder for folder in (root, *root.parents) if folder.exists())
        os.rmdir(tempfile.mkdtemp(dir=parent))  # /proc, for one, takes no folder, but claims to be writable


def check_private(store: Path) -> None:
    """Raise ``OSError`` if another user (except root) can change what is in the folder ``store``."""
    me, status = os.geteuid(), store.lstat()
    kind = "a link" if stat.S_ISLNK(status.st_mode) else "a folder"
    mode = stat.S_IMODE(status.st_mode)
    if kind == "a link" or status.st_uid != me or mode & 0o022:
        raise PermissionError(
            errno.EPERM,
            f"{store} is {kind} of user {status.st_uid} with mode {mode:04o}; expected a folder of "
            f"user {me}, who runs this, that only its owner can write, because others can change the KV: "
            f"name another directory, or delete what others wrote and run chmod go-w {store}",
            str(store),
        )


class SharedStore:
    """The store of one ``KvIdentity`` in a root folder, at most ``budget_bytes`` with the files of all
    engines. Thread-safe. Each call waits for the disk."""

    def __init__(
        self,
        root: str | Path,
        identity: KvIdentity,
        *,
        budget_bytes: int,
        files: FileSystem | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open or create the store of ``identity`` in ``root``. The oldest files beyond the budget and
        temporary files of dead writers are deleted. Raises ``IncompatibleStore`` and ``OSError``."""
        self.path = path = Path(os.path.realpath(root)) / identity.digest().hex()[:16]
        self.identity = identity
        self.blocks = 0
        """Number of blocks when the files were last listed."""
        self._budget_bytes = budget_bytes
        self._file_bytes = HEADER_BYTES + identity.block_bytes
        self._digest = identity.digest()
        self._files = files or FileSystem()
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        """Guards the attributes below. Held while files are listed and deleted: only writers wait."""
        self._left = 0
        """Number of files that this store may write before it lists the files again; -1 for a full disk."""
        self._counted_ns, self._count_every_ns = 0, 0
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        if not os.path.lexists(path):
            check_root(path.parent, asdict(identity))
        self._files.mkdir(path)
        check_private(path)
        if not os.path.lexists(path / MANIFEST):
            manifest = {"kind": _KIND, "format": FORMAT_VERSION, **asdict(identity)}
            content = json.dumps(manifest, indent=2).encode() + b"\n"
            self._files.write_whole(path / MANIFEST, [content])
        self._count()

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store ``has``."""
        return sum(1 for _ in takewhile(self.has, keys))

    def has(self, key: bytes) -> bool:
        """Return whether the store has a file of the right size for ``key``. A read may still find no block,
        because another engine may delete it."""
        try:
            return self._files.stat(self._path(key)).st_size == self._file_bytes
        except OSError:
            return False

    def get_into(self, key: bytes, buffers: Sequence[bytearray | memoryview]) -> None:
        """Fill ``buffers``, in order, with the block of ``key``. The block may be divided into buffers
        differently than for ``put``. Raises ``OSError``, after which the content of ``buffers`` is undefined.
        A file that is damaged or cannot be read from the disk is removed; otherwise the block would never be
        written again. One that could not be read for want of file descriptors, for instance, stays."""
        path, found = self._path(key), bytearray(HEADER_BYTES)
        try:
            if not self._files.read(path, [found, *buffers]):
                raise BlockCorrupt(path, "it is cut off, or longer than a block")
            if found != header(key, self._digest, buffers):
                raise BlockCorrupt(path, "it is damaged, or the block of another key, model or format")
        except OSError as error:
            if error.errno == errno.EIO:
                self._erase(path)
            raise
        self.touch([key])

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers``, in order, as the block of ``key``. If the store has the block, mark it as used.

        ``parent``: key of the previous block of the context; empty if there is none or if the end of the
        context is stored first. The buffers must not change meanwhile. Nothing is left after ``OSError``.
        """
        path = self._path(key)
        try:
            if self.has(key):
                self._mark_used(key, parent)
                return PutOutcome.ALREADY
            if not self._reserve():
                return PutOutcome.FULL
            self._files.mkdir(path.parent)
            content = [header(key, self._digest, buffers), *buffers]
            try:
                self._files.write_whole(path, content)
            except OSError as error:
                with self._lock:
                    if error.errno not in _NO_SPACE or not self._count(evict=True):
                        raise
                self._files.write_whole(path, content)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._left, self._counted_ns, self._count_every_ns = -1, self._clock_ns(), COUNT_NS
            return PutOutcome.FULL
        self._mark_used(key, parent)
        return PutOutcome.STORED

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the blocks of ``keys`` that exist, in context order, as used now, the end as the oldest."""
        now_ns = self._clock_ns()
        for place, key in enumerate(keys):
            with contextlib.suppress(OSError):  # a wrong order costs little
                self._files.set_mtime(self._path(key), now_ns - 1000 * place)

    # -- inside ------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / f"{name}.kv"

    def _mark_used(self, key: bytes, parent: bytes) -> None:
        """Make the block a little older than its parent. If the parent has not been used for long, mark the
        whole context as used, as far as this store remembers it."""
        context = [key]
        if parent:
            with contextlib.suppress(OSError):  # it may not be stored
                used_ns = self._files.stat(self._path(parent)).st_mtime_ns
                if self._clock_ns() - used_ns < CONTEXT_NS:
                    self._files.set_mtime(self._path(key), used_ns - 1000)
                    context = []
            with self._lock:
                self._parents[key] = parent
                if len(self._parents) > MAX_PARENTS:
                    self._parents.popitem(last=False)
                while context and (before := self._parents.get(context[-1])):
                    context.append(before)
        self.touch(context[::-1])

    def _reserve(self) -> bool:
        """Return whether one more file fits in the budget; if necessary, delete the oldest."""
        with self._lock:
            # The clock may also have been set back.
            if not self._left or not 0 <= self._clock_ns() - self._counted_ns < self._count_every_ns:
                self._count()
            has_room = self._left > 0
            self._left -= has_room
            return has_room

    def _count(self, *, evict: bool = False) -> int:
        """List all files. Delete temporary files of dead writers, and the oldest blocks if the budget has no
        room for another, or with ``evict``, because other data fills the disk. Return how many."""
        began_ns = self._clock_ns()
        blocks: list[tuple[int, int, str]] = []
        used_bytes = 0
        for mtime_ns, size, path in self._files.scan(self.path):
            if path.endswith(".kv"):
                blocks.append((mtime_ns, size, path))
            elif began_ns - mtime_ns > TEMPORARY_NS and self._erase(Path(path)):
                continue
            used_bytes += size
        self.blocks = before = len(blocks)
        if evict or used_bytes + self._file_bytes > self._budget_bytes:
            batch_bytes = max(1, before // EVICTION_SHARE) * self._file_bytes
            most_bytes = min(used_bytes, self._budget_bytes) if evict else self._budget_bytes
            for _, size, path in sorted(blocks):
                if used_bytes + batch_bytes <= most_bytes:
                    break
                if self._erase(Path(path)):
                    used_bytes -= size
                    self.blocks -= 1
        room = max(0, self._budget_bytes - used_bytes) // self._file_bytes
        self._left = min(room, max(1, room // COUNT_SHARE)) or -1
        self._counted_ns = now_ns = self._clock_ns()
        self._count_every_ns = max(COUNT_NS, 20 * (now_ns - began_ns))  # a share may list slowly
        return before - self.blocks

    def _erase(self, path: Path) -> bool:
        """Remove a file. Returns whether it is gone."""
        try:
            self._files.unlink(path)
        except OSError:
            return False
        return True


def header(key: bytes, identity: bytes, payload: Sequence[Buffer]) -> bytes:
    """Return the header of the block ``key``. ``identity``: digest of the ``KvIdentity``."""
    checksum = length = 0
    for part in payload:
        checksum, length = zlib.crc32(part, checksum), length + len(part)
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, len(key), checksum, length, identity, key)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))
