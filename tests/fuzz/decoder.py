"""A decoder of bytes from outside, and input that sojourn's own programs never send it: random bytes, and
valid examples with parts exchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One entry of a table of decoders."""

    decode: Callable[[bytes, Path], Any]
    """Decodes bytes. The folder is empty, and the decoder may write only there."""
    examples: tuple[bytes, ...]
    """Valid input."""
    refused: tuple[bytes, ...] = ()
    """Refused input, from which mutations start too."""
    errors: tuple[type[Exception], ...] = ()
    """Documented errors; none for a decoder that never raises."""
    wrap: Callable[[bytes], bytes] | None = None
    """Applied after most mutations, for a compression or a checksum that would hide them from the decoder."""
    encode: Callable[[Any], bytes] | None = None
    """Encodes a decoded value. Decoding the result must give the same value."""
    large_bytes: int = 64 * 1024
    """Size of the inputs on which time is measured. It is smaller for slow readers of an operator's files."""


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


def json_bytes(document: Any) -> bytes:
    """JSON as Python writes it, with ``NaN`` and lone surrogates."""
    return json.dumps(document).encode()


LITERALS = (
    b"NaN", b"inf", b"1e999", b"-1", b"0", b"0.5", b"9223372036854775808", b"9" * 400, b"9" * 5000, b"null",
    b"true", b"[]", b"{}", b'""', b'"0"', b'"\\ud800"', b'"\\u0000"', b"1979-05-27",
    b'"' + b"x" * 5000 + b'"', b'["a","a"]', b'[[1,2],[3,4]]', b'{"a":1,"a":2}', b"[" * 3000,
    b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000,
)  # fmt: skip
"""Values that replace a valid one, in the notations of JSON, TOML and YAML."""
FRAGMENTS = (
    b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n\n", b'"', b"'", b"\\", b"{",
    b"}", b"[", b"]", b"<", b"(", b",", b":", b"=", b"#", b"../", b"\xdd\xff\xff\xff\xff", b"\x1f\x8b",
)  # fmt: skip
"""Bytes that end, open or hide something."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s\[\]{}(),:="]+')


@st.composite
def mutated_bytes(draw: st.DrawFn, examples: tuple[bytes, ...]) -> bytes:
    """An example after one to four edits of bytes, tokens or parts."""
    data = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 64)))
        match draw(st.integers(0, 7)):
            case 0 if data and start < len(data):
                data = (
                    data[:start] + bytes([data[start] ^ (1 << draw(st.integers(0, 7)))]) + data[start + 1 :]
                )
            case 1:
                data = data[:start]
            case 2:
                data = data[:start] + data[end:]
            case 3:
                inserted = draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=8))
                data = data[:start] + inserted + data[start:]
            case 4:
                data = data[:end] + data[start:end] * draw(st.integers(1, 20)) + data[end:]
            case _:
                tokens = [found.span() for found in _TOKEN.finditer(data)]
                if tokens:
                    start, end = draw(st.sampled_from(tokens))
                    other = data[slice(*draw(st.sampled_from(tokens)))]
                    data = data[:start] + draw(st.sampled_from(LITERALS) | st.just(other)) + data[end:]
    return data


def trial_inputs(decoder: Decoder) -> st.SearchStrategy[bytes]:
    """Random bytes, and examples that were changed before or after they are wrapped."""
    changed = mutated_bytes(decoder.examples + decoder.refused)
    if decoder.wrap is None:
        return changed | changed | changed | st.binary(max_size=300)
    wrapped = tuple(map(decoder.wrap, decoder.examples))
    return (
        changed.map(decoder.wrap)
        | changed.map(decoder.wrap)
        | mutated_bytes(wrapped)
        | st.binary(max_size=300)
    )


def large_inputs(example: bytes, size: int) -> dict[str, bytes]:
    """Inputs of ``size`` bytes on which a careless parser takes much time, by what they repeat."""
    parts = {
        "open lists": b"[", "open objects": b'{"a":', "quotes": b'"', "escapes": b"\\", "digits": b"9",
        "dots": b"a.", "spaces": b" ", "tables": b"[a]\n", "parentheses": b"a(", "tags": b"<tool_call>{",
        "invocations": b'<invoke name="', "fences": b"```bash\n", "zeros": b"\x00", "nested arrays": b"\x91",
        "example": example or b"x",
    }  # fmt: skip
    half = example[: len(example) // 2]
    return {
        **{name: part * (size // len(part)) for name, part in parts.items()},
        "closed in the end": b"[" * (size // 2) + b"]" * (size // 2),
        "example, then lists": half + b"[" * size,
        "example, then digits": half + b"9" * size,
    }
