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
    """Files below the sources' roots whose decoding it tests."""
    decode: Callable[[bytes, Path], Any]
    """The value of some bytes. The folder is empty; only there may a decoder write."""
    examples: tuple[bytes, ...]
    """Valid input."""
    refused: tuple[bytes, ...] = ()
    """Input that is refused, and worth to be changed as well."""
    errors: tuple[type[Exception], ...] = ()
    """Documented errors; none for a decoder that never raises."""
    documents: tuple[Any, ...] = ()
    """The examples as decoded documents, where parts of those are exchanged."""
    pack: Callable[[Any], bytes] | None = None
    """Writes such a document."""
    wrap: Callable[[bytes], bytes] | None = None
    """Applied after most mutations: a compression or a checksum would hide them from the decoder."""
    encode: Callable[[Any], bytes] | None = None
    """Writes a value, so that it must be read again as the same."""
    large_bytes: int = 64 * 1024
    """Size of the inputs on which time and memory are measured; less for slow readers of own files."""


def in_file(read: Callable[[Path], Any], name: str = "input") -> Callable[[bytes, Path], Any]:
    """A decoder of files as one of bytes."""

    def decode(data: bytes, folder: Path) -> Any:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return decode


def of_text(read: Callable[[str], Any]) -> Callable[[bytes, Path], Any]:
    """A decoder of text as one of bytes; bytes that are not UTF-8 become lone surrogates."""
    return lambda data, folder: read(data.decode("utf-8", "surrogateescape"))
