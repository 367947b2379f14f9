"""Writer of traces in the format of ``trace_reader``."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .atomic_files import write_atomically
from .trace_schema import TraceError, TraceProgram


def write_trace(path: str | Path, programs: Iterable[TraceProgram]) -> int:
    """Write one program per line, gzipped if the name ends in ``.gz``. Return the number of programs.

    The write is atomic. Equal programs give equal bytes. Raises ``TraceError`` if the file cannot be written.
    """
    path = Path(path)
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(program) for program in programs]
    data = b"".join(line + b"\n" for line in lines)
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    try:
        write_atomically({path: data}, make_folders=False)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    return len(lines)
