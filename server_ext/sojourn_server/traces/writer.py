"""Write traces as ``reader`` reads them."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .schema import TraceError, TraceProgram
from .whole_files import write_whole


def write_trace(path: str | Path, programs: Iterable[TraceProgram]) -> int:
    """Write one program a line, gzipped where the name ends in ``.gz``; returns how many.

    The file appears whole or not at all, and the same programs make the same
    bytes. Raises ``TraceError`` where it cannot be written.
    """
    path = Path(path)
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(program) for program in programs]
    data = b"".join(line + b"\n" for line in lines)
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    try:
        write_whole({path: data}, make_folders=False)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    return len(lines)
