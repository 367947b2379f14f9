"""Input that sojourn's clients never send: random bytes, and valid examples with parts exchanged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

LITERALS = (
    b"NaN", b"nan", b"inf", b"-Infinity", b"1e999", b"1e308", b"-1", b"0", b"0.5",
    b"9223372036854775808", b"9" * 400, b"-" + b"9" * 400, b"9" * 5000, b"null", b"true", b"false",
    b"[]", b"{}", b'""', b'" "',
    b'"0"',
    b'"\\ud800"', b'"\\u0000"', b'"\\n"', b"1979-05-27", b"1979-05-27T07:32:00Z", b'"' + b"x" * 5000 + b'"',
    b'["a","a"]', b'[[1,2],[3,4]]', b'{"a":1,"a":2}', b"[" * 3000, b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 40 + b"]" * 40,
)  # fmt: skip
"""Values that replace a valid one, in the notations of JSON, TOML and YAML."""
FRAGMENTS = (
    b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x7f", b"\x1b[31m", b"\r\n", b"\n",
    b"\n\n",
    b'"', b"'", b"`", b"\\", b"{", b"}", b"[", b"]", b"<", b">", b"(", b")", b",", b":", b"=", b"#", b"/",
    b"../", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x1f\x8b",
)  # fmt: skip
"""Bytes that end, open or hide something."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf,
    "", " ", "0", "x" * 5000, "\x00", "\n", "\ud800", "../../x", b"", b"\xff" * 100, [], {}, [[]], [None],
    ["a", "a"],
    {"a": None}, [[0, 0]], [0.5] * 50,
)  # fmt: skip
"""Values that replace a valid one in decoded documents."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s\[\]{}(),:="]+')
MAX_EDITS = 4


@st.composite
def mutated_bytes(draw: st.DrawFn, examples: tuple[bytes, ...]) -> bytes:
    """An example after one to four edits of bytes, tokens or parts."""
    data = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, MAX_EDITS))):
        data = _EDITS[draw(st.sampled_from(sorted(_EDITS)))](draw, data)
    return data


def _span(draw: st.DrawFn, data: bytes) -> tuple[int, int]:
    start = draw(st.integers(0, len(data)))
    return start, min(len(data), start + draw(st.integers(0, 64)))


def _flip(draw: st.DrawFn, data: bytes) -> bytes:
    if not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]


def _truncate(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: draw(st.integers(0, len(data)))]


def _delete(draw: st.DrawFn, data: bytes) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + data[end:]


def _insert(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=8)) + data[at:]


def _repeat(draw: st.DrawFn, data: bytes) -> bytes:
    start, end = _span(draw, data)
    return data[:end] + data[start:end] * draw(st.integers(1, 20)) + data[end:]


def _replace_token(draw: st.DrawFn, data: bytes) -> bytes:
    tokens = [found.span() for found in _TOKEN.finditer(data)]
    if not tokens:
        return data
    start, end = draw(st.sampled_from(tokens))
    other = draw(st.sampled_from(tokens))
    return data[:start] + draw(st.sampled_from(LITERALS) | st.just(data[slice(*other)])) + data[end:]


_EDITS: dict[str, Callable[[st.DrawFn, bytes], bytes]] = {
    "flip": _flip,
    "truncate": _truncate,
    "delete": _delete,
    "insert": _insert,
    "repeat": _repeat,
    "replace": _replace_token,
    "replace again": _replace_token,
    "replace once more": _replace_token,
}


@st.composite
def mutated_document(draw: st.DrawFn, examples: tuple[Any, ...]) -> Any:
    """A decoded example with one to four values exchanged, left out or given twice."""
    document = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, MAX_EDITS))):
        paths = list(_paths(document))
        document = _edited(draw, document, draw(st.sampled_from(paths)))
    return document


def _paths(value: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(key, *path) for path in _paths(inner)]
        if len(found) > 2000:
            break
    return found


def _edited(draw: st.DrawFn, value: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return draw(st.sampled_from(VALUES))
    key, *rest = path
    changed = value.copy()
    if rest or not draw(st.booleans()):
        changed[key] = _edited(draw, value[key], tuple(rest))
    elif isinstance(value, dict):
        inner = changed.pop(key)
        if draw(st.booleans()):  # under another name
            changed[draw(st.sampled_from(["", "x", "\x00", "a" * 300, *map(str, value)]))] = inner
    else:
        changed[key : key + 1] = [changed[key]] * draw(st.sampled_from([0, 2, 20]))
    return changed


def json_bytes(document: Any) -> bytes:
    """JSON as Python writes it, with ``NaN`` and lone surrogates. Bytes become text."""
    return json.dumps(document, default=lambda value: value.decode("latin-1")).encode()


def msgpack_bytes(document: Any) -> bytes:
    """The document as msgpack. Values that msgpack cannot hold become text."""
    return msgspec.msgpack.encode(_packable(document))


def _packable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key).encode("utf-8", "replace").decode(): _packable(inner) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_packable(inner) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def large_inputs(example: bytes, size: int) -> dict[str, bytes]:
    """Inputs of ``size`` bytes on which a careless parser takes much time or memory, by the name of what they
    repeat."""
    parts = {
        "open lists": b"[",
        "open objects": b'{"a":',
        "closed lists": b"[],",
        "quotes": b'"',
        "single quotes": b"'",
        "escapes": b"\\",
        "digits": b"9",
        "dots": b"a.",
        "spaces": b" ",
        "line ends": b"\n",
        "tables": b"[a]\n",
        "lines": b"a=1\n",
        "parentheses": b"a(",
        "tags": b"<tool_call>{",
        "invocations": b'<invoke name="',
        "fences": b"```bash\n",
        "marks": b"<|",
        "keys": b'"usage"',
        "anchors": b"- &a [*a, *a]\n",
        "zeros": b"\x00",
        "ones": b"\xff",
        "nested arrays": b"\x91",
        "example": example or b"x",
    }
    whole = {name: part * (size // len(part)) for name, part in parts.items()}
    return {
        **whole,
        "closed in the end": b"[" * (size // 2) + b"]" * (size // 2),
        "dotted key": b"a." * (size // 2 - 2) + b"a=1",
        "example, then lists": example[: len(example) // 2] + b"[" * size,
        "example, then digits": example[: len(example) // 2] + b"9" * size,
        "example, then text": example[: len(example) // 2] + b"x" * size,
    }
