"""Reader of files with JSON records: one per line, one after the other, or in arrays; gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..trace_file import check_encoding
from ..trace_schema import TraceError

_BLANK = " \t\r\n,"
"""Characters allowed between records; some writers separate them by commas."""


def read_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) for each record of a file. Each element of an array is a record.

    The line is the one on which the record or its array begins. Raises ``TraceError``, which names file and
    line, for a file that cannot be read, is cut off, or is not JSON.
    """
    path = Path(path)
    text = _text(path)
    decoder = json.JSONDecoder()
    at, line, counted = 0, 1, 0
    while True:
        while at < len(text) and text[at] in _BLANK:
            at += 1
        if at >= len(text):
            return
        line += text.count("\n", counted, at)
        counted = at
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {line}: not JSON: {_reason(error)}") from None
        if isinstance(record, list):
            yield from ((line, element) for element in record)
        else:
            yield line, record


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        check_encoding(data, path)
        return data.decode("utf-8-sig")
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise TraceError(f"{path}: the gzip data is damaged: {error}") from None
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: the gzip data is cut off or damaged: {error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text: {error.reason} at byte {error.start}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (line {error.lineno}, column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
