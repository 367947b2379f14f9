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
from .trace_schema import TraceError, TraceProgram, check_program

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Maximum length of a line (one program) in bytes; readers reject more. Decoding a line takes ten times its
length in memory."""

_ZSTD = b"\x28\xb5\x2f\xfd"
_decoder = msgspec.json.Decoder(TraceProgram)


def read_trace(path: str | Path) -> Iterator[TraceProgram]:
    """Yield the programs of a ``.jsonl`` or ``.jsonl.gz`` file in order.

    Lines are decoded lazily. Empty lines and a UTF-8 byte order mark are skipped. Raises ``TraceError``,
    which names file and line, for an invalid line, a duplicate id or a file without programs.
    """
    return (program for _, program in _numbered_programs(Path(path)))


def line_of(path: str | Path, program_id: str) -> int | None:
    """Return the line number of a program in a trace, from 1; ``None`` if the program is missing. Raises
    ``TraceError``."""
    numbered = _numbered_programs(Path(path))
    return next((number for number, program in numbered if program.program_id == program_id), None)


def _numbered_programs(path: Path) -> Iterator[tuple[int, TraceProgram]]:
    """Yield (line number from 1, program) for the programs of a trace. Raises ``TraceError``."""
    seen: dict[str, int] = {}
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if number == 1:
                    check_encoding(line, path)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; expected one program, "
                        "whose records are shorter (MAX_LINE_BYTES in traces/trace_file.py)"
                    )
                if not line.strip():
                    continue
                program = _program(line, f"{path}, line {number}")
                if program.program_id in seen:
                    raise TraceError(
                        f"{path}, line {number}: program {program.program_id!r} is already on line "
                        f"{seen[program.program_id]}"
                    )
                seen[program.program_id] = number
                yield number, program
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}, after line {number}: the gzip data is cut off or damaged: {error}"
        ) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if not seen:
        raise TraceError(f"{path}: holds no programs; expected one JSON object per line")


def check_encoding(data: bytes, path: Path) -> None:
    """Raise ``TraceError`` if a file that begins with ``data`` is UTF-16 or compressed with zstd."""
    if data.startswith(_ZSTD):
        raise TraceError(f"{path}: the file is zstd; expected plain or gzip")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TraceError(f"{path}: the file is UTF-16; expected UTF-8")


def _open(path: Path) -> BinaryIO:
    # Recognise gzip by content, not by name, because downloads may rename a trace.
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if gzipped else path.open("rb")


def _program(line: bytes, where: str) -> TraceProgram:
    try:
        program = _decoder.decode(line)
        check_program(program)
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
