"""The file format of one Full Block: the KV of all layers for a fixed number of tokens. Also the file
operations of a store.

A file's name is the block's key in hex. The key is the chain hash of all tokens up to the block's end.

Format
------
A header of 128 bytes, then the payload: the KV of each layer, in order. Numbers are little-endian.

    offset  size  content (offset and size in bytes)
         0     8  magic
         8     2  version of the format
        10     2  length of the key in bytes
        12     4  CRC-32 of the payload
        16     8  length of the payload in bytes
        24    16  digest of the ``KvIdentity``
        40    64  key, padded with zeros
       104    20  zeros
       124     4  CRC-32 of the first 124 bytes

A chain hash identifies tokens, not the model that computed their KV. The header therefore has the digest of
the ``KvIdentity``, and a file copied from another model's store is refused. If the machine fails, a renamed
file may lack bytes; its length or a checksum reveals that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

FORMAT_VERSION = 1
HEADER_BYTES = 128

_MAGIC = b"sjrnKV\r\n"  # broken by any transfer that converts line ends
_FIELDS = struct.Struct("<8sHHIQ16s64s20x")
_CHECKSUM = struct.Struct("<I")

# CRC-32 over 2 MiB: zlib 6.8 GB/s, blake2b 1.3 GB/s (EPYC, Python 3.11); blake2b would be the slowest part of
# a read from the page cache. The checksum detects torn writes and flipped bits, not forgery.


class BlockCorrupt(OSError):
    """Raised if a file is not the expected block. The content of the buffers that the read should have filled
    is undefined. Its ``errno`` is ``EIO``, as for a block that the disk cannot read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EIO, f"KV block {path} cannot be used: {why}")


class Buffer(Protocol):
    """Contiguous memory: bytes, bytearray, memoryview, a numpy array, a CPU tensor's ``numpy()``."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


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


def byte_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Return the memory of ``buffers`` as bytes, in order, without a copy. Empty buffers are left out."""
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def replace_file(files: FileSystem, path: Path, content: Sequence[memoryview]) -> None:
    """Write a file under a temporary name beside ``path``, and rename it to ``path``. Raises ``OSError``;
    nothing of the file is left then, if the temporary file could be removed. A block's file consists of
    ``header`` and its payload, which must not change meanwhile."""
    temporary = path.with_suffix(f".{os.urandom(8).hex()}.tmp")
    try:
        files.write(temporary, content)
        files.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is more useful
            files.unlink(temporary)
        raise


def read_block(
    files: FileSystem, path: Path, key: bytes, identity: bytes, payload: Sequence[memoryview]
) -> None:
    """Read the payload of the file ``path`` into ``payload``. Check that the file is the intact block of
    ``key`` and of ``identity``, the digest of a ``KvIdentity``.

    Raises ``OSError``, also as ``BlockCorrupt``. The content of ``payload`` is undefined then."""
    found = bytearray(HEADER_BYTES)
    if not files.read(path, [memoryview(found), *payload]):
        raise BlockCorrupt(path, "it is cut off, or longer than a block")
    if found != header(key, identity, payload):
        raise BlockCorrupt(path, "it is damaged, or the block of another key, model or format")


def header(key: bytes, identity: bytes, payload: Sequence[memoryview]) -> bytearray:
    """Return the header of the block ``key``. ``identity``: digest of the ``KvIdentity``."""
    checksum = length = 0
    for view in payload:
        checksum, length = zlib.crc32(view, checksum), length + view.nbytes
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, len(key), checksum, length, identity, key)
    return bytearray(fields + _CHECKSUM.pack(zlib.crc32(fields)))
