"""Trace files with one program per line, plain or gzipped: reader and writer."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from .atomic_files import write_atomically
from .trace_schema import TraceError, TraceProgram, check_blocks

_decoder = msgspec.json.Decoder(TraceProgram)


def read_trace(path: str | Path) -> Iterator[TraceProgram]:
    """Yield the programs of a ``.jsonl`` or ``.jsonl.gz`` file in order.

    Lines are decoded lazily. Empty lines and a UTF-8 byte order mark are skipped. Raises ``TraceError``,
    which names file and line, for an invalid line, a duplicate id or a file without programs.
    """
    path = Path(path)
    seen: dict[str, int] = {}
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                program = _program(line, f"{path}, line {number}")
                first = seen.setdefault(program.program_id, number)
                if first != number:
                    raise TraceError(
                        f"{path}, line {number}: program {program.program_id!r} is already on line {first}"
                    )
                yield program
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}, after line {number}: the gzip data is cut off or damaged: {error}"
        ) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if not seen:
        raise TraceError(f"{path}: holds no programs; expected one JSON object per line")


def _open(path: Path) -> BinaryIO:
    # Recognise gzip by content, not by name, because downloads may rename a trace.
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if gzipped else path.open("rb")


def _program(line: bytes, where: str) -> TraceProgram:
    try:
        program = _decoder.decode(line)
        check_blocks(program)
    except (TraceError, msgspec.ValidationError) as error:
        raise TraceError(f"{where}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # A complete line with incomplete JSON is probably part of a document that spans several lines.
        whole = "; expected one whole program per line"
        several = whole if line.endswith(b"\n") and "truncated" in str(error) else ""
        raise TraceError(f"{where}: not JSON: {error}{several}") from error
    return program


def write_trace(path: str | Path, programs: Iterable[TraceProgram]) -> int:
    """Write one program per line, gzipped if the name ends in ``.gz``. Return the number of programs.

    The write is atomic, and creates missing folders. Equal programs give equal bytes. Raises ``TraceError``
    if the file cannot be written."""
    path = Path(path)
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(program) for program in programs]
    data = b"".join(line + b"\n" for line in lines)
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    try:
        write_atomically({path: data})
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    return len(lines)
