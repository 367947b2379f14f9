"""A decoder of bytes from outside, as the tests of this folder see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_MESSAGE_CHARS = 1000
"""Longest text of an error. The longest ones list the fields or names that were expected."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One entry of the table ``DECODERS``."""

    modules: tuple[str, ...]
    """Files, below the sources' roots, whose decoding this entry tests."""
    decode: Callable[[bytes, Path], Any]
    """Decodes bytes. The folder is empty, and the decoder may write only there."""
    examples: tuple[bytes, ...]
    """Valid input."""
    refused: tuple[bytes, ...] = ()
    """Refused input that mutations also start from."""
    errors: tuple[type[Exception], ...] = ()
    """Documented errors; none for a decoder that never raises."""
    documents: tuple[Any, ...] = ()
    """The examples as decoded documents, if mutations exchange parts of documents."""
    pack: Callable[[Any], bytes] | None = None
    """Encodes one of ``documents``."""
    wrap: Callable[[bytes], bytes] | None = None
    """Applied after most mutations, for a compression or a checksum that would hide them from the decoder."""
    encode: Callable[[Any], bytes] | None = None
    """Encodes a decoded value. Decoding the result must give the same value."""
    large_bytes: int = 64 * 1024
    """Size of the inputs on which time and memory are measured. It is smaller for slow readers of sojourn's
    own files."""


def in_file(read: Callable[[Path], Any], name: str = "input") -> Callable[[bytes, Path], Any]:
    """Turn a decoder of files into a decoder of bytes."""

    def decode(data: bytes, folder: Path) -> Any:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return decode


def of_text(read: Callable[[str], Any]) -> Callable[[bytes, Path], Any]:
    """Turn a decoder of text into a decoder of bytes. Bytes that are not UTF-8 become lone surrogates."""
    return lambda data, folder: read(data.decode("utf-8", "surrogateescape"))
