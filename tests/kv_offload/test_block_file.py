"""The file of a Full Block: read back exactly, or refused with a reason; never anything between."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES
from kv_blocks import BLOCK_BYTES, identity, key, payload
from sojourn_server.kv_offload.block_file import (
    HEADER_BYTES,
    BlockCorrupt,
    FileSystem,
    byte_views,
    header,
    read_block,
    replace_file,
)

KEY = key(1)
DIGEST = identity().digest()


def write(path: Path, *, name: bytes = KEY, digest: bytes = DIGEST, data: bytes = payload(KEY)) -> bytes:
    """The content of the file."""
    content = byte_views([data])
    replace_file(FileSystem(), path, [memoryview(header(name, digest, content)), *content])
    return path.read_bytes()


def read(path: Path) -> bytes:
    found = bytearray(BLOCK_BYTES)
    read_block(FileSystem(), path, KEY, DIGEST, byte_views([found]))
    return bytes(found)


def refused(path: Path, why: str = "") -> None:
    with pytest.raises(BlockCorrupt, match=rf"{path} .*{why}"):
        read(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A block's file and its good content. The tests write others into it."""
    path = tmp_path_factory.mktemp("block") / "block.kv"
    return path, write(path)


def test_the_format_is_what_it_was(tmp_path: Path) -> None:
    """A store outlives releases: whoever changes these bytes raises FORMAT_VERSION."""
    content = write(tmp_path / "x.kv", name=bytes(range(20)), digest=b"d" * 16, data=b"payload")
    assert content[:HEADER_BYTES].hex() == (
        "736a726e4b560d0a" + "0100" + "1400" + "156a2c42" + "0700000000000000" + "64" * 16
        + bytes(range(20)).hex() + "00" * 44 + "00" * 20 + "60eeedbb"
    )  # fmt: skip
    assert content[HEADER_BYTES:] == b"payload"


def test_every_byte_of_a_file_is_guarded(file: tuple[Path, bytes]) -> None:
    path, good = file
    for position in range(FILE_BYTES):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x40]) + good[position + 1 :])
        refused(path)
    path.write_bytes(good)
    assert read(path) == payload(KEY)


def test_a_file_cut_off_anywhere_is_refused(file: tuple[Path, bytes]) -> None:
    path, good = file
    for length in range(FILE_BYTES):
        path.write_bytes(good[:length])
        refused(path, "cut off, or longer")
        # As a machine leaves it that died before the data was on the disk: the length right, the rest zeros.
        path.write_bytes(good[:length].ljust(FILE_BYTES, b"\0"))
        if path.read_bytes() != good:
            refused(path)
    path.write_bytes(good + b"\0")
    refused(path, "cut off, or longer")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"name": key(2)}, "another"),
        ({"name": KEY[:31]}, "another"),  # the header pads keys with zeros
        ({"name": KEY + b"\0"}, "another"),
        ({"digest": identity(kv_dtype="fp8").digest()}, "another"),
        ({"data": payload(KEY)[:-1]}, "cut off, or longer"),
    ],
)
def test_a_good_file_of_something_else_is_refused(tmp_path: Path, other: dict[str, bytes], why: str) -> None:
    write(tmp_path / "block.kv", **other)
    refused(tmp_path / "block.kv", why)


def test_the_digest_is_the_same_in_every_process_and_differs_with_every_field() -> None:
    """Pinned: a digest that changed would lose every store there is."""
    assert DIGEST.hex() == "a42f4cdb9a71d04defce67351b798aac"
    changes = {
        "model": "smol@1", "kv_dtype": "fp8", "block_tokens": 32, "block_bytes": 1, "layers": 4,
        "hash_scheme": "xxhash", "vllm_version": "0.33.0", "tp_size": 2,
    }  # fmt: skip
    digests = {identity(**{name: value}).digest() for name, value in changes.items()}
    digests.add(identity(tp_size=2, tp_rank=1).digest())
    assert len(digests) == len(changes) + 1
    assert DIGEST not in digests
