"""Files of traces, one program per line, and of other JSON records, plain or gzipped."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from .atomic_files import write_atomically
from .trace_schema import TraceError, TraceProgram, check_blocks

_decoder = msgspec.json.Decoder(TraceProgram)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if gzipped. Raises ``TraceError``, which names the file."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: the gzip data is cut off or damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


_BLANK = re.compile(r"[\s,]*")
"""Between records; some writers separate them by commas."""


def read_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) for each record of a file. Each element of an array is a record. The line
    is the one on which the record or its array begins. Raises ``TraceError``, which names it."""
    try:
        text = read_bytes(Path(path)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text: {error.reason} at byte {error.start}") from None
    decoder, line, counted, at = json.JSONDecoder(), 1, 0, 0
    while (blank := _BLANK.match(text, at)) and blank.end() < len(text):
        line += text.count("\n", counted, blank.end())
        counted = blank.end()
        try:
            record, at = decoder.raw_decode(text, counted)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {line}: not JSON: {error}") from None
        yield from ((line, one) for one in (record if isinstance(record, list) else [record]))


def read_trace(path: str | Path) -> Iterator[TraceProgram]:
    """Yield the programs of a ``.jsonl`` or ``.jsonl.gz`` file in order. Lines are decoded lazily; empty ones
    are skipped. Raises ``TraceError``, which names file and line, also for a duplicate id or no program."""
    seen: dict[str, int] = {}
    data = read_bytes(Path(path)).removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                program = _decoder.decode(line)
                check_blocks(program)
            except (TraceError, msgspec.ValidationError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                expected = "expected one whole program per line"
                raise TraceError(f"{path}, line {number}: not JSON: {error}; {expected}") from error
            if (first := seen.setdefault(program.program_id, number)) != number:
                name = repr(program.program_id)
                raise TraceError(f"{path}, line {number}: program {name} is already on line {first}")
            yield program
    if not seen:
        raise TraceError(f"{path}: holds no programs; expected one JSON object per line")


def write_trace(path: str | Path, programs: Iterable[TraceProgram]) -> int:
    """Write one program per line, as ``write_packed`` writes. Return the number of programs. Raises
    ``TraceError`` if the file cannot be written."""
    made = list(programs)
    try:
        write_packed(Path(path), msgspec.json.Encoder().encode_lines(made))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    return len(made)


def write_packed(path: Path, data: bytes) -> None:
    """Write a file atomically, gzipped if the name ends in ``.gz``. Equal data gives equal bytes."""
    write_atomically({path: gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data})
